"""`bench stragglers`: the time that each scheme takes after the last rank arrives.

One rank is late by the requested delay. `#wrong` is counted as in `bench collectives`, the
straggler late in every other step. Cases on gradients of one size, dtype and operation make a
group: they take turns on the same gradients, and each is compared with the best dense and the best
sparse scheme of the group that does not use the straggler.

A round: all ranks leave a barrier, the straggler sleeps, and each rank notes when it begins and
when it has the sum. Time counts from the last rank's arrival to the last rank's end: a training
step waits for it. Selection is timed with the collective, on every rank: the straggler's gradient
is ready only when it arrives.

Readings of different ranks are compared, so their clocks must be one: CLOCK_MONOTONIC of one
kernel, which all processes, containers and namespaces of a machine share. Ranks of several machines
are refused, because nothing here would keep their clocks together to within a few microseconds.
Virtual ranks have one modelled clock, in which local work takes no time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_sparse.bench.exchange.case import BucketCase, cases_of
from megatron_sparse.bench.exchange.collectives import (
    VIRTUAL,
    CollectiveBench,
    VirtualRanks,
    check_memory,
)
from megatron_sparse.bench.exchange.frame import each_case
from megatron_sparse.bench.exchange.frame import run as run_bench
from megatron_sparse.bench.exchange.options import StragglerSweep
from megatron_sparse.bench.exchange.path import BucketPath
from megatron_sparse.bench.exchange.row import CaseRow
from megatron_sparse.bench.exchange.straggler_figure import draw
from megatron_sparse.bench.rank_group import Turn
from megatron_sparse.bench.row import CellRow, Columns, cell, optional
from megatron_sparse.bench.table import show_progress
from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, skips_straggler
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.straggler import make_schedule
from megatron_sparse.straggler.cost import Cost, all_reduce_costs
from megatron_sparse.straggler.critical import dense_split
from megatron_sparse.transport import Link, Topology

RULE = "rule"
"""A row that is left to the rule of `straggler.critical`: `straggler` where it pays, else dense."""
AUTO_FACTOR = 1.5
"""An automatic delay, in reduce-scatters: long enough to hide the early ranks' work."""
LATENCY_ROUNDS, LATENCY_BYTES, DELAY_ROUNDS = 20, 8, 3
CHECK_DELAY_S = 0.05
"""How late the straggler is in every other step that is checked."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MEASURED = ("arrived_s", "ended_s", "wire_bytes", "nnz")
"""What a rank measures in a round: two readings of one clock, bytes and elements."""

Group = list[BucketCase]


def groups_of(sweep: StragglerSweep, world_size: int) -> list[Group]:
    """Cases that are compared with one another, in the order in which they are printed.

    Raises:
        ConfigError: a gradient has fewer elements than there are ranks.
    """
    like = attrgetter("op", "dtype", "numel")
    return [list(group) for _, group in groupby(cases_of(sweep, world_size), like)]


def reduce_scatter_of(group: Group) -> BucketCase:
    """The dense reduce-scatter that an automatic delay is measured by."""
    case = group[0]
    return BucketCase(CollectiveOp.REDUCE_SCATTER, "dense_ring", case.dtype, 1.0, case.numel)


def named_cases(
    sweep: StragglerSweep, group: Group, n: int, delay_s: float, link: Link
) -> list[tuple[str, BucketCase]]:
    """The cases of a group with their rows' names, and what the rule takes for this delay."""
    named, like = [(case.scheme, case) for case in group], group[0]
    if sweep.rule:
        gains = dense_split(n, like.nbytes, link, like.op).gain_s(delay_s) > 0
        taken = "straggler" if gains else "dense"
        named.append((RULE, BucketCase(like.op, taken, like.dtype, 1.0, like.numel)))
    return named


