"""A line of `bench stragglers`, computed from the times at which each rank began and ended.

Time counts from the last rank's arrival to the last rank's end: a training step waits for it. The
ranks' clocks must be one clock (`straggler_ranks` sees to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.row import CaseRow
from megatron_sparse.bench.stragglers.groups import is_dense_baseline, is_sparse_baseline
from megatron_sparse.bench.table import Columns
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.straggler import make_schedule
from megatron_sparse.straggler.cost import Cost, all_reduce_costs
from megatron_sparse.transport import Link

MEASURED = ("arrived_s", "ended_s", "wire_bytes", "nnz")
"""What a rank measures in a round: two readings of one clock, bytes and elements."""


@dataclass(kw_only=True)
class StragglerRow(CaseRow):
    """One collective with one delay.

    Attributes:
        straggler: the rank that is late.
        delay_us: how late it was made.
        late_us: how much later than the last but one the last rank was, in fact.
        total_us: from the first rank's arrival on.
        alpha_us: latency of a message, measured by a small exchange, or the model's.
        model_us: the alpha-beta model's time for this delay, from table 1 of StragglAR; null for
            schemes that are not in the table.
        best_dense: the fastest dense scheme that does not use the straggler, in the same rounds.
        best_dense_us: its `time_us`.
        dense_speedup: `best_dense_us` over `time_us`.
        best_sparse: the fastest sparse one, at this density; null for dense schemes.
        best_sparse_us: its `time_us`.
        sparse_speedup: `best_sparse_us` over `time_us`.
    """

    COLUMNS = Columns(
        "bytes >11 size(B) | count >10 | dtype >5 type | op >14 | name >18 scheme | density >8g | "
        "delay_us >10.0f delay(us) | wire_bytes >11.0f wire(B) | time_us >10.0f after(us) | "
        "p99_us >10.0f p99(us) | total_us >10.0f total(us) | bytes/time_us/1000 >7.3f algbw | "
        "wrong >6 #wrong | time_us/model_us >6.2f /model | dense_speedup >8.2f vs dense | "
        "sparse_speedup >9.2f vs sparse"
    )
    """`algbw` is GB/s of the gradient, after the straggler's arrival."""

    straggler: int
    delay_us: float
    alpha_us: float
    late_us: float | None = None
    total_us: float | None = None
    model_us: float | None = None
    best_dense: str | None = None
    best_dense_us: float | None = None
    dense_speedup: float | None = None
    best_sparse: str | None = None
    best_sparse_us: float | None = None
    sparse_speedup: float | None = None

    def measured(self, rounds_nRM: torch.Tensor, link: Link) -> StragglerRow:
        """Fills in times and bytes; mutates and returns the row.

        Args:
            rounds_nRM: fp64, of n ranks in R rounds the figures M of `MEASURED`.
            link: the link that the model assumes.
        """
        rounds = {name: rounds_nRM[:, :, i].numpy() for i, name in enumerate(MEASURED)}
        arrived_nR, ended_R = np.sort(rounds["arrived_s"], axis=0), rounds["ended_s"].max(axis=0)
        after_us_R = (ended_R - arrived_nR[-1]) * 1e6
        self.time_us = median(after_us_R.tolist())
        self.p99_us = float(np.percentile(after_us_R, 99))
        self.late_us = median(((arrived_nR[-1] - arrived_nR[-2]) * 1e6).tolist())
        self.total_us = median(((ended_R - arrived_nR[0]) * 1e6).tolist())
        self.wire_bytes = round(median(rounds["wire_bytes"].max(axis=0).tolist()))
        self.sent_density = float(rounds["nnz"].mean()) / self.count
        self.model_us = modelled_us(self, link)
        return self


def compare(cases: Sequence[Case], rows: Sequence[StragglerRow]) -> None:
    """Fills in the best baselines of a group with one delay. Mutates the rows.

    Args:
        cases: of the group.
        rows: one for each case, then any others of the same group and delay.
    """
    timed = [
        (row.time_us, case, row.scheme)
        for case, row in zip(cases, rows, strict=False)
        if row.time_us is not None
    ]
    dense = [(time_us, name) for time_us, case, name in timed if is_dense_baseline(case)]
    for row in rows:
        if not row.time_us:
            continue
        if dense:
            row.best_dense_us, row.best_dense = min(dense)
            row.dense_speedup = row.best_dense_us / row.time_us
        sparse = [
            (time_us, name)
            for time_us, case, name in timed
            if is_sparse_baseline(case) and case.density == row.density
        ]
        if SCHEMES[row.carried_by].takes is Input.SPARSE and sparse:
            row.best_sparse_us, row.best_sparse = min(sparse)
            row.sparse_speedup = row.best_sparse_us / row.time_us


def early_and_after(scheme: str, n: int) -> tuple[Cost, Cost] | None:
    """The early ranks' work before the straggler comes, and the work that is left then.

    All-reduces of table 1 and appendix F; None for those that have no line there.

    Example:
        >>> early_and_after("straggler", 4)  # 2 rounds of a third; 4 rounds of a third
        (Cost(rounds=2, buffers=0.6666666666666667), Cost(rounds=4, buffers=1.3333333333333333))
    """
    pairs = all_reduce_costs(n, len(make_schedule(n).rounds))
    if scheme not in pairs:
        return None
    best, worst = pairs[scheme]
    return Cost(worst.rounds - best.rounds, worst.buffers - best.buffers), best


def modelled_us(row: StragglerRow, link: Link) -> float | None:
    """Time after the arrival: the work left, plus the early work that the delay did not hide."""
    costs = early_and_after(row.carried_by, row.world_size)
    # Partial sums of narrower gradients travel in fp32, which the table does not know.
    if costs is None or row.op != CollectiveOp.ALL_REDUCE or row.dtype != "fp32":
        return None
    early_s, after_s = (cost.time_s(row.bytes, link) for cost in costs)
    return (after_s + max(0.0, early_s - row.delay_us * 1e-6)) * 1e6
