"""A line of `bench collectives`, and how it is made from what every rank measured in every round.

The slowest rank's time counts. The stages are that rank's in the same round, so that they and
`host_us` add up to its time; each figure is a median over the rounds, so that medians need not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_sparse.bench.collectives.floor import codec_bytes
from megatron_sparse.bench.collectives.sweep import Case
from megatron_sparse.bench.table import cell
from megatron_sparse.recording import BUCKET_STAGES

MEASURED = ("total", *BUCKET_STAGES, "host_cpu", "dense", "copy", "wire_bytes", "nnz")
"""What a rank measures in a round: microseconds, bytes and elements."""

HEADER = (
    f"#{'size(B)':>10} {'count':>10} {'type':>5} {'op':>14} {'scheme':>18} {'density':>8} "
    f"{'wire(B)':>11} {'time(us)':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6} {'p99(us)':>10} "
    f"{'dense(us)':>10} {'speedup':>7} {'/floor':>6} {'net/':>5} {'prune':>8} {'encode':>8} "
    f"{'network':>8} {'decode':>8} {'host':>8} {'cpu':>8}"
)


@dataclass
class Row:
    """One case; times are medians over the rounds, in microseconds, null where nothing was timed.

    Attributes:
        op: `all_reduce` or `reduce_scatter`.
        scheme: as asked for.
        dtype: of the gradient and of the values sent.
        density: as asked for.
        count: elements.
        bytes: of the gradient.
        world_size: ranks.
        wire_bytes: sent by the busiest rank.
        time_us: from dense gradient to dense sum, of the slowest rank.
        dense_us: of the backend's own dense collective, in turn with the scheme.
        encode_us: encoding sums; encoding what is selected is part of `prune_us`.
        network_us: waiting for messages, for slower ranks too.
        decode_us: adding messages up.
        host_us: `time_us` less the stages: the launch, the progress thread, its polling.
        host_cpu_us: what the progress thread spent of the processor: on a CPU with the codecs, on
            CUDA what the Python path costs the host; null for virtual ranks, which have none.
        transport: `gloo`, `nccl` or `virtual`.
        mbit: rate of each rank's link in Mbit/s as given; null where it was measured.
        modelled: `time_us`, `dense_us` and `network_us` are those of an alpha-beta model.
        wrong: elements, on all ranks, that differ from the exact sum.
        carried_by: the scheme that did it: another than `scheme` only for `auto`.
        sent_density: what was selected, of all elements.
        prune_us: threshold, error feedback, pruning and encoding; 0 with `--no-prune`.
        copy_us: a plain copy of the gradient by all ranks at once, in turn with the scheme.
        p99_us: `time_us` of the slowest round but one in a hundred.
        speedup: of the pairs of dense and scheme, the median ratio.
        floor_us: the least that the scheme's bytes take, wire and codec; see `collective_floor`.
        network_floor_us: the wire's part of it.
        foreign_load: the share of the machine that other programs took; null where unknown.
        noisy: whether that was too much for a figure to be believed.
    """

    op: str
    scheme: str
    dtype: str
    density: float
    count: int
    bytes: int
    world_size: int
    wire_bytes: int | None
    time_us: float | None
    dense_us: float | None
    encode_us: float | None
    network_us: float | None
    decode_us: float | None
    host_us: float | None
    host_cpu_us: float | None
    transport: str
    mbit: int | None
    modelled: bool
    wrong: int
    carried_by: str
    sent_density: float | None = None
    prune_us: float | None = None
    copy_us: float | None = None
    p99_us: float | None = None
    speedup: float | None = None
    floor_us: float | None = None
    network_floor_us: float | None = None
    foreign_load: float | None = None
    noisy: bool = False

    @classmethod
    def of(
        cls, case: Case, carried_by: str, transport: str, mbit: int | None, n: int, wrong: int
    ) -> Row:
        """The row of a case that has been checked and not yet timed."""
        return cls(
            op=str(case.op),
            scheme=case.scheme,
            dtype=case.dtype,
            density=case.density,
            count=case.numel,
            bytes=case.nbytes,
            world_size=n,
            wire_bytes=None,
            time_us=None,
            dense_us=None,
            encode_us=None,
            network_us=None,
            decode_us=None,
            host_us=None,
            host_cpu_us=None,
            transport=transport,
            mbit=mbit,
            modelled=False,
            wrong=wrong,
            carried_by=carried_by,
        )

    def measured(
        self, case: Case, rounds_nRM: torch.Tensor, wire_rate: float, *, prune: bool
    ) -> Row:
        """Fills in the times; mutates and returns the row.

        Args:
            case: the row's.
            rounds_nRM: fp64, of n ranks in R rounds the figures M of `MEASURED`.
            wire_rate: payload bytes a second that a rank can send.
            prune: whether selection was timed.
        """
        rounds = {name: rounds_nRM[:, :, i].numpy() for i, name in enumerate(MEASURED)}
        slowest, every = rounds["total"].argmax(axis=0), np.arange(rounds_nRM.shape[1])
        total = rounds["total"][slowest, every]
        stage = {name: rounds[name][slowest, every] for name in BUCKET_STAGES}
        dense = rounds["dense"].max(axis=0)
        self.time_us, self.dense_us = median(total.tolist()), median(dense.tolist())
        self.p99_us = float(np.percentile(total, 99))
        self.speedup = median((dense / total).tolist())
        self.prune_us = median((stage["threshold"] + stage["prune"]).tolist())
        self.encode_us = median(stage["encode"].tolist())
        self.network_us = median(stage["network"].tolist())
        self.decode_us = median(stage["decode"].tolist())
        self.host_us = median((total - sum(stage.values())).tolist())
        self.host_cpu_us = median(rounds["host_cpu"][slowest, every].tolist())
        self.copy_us = median(rounds["copy"].max(axis=0).tolist())
        self.wire_bytes = round(median(rounds["wire_bytes"].max(axis=0).tolist()))
        nnz = float(rounds["nnz"].mean())
        self.sent_density = nnz / case.numel
        copy_rate = 2 * case.nbytes / self.copy_us
        codec = codec_bytes(
            case, self.carried_by, self.wire_bytes, nnz, self.world_size, prune=prune
        )
        self.network_floor_us = 1e6 * self.wire_bytes / wire_rate
        self.floor_us = self.network_floor_us + codec / copy_rate
        return self

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    def line(self) -> str:
        """The table's line; bandwidths in GB/s: of the gradient, and of what was sent."""
        time_us, name = self.time_us, self.scheme
        if self.carried_by != self.scheme:
            name = f"{self.scheme}:{self.carried_by}"
        stages = (
            self.prune_us,
            self.encode_us,
            self.network_us,
            self.decode_us,
            self.host_us,
            self.host_cpu_us,
        )
        return (
            f"{self.bytes:>11} {self.count:>10} {self.dtype:>5} {self.op:>14} {name:>18} "
            f"{self.density:>8g} {cell(self.wire_bytes, 11, 0)} {cell(time_us, 10, 0)} "
            f"{cell(_ratio(self.bytes, time_us, 1e-3), 7, 3)} "
            f"{cell(_ratio(self.wire_bytes, time_us, 1e-3), 7, 3)} {self.wrong:>6} "
            f"{cell(self.p99_us, 10, 0)} {cell(self.dense_us, 10, 0)} {cell(self.speedup, 7, 2)} "
            f"{cell(_ratio(time_us, self.floor_us), 6, 2)} "
            f"{cell(_ratio(self.network_us, self.network_floor_us), 5, 2)} "
            f"{' '.join(cell(stage, 8, 0) for stage in stages)}"
            f"{f'  noisy: {self.foreign_load:.0%}' if self.noisy else ''}"
        )


def in_order(figures: Mapping[str, float]) -> list[float]:
    """A round's figures in the order of `MEASURED`."""
    return [figures[name] for name in MEASURED]


def _ratio(above: float | None, below: float | None, factor: float = 1.0) -> float | None:
    return None if above is None or not below else above / below * factor