@dataclass(kw_only=True)
class StragglerRow(CaseRow):
    """One collective with one delay."""

    COLUMNS = Columns(
        "bytes >11 size(B) | count >10 | dtype >5 type | op >14 | name >18 scheme | density >8g | "
        "delay_us >10.0f delay(us) | wire_bytes >11.0f wire(B) | time_us >10.0f after(us) | "
        "p99_us >10.0f p99(us) | total_us >10.0f total(us) | bytes/time_us/1000 >7.3f algbw | "
        "wrong >6 #wrong | time_us/model_us >6.2f /model | dense_speedup >8.2f vs dense | "
        "sparse_speedup >9.2f vs sparse"
    )
    """`algbw` is GB/s of the gradient, after the straggler's arrival."""

    straggler: int = cell("the rank that is late")
    delay_us: float = cell("how late it was made")
    alpha_us: float = cell("latency of a message, measured by a small exchange, or the model's")
    late_us: float | None = optional(
        "how much later than the last but one the last rank was, in fact"
    )
    total_us: float | None = optional("from the first rank's arrival on")
    model_us: float | None = optional(
        "the alpha-beta model's time for this delay, from table 1 of StragglAR; null for schemes "
        "that are not in the table"
    )
    best_dense: str | None = optional(
        "the fastest dense scheme that does not use the straggler, in the same rounds"
    )
    best_dense_us: float | None = optional("its `time_us`")
    dense_speedup: float | None = optional("`best_dense_us` over `time_us`")
    best_sparse: str | None = optional(
        "the fastest sparse one, at this density; null for dense schemes"
    )
    best_sparse_us: float | None = optional("its `time_us`")
    sparse_speedup: float | None = optional("`best_sparse_us` over `time_us`")

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


def compare(rows: Sequence[StragglerRow]) -> None:
    """Fills in the best baselines of a group with one delay. Mutates the rows."""
    plain = [
        (row.time_us, row)
        for row in rows
        if row.time_us and row.scheme != RULE and not skips_straggler(row.carried_by)
    ]
    for row in rows:
        if not row.time_us:
            continue
        dense = [(us, it.scheme) for us, it in plain if _takes(it) is Input.DENSE]
        if dense:
            row.best_dense_us, row.best_dense = min(dense)
            row.dense_speedup = row.best_dense_us / row.time_us
        sparse = [
            (us, it.scheme)
            for us, it in plain
            if _takes(it) is Input.SPARSE and it.density == row.density
        ]
        if sparse and _takes(row) is Input.SPARSE:
            row.best_sparse_us, row.best_sparse = min(sparse)
            row.sparse_speedup = row.best_sparse_us / row.time_us


def _takes(row: StragglerRow) -> Input:
    return SCHEMES[row.carried_by].takes


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


