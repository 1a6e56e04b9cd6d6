"""`bench gather`: the all-gather of updated parameters, raw and exact, in turn.

The parameters are synthetic: normal weights and a step of Adam. First every rank holds the bits
before the step; then each owner writes its shard as the step leaves it, all ranks gather, and their
bits are compared. The next gather's shards are those before the step again, and so on in turn. The
first gather of a bucket is raw, because no rank has old bits yet.

On virtual ranks `time_us` and `raw_us` are the alpha-beta clock's, in which local work takes no
time. `encode_us` and `decode_us` are this machine's, measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any

import torch

from megatron_sparse.bench.codec.parameters import synthetic
from megatron_sparse.bench.exchange.frame import Bench
from megatron_sparse.bench.exchange.frame import run as run_bench
from megatron_sparse.bench.exchange.options import GatherSweep
from megatron_sparse.bench.options import check_arguments
from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.formats.message import VALUE_DTYPES
from megatron_sparse.parameters.gather import ExactGather, Way
from megatron_sparse.parameters.price import several_levels
from megatron_sparse.recording import GatherRecord, NullSink
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.run.rows import CellRow, cell
from megatron_sparse.telemetry.quantities import ratio
from megatron_sparse.transport import Topology, Transport, VirtualCluster

FLAT, PER_NODE = "flat", "per-node"
"""Every record to every rank, or to each other node once, where nodes have several ranks."""
MEASURED = ("encode_us", "decode_us", "wire_bytes", "message_bytes")
"""What a rank measures of a gather."""


@dataclass(frozen=True)
class GatherCase:
    """The learning rate of the step, and the way (`FLAT` or `PER_NODE`) of the records."""

    rate: float
    way: str


def cases_of(sweep: GatherSweep, nodes: Sequence[int]) -> list[GatherCase]:
    """The cases that these nodes, the node of each rank, have."""
    ways = (FLAT, PER_NODE) if several_levels(nodes) else (FLAT,)
    return [GatherCase(*each) for each in product(sweep.rates, ways)]


@dataclass(kw_only=True)
class GatherRow(CellRow):
    """One case. Times are medians over the rounds of the slowest rank's, in microseconds."""

    rate: float = cell("learning rate of the step", ">8g lr")
    dtype: str = cell("of the parameters", ">5")
    way: str = cell("`flat` or `per-node`", "<8")
    numel: int = cell("parameters of the bucket", ">10")
    world_size: int = cell("ranks")
    nodes: int = cell("that they are on")
    transport: str = cell(
        "`gloo`, `nccl` or `virtual`: times are an alpha-beta model's, without local work"
    )
    bits: float = cell("of the busiest rank's record, for each parameter of its shard", ">6.2f")
    time_us: float = cell(
        "from the new shard to all new parameters, encoding and decoding included",
        ">10.0f time(us)",
    )
    raw_us: float = cell("of the backend's own all-gather, in turn with it", ">10.0f raw(us)")
    speedup: float | None = cell("`raw_us` over `time_us`", ">8.2f")
    encode_us: float = cell("of the ranks' mean, as `decode_us`", ">10.0f encode(us)")
    decode_us: float = cell("on one processor core for each rank", ">10.0f decode(us)")
    wire_bytes: float = cell("sent by the busiest rank", ">11.0f wire(B)")
    raw_bytes: float = cell("that each rank of a ring sends", ">11.0f raw(B)")
    wrong: int = cell("parameters, on all ranks, with other bits than their owners'", ">6 #wrong")

    @classmethod
    def of(
        cls,
        sweep: GatherSweep,
        case: GatherCase,
        nodes: Sequence[int],
        figures_nM: torch.Tensor,
        **outcome: Any,
    ) -> GatherRow:
        """Makes the row of a measured case.

        `nodes` has the node of each rank, `figures_nM` of n ranks the M figures `MEASURED`, and
        `outcome` attributes that are of all ranks together, such as `time_us`.
        """
        n = len(nodes)
        shard = -(-sweep.elements // n)  # rounded up
        of_rank = dict(zip(MEASURED, figures_nM.T.tolist(), strict=True))
        return cls(
            **vars(case),
            dtype=sweep.dtype,
            numel=shard * n,
            world_size=n,
            nodes=len(set(nodes)),
            bits=8 * max(of_rank["message_bytes"]) / shard,
            speedup=ratio(outcome["raw_us"], outcome["time_us"]),
            encode_us=mean(of_rank["encode_us"]),
            decode_us=mean(of_rank["decode_us"]),
            wire_bytes=max(of_rank["wire_bytes"]),
            raw_bytes=(n - 1) * shard * VALUE_DTYPES[sweep.dtype].itemsize,
            **outcome,
        )


class RankGather:
    """One rank's parameters, and gathers of all ranks' new shards into them.

    Gather number 0, 2, ... is of the parameters before the optimizer's step, 1, 3, ... after it.

    Attributes:
        values_N: all parameters on this rank; at first those before the step.
        own_M: this rank's shard of them, a view.
    """

    def __init__(
        self, sweep: GatherSweep, case: GatherCase, transport: Transport, progress: Progress
    ) -> None:
        n = transport.world_size
        shard = -(-sweep.elements // n)  # rounded up
        made = synthetic(shard * n, case.rate, VALUE_DTYPES[sweep.dtype])
        self._states, self._rank = (made.old_N, made.new_N), transport.rank
        self.values_N = made.old_N.to(transport.device, copy=True)
        self.own_M = self.values_N.view(n, -1)[transport.rank]
        empty_N = torch.empty(self.values_N.numel(), device=transport.device)  # no gather reads it
        bucket = Bucket("parameters", empty_N, (), CollectiveOp.REDUCE_SCATTER, n)
        # Hashes are compared every `verify_every` gathers; the bench makes fewer, so compares none.
        way = Way(verify_every=2**20, per_node=case.way == PER_NODE)
        self._gather = ExactGather(bucket, self.values_N, transport, way, progress, NullSink())

    def start(self, step: int) -> Pending:
        """Launches gather number `step`; returns at once."""
        pending = self._gather.start(step)
        self._record = pending.record
        return pending

    def write_shard(self, number: int) -> None:
        """Writes this rank's shard for a gather, as an optimizer does."""
        self.own_M.copy_(self._states[number % 2].view(-1, len(self.own_M))[self._rank])

    def wrong(self, number: int) -> int:
        """Counts the parameters whose bits are wrong after gather `number`."""
        integers = {2: torch.int16, 4: torch.int32}[self.values_N.element_size()]
        expected_N = self._states[number % 2].view(integers)
        return int((self.values_N.cpu().view(integers) != expected_N).sum())

    def measured(self) -> list[float]:
        """The figures `MEASURED` of the last gather."""
        record = self._record
        assert isinstance(record, GatherRecord), "`start` was called"
        stages = record.timer.times_us()
        return [stages["encode"], stages["decode"], record.wire_bytes, record.message_bytes]


class GatherBench(Bench[GatherSweep]):
    """See the module's docstring."""

    @classmethod
    def check(cls, cases: GatherSweep, ranks: int, *, virtual: bool) -> None:
        """See `Bench`."""
        check_arguments(cases.NAME, [("ranks", ranks, ranks > 1, "2 or more")])

    def rows(self) -> Iterator[CellRow]:
        """Measures each case; see `Bench`."""
        for case in cases_of(self._cases, self._transport.nodes):
            yield self._row(case)

    @classmethod
    def virtual_rows(cls, cases: GatherSweep, topology: Topology) -> Iterator[CellRow]:
        """See `Bench`."""
        for case in cases_of(cases, topology.nodes):
            yield _virtual_row(cases, case, topology)

    def _row(self, case: GatherCase) -> GatherRow:
        """Times exact and raw gathers in turn, and counts wrong bits. Collective."""
        sweep = self._cases
        rank_gather = RankGather(sweep, case, self._transport, self._progress)
        raw_N = torch.empty_like(rank_gather.values_N)
        rank_gather.start(0).wait()  # raw, and so not timed
        wrong = 0

        def exact(number: int) -> list[float]:
            """Gathers new shards; returns this rank's microseconds and figures `MEASURED`."""
            nonlocal wrong
            step = number + 1  # gather 0 was the raw one
            rank_gather.write_shard(step)
            time_us = self._timed(lambda: rank_gather.start(step).wait())
            wrong += rank_gather.wrong(step)
            return [time_us, *rank_gather.measured()]

        def raw(_: int) -> list[float]:
            """Returns this rank's microseconds of the backend's own all-gather."""
            all_gather = self._transport.all_gather
            return [self._timed(lambda: all_gather(raw_N, rank_gather.own_M).finish())]

        (exact_nRM, raw_nR1), _ = self._in_turn([exact, raw], sweep.warmup, sweep.iters)
        # The median over the rounds of the slowest rank's time.
        time_us = median(exact_nRM[..., 0].max(0).values.tolist())
        raw_us = median(raw_nR1[..., 0].max(0).values.tolist())
        return GatherRow.of(
            sweep,
            case,
            self._transport.nodes,
            exact_nRM[..., 1:].median(1).values,
            transport=self.backend,
            time_us=time_us,
            raw_us=raw_us,
            wrong=self._count(wrong),
        )


def _virtual_row(sweep: GatherSweep, case: GatherCase, topology: Topology) -> GatherRow:
    """Models a raw gather, then an exact one, on virtual ranks; counts wrong bits of the latter."""
    n = topology.world_size
    cluster = VirtualCluster(n, topology)
    progress = Progress(cluster.device, 0)  # takes jobs only: the cluster drives them
    ranks = [RankGather(sweep, case, transport, progress) for transport in cluster.transports]
    spent_us = []
    for number in range(2):
        began_s = cluster.modelled_s
        # All ranks launch before the cluster drives any of them.
        pending = []
        for rank in ranks:
            rank.write_shard(number)
            pending.append(rank.start(number))
        cluster.run(lambda transport, pending=pending: pending[transport.rank].run_alone())
        for each in pending:
            each.wait()
        spent_us.append((cluster.modelled_s - began_s) * 1e6)
    raw_us, time_us = spent_us  # the first gather is raw
    return GatherRow.of(
        sweep,
        case,
        topology.nodes,
        torch.tensor([rank.measured() for rank in ranks], dtype=torch.float64),
        transport="virtual",
        time_us=time_us,
        raw_us=raw_us,
        wrong=sum(rank.wrong(1) for rank in ranks),
    )


run = partial(run_bench, GatherBench)
