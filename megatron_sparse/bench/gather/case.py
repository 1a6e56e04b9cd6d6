"""A case of `bench gather`: parameters before and after a step, a rank's gathers, and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.bench.codec.frame import DTYPES
from megatron_sparse.bench.codec.parameters import synthetic
from megatron_sparse.bench.gather.sweep import PER_NODE, GatherSweep
from megatron_sparse.bench.table import Columns, TableRow, ratio
from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.parameters.gather import ExactGather, ExactWay
from megatron_sparse.parameters.price import several_levels
from megatron_sparse.recording import GatherRecord, NullSink
from megatron_sparse.reduction.job import Progress
from megatron_sparse.transport import Transport


@dataclass(frozen=True)
class GatherCase:
    """What is gathered, and how."""

    rate: float
    coder: str
    way: str

    @property
    def title(self) -> str:
        """For the progress line."""
        return f"lr {self.rate:g} {self.coder} {self.way}"


def cases_of(sweep: GatherSweep, nodes: Sequence[int]) -> list[GatherCase]:
    """The cases that these nodes, the node of each rank, have."""
    ways = [way for way in sweep.ways if way != PER_NODE or several_levels(nodes)]
    return [
        GatherCase(rate, coder, way)
        for rate in sweep.rates
        for coder in sweep.coders
        for way in ways
    ]


class States:
    """The parameters before and after the step, the same on every rank; steps go back and forth.

    Attributes:
        both: two tensors of n whole shards.
    """

    def __init__(self, sweep: GatherSweep, rate: float, world_size: int) -> None:
        shard = -(-sweep.elements // world_size)
        made = synthetic(shard * world_size, rate, DTYPES[sweep.dtype])
        self.both = (made.old_N, made.new_N)

    def wrong(self, values_N: torch.Tensor, number: int) -> int:
        """Parameters whose bits differ from those of a step."""
        integers = {2: torch.int16, 4: torch.int32}[values_N.element_size()]
        expected_N = self.both[number % 2]
        return int((values_N.cpu().view(integers) != expected_N.view(integers)).sum())


class LastGather(NullSink):
    """Keeps the record of the last gather."""

    record: GatherRecord

    def record_gather(self, record: GatherRecord) -> None:
        """See `RecordSink`."""
        self.record = record


class RankGather:
    """A rank's parameters and its gathers.

    Args:
        case: how.
        states: the parameters.
        transport: of the rank.
        progress: drives the gathers.

    Attributes:
        values_N: the parameters on this rank.
        gather: see `ExactGather`; the first one is raw.
        sink: has the last record.
    """

    def __init__(
        self, case: GatherCase, states: States, transport: Transport, progress: Progress
    ) -> None:
        n = transport.world_size
        self._states, self._rank = states, transport.rank
        self.values_N = states.both[0].to(transport.device, copy=True)
        self._shards = self.values_N.view(n, -1)
        empty_N = torch.empty(self.values_N.numel(), device=transport.device)
        bucket = Bucket("parameters", empty_N, (), CollectiveOp.REDUCE_SCATTER, n)
        way = ExactWay(case.coder, verify_every=2**20, per_node=case.way == PER_NODE)
        self.sink = LastGather()
        self.gather = ExactGather(bucket, self.values_N, transport, way, progress, self.sink)

    def move(self, number: int) -> None:
        """Writes the own shard, as an optimizer does."""
        shards = self._states.both[number % 2].view(self._shards.shape)
        self._shards[self._rank].copy_(shards[self._rank])


@dataclass(kw_only=True)
class GatherRow(TableRow):
    """One case. Times are medians over the rounds of the slowest rank's, in microseconds.

    Attributes:
        rate: learning rate of the step.
        coder: of the moves.
        way: `flat` or `per-node`.
        dtype: of the parameters.
        numel: parameters of the bucket.
        world_size: ranks.
        nodes: that they are on.
        transport: `gloo`, `nccl` or `virtual`.
        modelled: times are those of an alpha-beta model in which local work takes no time.
        bits: of the busiest rank's record, for each parameter of its shard.
        time_us: from the new shard to all new parameters, encoding and decoding included.
        raw_us: of the backend's own all-gather, in turn with it.
        speedup: `raw_us` over `time_us`.
        encode_us: of the ranks' mean, as `decode_us`.
        decode_us: on one processor core for each rank.
        wire_bytes: sent by the busiest rank.
        raw_bytes: that each rank of a ring sends.
        across_bytes: of all records that leave the busiest node; null where ranks share one node.
        wrong: parameters, on all ranks, with other bits than their owners'.
    """

    COLUMNS = Columns(
        "rate >8g lr | dtype >5 | coder <6 | way <8 | numel >10 | bits >6.2f | "
        "time_us >10.0f time(us) | raw_us >10.0f raw(us) | speedup >8.2f | "
        "encode_us >10.0f encode(us) | decode_us >10.0f decode(us) | wire_bytes >11.0f wire(B) | "
        "raw_bytes >11.0f raw(B) | across_bytes >11.0f across(B) | wrong >6 #wrong"
    )

    rate: float
    coder: str
    way: str
    dtype: str
    numel: int
    world_size: int
    nodes: int
    transport: str
    modelled: bool
    bits: float
    time_us: float
    raw_us: float
    speedup: float | None
    encode_us: float
    decode_us: float
    wire_bytes: float
    raw_bytes: float
    across_bytes: float | None
    wrong: int


MEASURED = ("encode_us", "decode_us", "wire_bytes", "message_bytes")


def measured(record: GatherRecord) -> list[float]:
    """A rank's figures of a gather, in the order of `MEASURED`."""
    stages = record.timer.times_us()
    return [stages["encode"], stages["decode"], record.wire_bytes, record.message_bytes]