class StragglerBench(CollectiveBench[StragglerSweep]):
    """See the module's docstring.

    Raises:
        ConfigError: the ranks are on several machines, or a delay is too long.
    """

    @classmethod
    def check(cls, cases: StragglerSweep, ranks: int, *, virtual: bool) -> None:
        """See `Bench`."""
        cases.late_rank(ranks)
        cases_of(cases, ranks)

    @classmethod
    def draw(cls, rows: Sequence[StragglerRow], folder: Path) -> list[Path]:
        """See `Bench`."""
        return draw([row.to_dict() for row in rows], folder)

    @property
    def _late_rank(self) -> int:
        return self._cases.late_rank(self.world_size)

    def rows(self) -> Iterator[CellRow]:
        """See `Bench`."""
        self._check_clocks()
        latency_us = self._round_us(LATENCY_BYTES, LATENCY_ROUNDS)
        link = Link(latency_us * 1e-6, 1 / self._wire_rate())
        for group in groups_of(self._cases, self.world_size):
            checked = [self._check(case, self._sleep) for case in each_case(group, self.rank)]
            for delay_ms in self._cases.delays_ms:
                delay_s = self._auto_delay_s(group) if delay_ms is None else delay_ms * 1e-3
                yield from self._time_group(group, checked, delay_s, link)

    @classmethod
    def virtual_rows(cls, cases: StragglerSweep, topology: Topology) -> Iterator[StragglerRow]:
        """See `Bench`."""
        n = topology.world_size
        groups = groups_of(cases, n)
        check_memory([case for group in groups for case in group], n)
        for group, delay_ms in product(groups, cases.delays_ms):
            delay_s = (delay_ms or 0.0) * 1e-3
            if delay_ms is None:
                scatter = VirtualRanks(reduce_scatter_of(group), cases, topology)
                delay_s = AUTO_FACTOR * scatter.run_timed()[0]
            named = named_cases(cases, group, n, delay_s, topology.intra)
            rows = [_virtual_row(*each, cases, topology, delay_s) for each in named]
            compare(rows)
            yield from rows

    def _check_clocks(self) -> None:
        """Refuses ranks whose monotonic clocks are not one clock."""
        kernel = BOOT_ID.read_bytes() if BOOT_ID.is_file() else str(self.rank).encode()
        digest = int.from_bytes(hashlib.blake2b(kernel, digest_size=7).digest())
        kernels = set(self._gather(torch.tensor([digest])).view(-1).tolist())
        if len(kernels) > 1:
            raise ConfigError(
                "bench stragglers: the ranks' clocks cannot be compared",
                expected="all ranks on one machine that runs Linux",
                got=f"{len(kernels)} kernels",
                remedy="measure on the test bed: --netbed --mbit R --ranks N",
            )

    def _auto_delay_s(self, group: Group) -> float:
        case = reduce_scatter_of(group)
        bucket = case.bucket(case.normal_values(self.rank).to(self._device), self.world_size)
        path = self._path(case)
        times_us = [self._whole(path, bucket, step)["total"] for step in range(1 + DELAY_ROUNDS)]
        delay_s = AUTO_FACTOR * self._median_us(times_us[1:]) * 1e-6
        if delay_s >= self._cases.timeout_s:
            raise ConfigError(
                "bench stragglers: the automatic delay is longer than a rank may wait",
                expected=f"--timeout above {delay_s:.1f} s",
                got=f"{self._cases.timeout_s:g} s",
                remedy="raise --timeout, or lower --max-bytes",
            )
        return delay_s

    def _sleep(self, step: int) -> None:
        """The straggler is late in every other step that is checked."""
        if self.rank == self._late_rank and step % 2:
            time.sleep(CHECK_DELAY_S)

    def _path(self, case: BucketCase, straggler: int | None = None) -> BucketPath:
        return super()._path(case, self._late_rank)

    def _time_group(
        self, group: Group, checked: Sequence[tuple[int, str]], delay_s: float, link: Link
    ) -> list[StragglerRow]:
        """Times the correct cases of a group in turn, and the case that the rule chooses."""
        named = named_cases(self._cases, group, self.world_size, delay_s, link)
        more = [self._check(case, self._sleep) for _, case in named[len(group) :]]
        late = late_cells(self._cases, self.world_size, delay_s, link) | self._place
        rows = [
            StragglerRow.of(case, carried_by, self.world_size, wrong, **late | {"scheme": name})
            for (name, case), (wrong, carried_by) in zip(named, [*checked, *more], strict=True)
        ]
        base_N = group[0].normal_values(self.rank).to(self._device)
        bucket = group[0].bucket(base_N.clone(), self.world_size)
        right = [index for index, row in enumerate(rows) if not row.wrong]
        turns = [self._turn(*named[index], bucket, base_N, delay_s) for index in right]
        figures, share = self._in_turn(turns, self._cases.warmup, self._cases.iters)
        for index, rounds_nRM in zip(right, figures, strict=True):
            rows[index].measured(rounds_nRM, link).set_load(share)
        compare(rows)
        return rows

    def _turn(
        self, name: str, case: BucketCase, bucket: Bucket, base_N: torch.Tensor, delay_s: float
    ) -> Turn:
        """How a row is measured; `dense` is the backend's own, without the plugin."""
        path = self._path(case)
        ring_bytes = dense_wire_bytes(bucket, bucket.grad_N.element_size())

        def turn(step: int) -> list[float]:
            sent = [ring_bytes, bucket.numel]
            bucket.grad_N.copy_(base_N)
            self._meet()
            if self.rank == self._late_rank:
                time.sleep(delay_s)
            arrived_s = time.monotonic()
            if name == "dense":
                self._dense(case, bucket.grad_N)
            else:
                record = path.run(bucket, step)
                sent = [record.wire_bytes, record.nnz]
            self._wait_for_device()
            return [arrived_s, time.monotonic(), *sent]

        return turn


def late_cells(sweep: StragglerSweep, n: int, delay_s: float, link: Link) -> dict[str, Any]:
    """The cells that all rows of one delay share."""
    late = {"straggler": sweep.late_rank(n), "delay_us": delay_s * 1e6}
    return late | {"alpha_us": link.alpha_s * 1e6}


def _virtual_row(
    name: str, case: BucketCase, sweep: StragglerSweep, topology: Topology, delay_s: float
) -> StragglerRow:
    show_progress(case.title)
    n, link, late = topology.world_size, topology.intra, sweep.late_rank(topology.world_size)
    ranks = VirtualRanks(case, sweep, topology, late, delay_s)
    wrong, cells = ranks.count_wrong(), late_cells(sweep, n, delay_s, link)
    cells |= {"scheme": name, "transport": VIRTUAL, "modelled": True}
    row = StragglerRow.of(case, ranks.carried_by, n, wrong, **cells)
    if wrong:
        return row
    ranks = VirtualRanks(case, sweep, topology, late, delay_s)
    _, records = ranks.run_timed()
    figures = [
        [[delay_s if rank == late else 0.0, ranks.clock_s[rank], record.wire_bytes, record.nnz]]
        for rank, record in enumerate(records)
    ]
    return row.measured(torch.tensor(figures, dtype=torch.float64), link)


run = partial(run_bench, StragglerBench)
