"""A line of `bench collectives`, computed from the figures of every rank in every round.

A round's time is the slowest rank's. The stages (pruning, encoding, ...) are that rank's in the
same round, so that they and `host_us` add up to its time. Each printed figure is a median over the
rounds, so the printed ones need not add up.

The network's floor is the time that the busiest rank's bytes take at the rate of its link.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import numpy as np
import torch

from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.config.level import RANK
from megatron_sparse.recording import BUCKET_STAGES, BucketRecord
from megatron_sparse.run.rows import CellRow, cell, optional

MEASURED = ("total", *BUCKET_STAGES, "host_cpu", "wire_bytes", "inside_bytes", "nnz", "numel")
"""What a rank measures of the scheme in a round: microseconds, bytes and elements."""
PAYLOAD_SHARE = 1448 / 1514
"""Payload fraction of the bytes that Ethernet carries at an MTU of 1500."""


@dataclass(kw_only=True)
class CollectiveRow(CellRow):
    """One case of `bench collectives`.

    Times are medians over the rounds, in microseconds; null where nothing was timed. Bandwidths are
    GB/s: of the gradient, and of the sent bytes.
    """

    bytes: int = cell("of the gradient", ">11 size(B)")
    count: int = cell("elements", ">10")
    dtype: str = cell(
        "of the gradient, and of the values sent unless they have `value_bits`", ">5 type"
    )
    op: str = cell("`all_reduce` or `reduce_scatter`", ">14")
    scheme: str = cell("as asked for")
    carried_by: str = cell("that did it: another than `scheme` only for `auto`", "name >18 scheme")
    density: float = cell("as asked for", ">8g")
    value_bits: int | None = optional("in which values travel; null: whole", ">4 bits")
    sum_bits: int | None = optional("of gathered sums; null: they travel whole")
    level: str = cell("`rank` or `node`, as asked for", ">5", default=RANK)
    world_size: int = cell("ranks")
    transport: str = cell(
        "of pairwise messages: `gloo`, `nccl` or `virtual`, an alpha-beta model", default=""
    )
    mbit: int | None = optional("of each rank's link as given; null: it was measured")
    delay_us: float = cell("how late the last rank was made", default=0.0)
    wire_bytes: int | None = optional("sent by the busiest rank", ">11.0f wire(B)")
    inside_bytes: int | None = optional(
        "those of `wire_bytes` that stay inside the node, at level `node`; the rest crosses "
        "between nodes, and `sent_density` is of what crosses",
        ">11.0f inside(B)",
    )
    sent_density: float | None = optional("the fraction of elements that was selected")
    time_us: float | None = optional(
        "of the slowest rank: from dense gradient to dense sum, from the last rank's arrival on",
        ">10.0f time(us) | bytes/time_us/1000 >7.3f algbw | wire_bytes/time_us/1000 >7.3f busbw",
    )
    wrong: int = cell("elements, on all ranks, that differ from the exact sum", ">6 #wrong")
    p99_us: float | None = optional("of the slowest round but one in a hundred", ">10.0f p99(us)")
    dense_us: float | None = optional(
        "of the backend's own dense collective, in turn", ">10.0f dense(us)"
    )
    speedup: float | None = optional(
        "of the pairs of dense and scheme, the median",
        ">7.2f | network_us/network_floor_us >5.2f net/",
    )
    prune_us: float | None = optional(
        "threshold, error feedback, pruning and encoding", ">8.0f prune"
    )
    encode_us: float | None = optional("encoding sums, without the selection", ">8.0f encode")
    network_us: float | None = optional(
        "waiting for messages, and for slower and late ranks", ">8.0f network"
    )
    decode_us: float | None = optional("adding messages up", ">8.0f decode")
    host_us: float | None = optional(
        "`time_us`, and the delay where it was waited for, less the stages: the launch, the "
        "progress thread, its polling",
        ">8.0f host",
    )
    host_cpu_us: float | None = optional(
        "of the processor, spent by the progress thread: on a CPU with the codecs, on CUDA what "
        "the Python path costs the host; null for virtual ranks, which have none",
        ">8.0f cpu",
    )
    network_floor_us: float | None = optional("the least that the sent bytes take, see above")
    foreign_load: float | None = optional(
        "the share of the machine that other programs took; null where unknown"
    )

    @classmethod
    def of(
        cls, case: BucketCase, carried_by: str, world_size: int, wrong: int, **more: Any
    ) -> Self:
        """Makes the row of a checked case that is not timed yet; `more` are other attributes."""
        same_names = ("scheme", "dtype", "density", "value_bits", "sum_bits", "level")
        of_case: dict[str, Any] = {name: getattr(case, name) for name in same_names}
        of_case |= {"op": str(case.op), "count": case.numel, "bytes": case.nbytes}
        return cls(**of_case, carried_by=carried_by, world_size=world_size, wrong=wrong, **more)

    @property
    def name(self) -> str:
        """The scheme, and what carried it if that is another one."""
        same = self.carried_by == self.scheme
        return self.scheme if same else f"{self.scheme}:{self.carried_by}"

    def measured(self, scheme_nRM: torch.Tensor, dense_nR: torch.Tensor, wire_rate: float) -> None:
        """Fills in the times and bytes; mutates the row.

        `scheme_nRM`: fp64, of n ranks in R rounds the figures `MEASURED`; `dense_nR`: microseconds
        of the dense collective; `wire_rate`: payload bytes a second that a rank can send.
        """
        figures_nR = {name: scheme_nRM[:, :, i].numpy() for i, name in enumerate(MEASURED)}
        # Of each round the rank that was slowest [R], and that rank's figures, each [R].
        slowest, rounds = figures_nR["total"].argmax(axis=0), np.arange(scheme_nRM.shape[1])
        of_slowest = {name: values[slowest, rounds] for name, values in figures_nR.items()}
        total, stages = of_slowest["total"], sum(of_slowest[name] for name in BUCKET_STAGES)
        dense = dense_nR.numpy().max(axis=0)
        self.time_us, self.dense_us = _median(total), _median(dense)
        self.p99_us = float(np.percentile(total, 99))
        self.speedup = _median(dense / total)
        self.prune_us = _median(of_slowest["threshold"] + of_slowest["prune"])
        for name in ("encode", "network", "decode", "host_cpu"):
            setattr(self, f"{name}_us", _median(of_slowest[name]))
        # `total` begins when the last rank starts, but the others' stages include waiting for it.
        waited = np.where(slowest == self.world_size - 1, 0.0, self.delay_us)
        self.host_us = _median(total + waited - stages)
        self.wire_bytes, self.inside_bytes = (
            round(_median(figures_nR[name].max(axis=0))) for name in ("wire_bytes", "inside_bytes")
        )
        self.sent_density = float(figures_nR["nnz"].mean() / figures_nR["numel"].mean())
        # Bytes inside a node do not cross the rank's link.
        self.network_floor_us = 1e6 * (self.wire_bytes - self.inside_bytes) / wire_rate


def figures_of(record: BucketRecord, total_us: float) -> dict[str, float]:
    """The figures `MEASURED` of a bucket."""
    sent = {name: getattr(record, name) for name in ("wire_bytes", "inside_bytes", "nnz", "numel")}
    return {"total": total_us, **record.timer.times_us(), "host_cpu": record.host_cpu_us, **sent}


def _median(values_R: np.ndarray) -> float:
    return median(values_R.tolist())


def payload_rate(mbit: float) -> float:
    """Payload bytes a second of a link."""
    return mbit * 1e6 / 8 * PAYLOAD_SHARE