def across_bytes(message_bytes: Sequence[float], nodes: Sequence[int], way: str) -> float | None:
    """Bytes of records that leave the busiest node; None on one node.

    Args:
        message_bytes: of each rank's record.
        nodes: the node of each rank.
        way: `flat` or `per-node`.

    Example:
        Two nodes of two ranks:
        >>> across_bytes([10, 20, 30, 40], [0, 0, 1, 1], "flat")
        140
        >>> across_bytes([10, 20, 30, 40], [0, 0, 1, 1], "per-node")
        70
    """
    names = set(nodes)
    if len(names) == 1:
        return None
    sent = []
    for name in names:
        own = sum(size for size, node in zip(message_bytes, nodes, strict=True) if node == name)
        elsewhere = sum(node != name for node in nodes)
        sent.append(own * (len(names) - 1 if way == PER_NODE else elsewhere))
    return max(sent)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all ranks together have found out; the fields are those of `GatherRow`."""

    transport: str
    modelled: bool
    time_us: float
    raw_us: float
    wrong: int


def row_of(
    sweep: GatherSweep,
    case: GatherCase,
    nodes: Sequence[int],
    figures: torch.Tensor,
    outcome: Outcome,
) -> GatherRow:
    """A row from all ranks' `measured`, [n, len(MEASURED)]."""
    n = len(nodes)
    shard = -(-sweep.elements // n)
    mean, most = figures.mean(0).tolist(), figures.max(0).values.tolist()
    return GatherRow(
        rate=case.rate,
        coder=case.coder,
        way=case.way,
        dtype=sweep.dtype,
        numel=shard * n,
        world_size=n,
        nodes=len(set(nodes)),
        bits=8 * most[3] / shard,
        speedup=ratio(outcome.raw_us, outcome.time_us),
        encode_us=mean[0],
        decode_us=mean[1],
        wire_bytes=most[2],
        raw_bytes=(n - 1) * shard * DTYPES[sweep.dtype].itemsize,
        across_bytes=across_bytes(figures[:, 3].tolist(), nodes, case.way),
        **vars(outcome),
    )
