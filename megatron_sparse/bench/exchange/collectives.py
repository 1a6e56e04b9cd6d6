"""`bench collectives`: every scheme beside the backend's dense collective, as nccl-tests does it.

`#wrong` counts the elements, on small integers, that differ from the exact sum of what the ranks
sent (`case`); a row that has any is not timed.

Between processes it times what training does: `GradientReducer` with its residual, sampled
threshold, error feedback, progress thread and planner. A round is the scheme and the backend's own
dense collective, each after a barrier and on fresh values; copying the values is not timed. They
take turns at going first, so that a slowdown of the machine affects both. With `--delay-ms` the
last rank starts so much later, and time counts from its start on. For the scheme `auto` the planner
chooses another one, which carries the bucket (`carried_by`).

On virtual ranks `time_us`, `dense_us` and `network_us` are the alpha-beta clock's, in which local
work takes no time. `prune_us`, `encode_us` and `decode_us` are this machine's, measured, means over
the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_sparse.bench.exchange.case import (
    CHECK_STEPS,
    CHUNK,
    BucketCase,
    RankReducer,
    cases_of,
)
from megatron_sparse.bench.exchange.frame import Bench, with_typed_errors
from megatron_sparse.bench.exchange.frame import run as run_bench
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bench.exchange.row import MEASURED, CollectiveRow, figures_of, payload_rate
from megatron_sparse.bench.options import check_arguments
from megatron_sparse.bench.table import free_memory_bytes
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.level import NODE
from megatron_sparse.planner.link_timing import LinkSweep, complete, host_clock, ring_times
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import choose_level, virtual_groups
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.run.rows import CellRow
from megatron_sparse.transport import ProcessGroupTransport, Topology, VirtualCluster
from megatron_sparse.transport.virtual import VirtualTransport

# torch 2.13 renamed it; older ones only have the first name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LINK_REPEATS = 7
LINK_BYTES = 8 << 20
VIRTUAL = "virtual"
BYTES_AN_ELEMENT = 40
"""Memory of a virtual rank at most: gradient, input, residual (twice), sums, messages."""


class CollectiveBench(Bench[CollectiveSweep]):
    """`bench collectives` on real ranks, or on virtual ones; see the module's docstring."""

    def __init__(self, sweep: CollectiveSweep, store: Any, rank: int, world_size: int) -> None:
        super().__init__(sweep, store, rank, world_size, nccl_engine=sweep.nccl_engine)
        delay_us = sweep.delay_ms * 1e3
        # Cells that are the same in every row.
        self._fixed = {"transport": self.backend, "mbit": sweep.mbit, "delay_us": delay_us}
        # Made when a case first has level `node`: inside this rank's node, and across nodes.
        self._level_transports: list[ProcessGroupTransport] = []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for transport in self._level_transports:
            transport.close(broken=kind is not None)
        super().__exit__(kind, *rest)

    @classmethod
    def check(cls, cases: CollectiveSweep, ranks: int, *, virtual: bool) -> None:
        """Refuses NCCL's engine on virtual ranks, and cases that do not fit the number of ranks."""
        can_run = not (cases.nccl_engine and virtual)
        check_arguments(
            cases.NAME, [("nccl_engine", True, can_run, "false: virtual ranks have no NCCL")]
        )
        cases_of(cases, ranks)  # called for its errors only

    def rows(self) -> Iterator[CellRow]:
        """Checks each case, times it if no element is wrong, and yields its row; see `Bench`."""
        wire_rate = self._wire_rate()
        for case in cases_of(self._cases, self.world_size):
            wrong, carried_by = self._count_wrong(case)
            row = CollectiveRow.of(case, carried_by, self.world_size, wrong, **self._fixed)
            if not wrong:
                self._time(case, row, wire_rate)
            yield row

    @classmethod
    def virtual_rows(cls, cases: CollectiveSweep, topology: Topology) -> Iterator[CellRow]:
        """Checks each case, models its times if no element is wrong, and yields its row."""
        n = topology.world_size
        to_run = cases_of(cases, n)
        needed = max(case.numel for case in to_run) * n * BYTES_AN_ELEMENT
        # All ranks are in this process, which must not swap.
        free = free_memory_bytes()
        fewer = f"fewer: they need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
        check_arguments(cases.NAME, [("ranks", n, needed <= free, fewer)])
        for case in to_run:
            ranks = VirtualRanks(case, cases, topology)
            wrong = ranks.count_wrong()
            fixed = {"transport": VIRTUAL, "delay_us": cases.delay_ms * 1e3}
            row = CollectiveRow.of(case, ranks.carried_by, n, wrong, **fixed)
            if not wrong:
                _model(case, row, cases, topology)
            yield row

    def _wire_rate(self) -> float:
        """Payload bytes a second of each rank's link: as `--mbit` says, else measured on a ring."""
        if self._cases.mbit is not None:
            return payload_rate(self._cases.mbit)
        sweep, clock = LinkSweep((LINK_BYTES,), LINK_REPEATS, rounds=1), host_clock(self._device)
        (round_s,) = complete(ring_times(self._transport, [range(self.world_size)], sweep, clock))
        return LINK_BYTES / round_s

    def _count_wrong(self, case: BucketCase) -> tuple[int, str]:
        """Synchronises small integers, and compares results with the sum of what ranks sent.

        Returns:
            How many elements differ, on all ranks, and the scheme that carried the bucket.
        """
        rank_reducer, record = self._rank_reducer(case), None
        grad_N = torch.empty_like(case.normal_values(self.rank), device=self._device)
        bucket = case.bucket(grad_N, self.world_size)
        wrong = 0
        for step in range(CHECK_STEPS):
            integers_N = case.small_integers(self.rank, self.world_size, step).to(self._device)
            grad_N.copy_(integers_N)
            residual_N = rank_reducer.residual(bucket)
            self._delay_last_rank()
            record = rank_reducer.run(bucket, step)
            sent_N = integers_N.float() + residual_N - rank_reducer.residual(bucket)
            wrong += self._wrong_elements(case, grad_N, sent_N)
        assert record is not None, "there is a step at least"
        return self._count(wrong), record.scheme

    def _wrong_elements(self, case: BucketCase, grad_N: torch.Tensor, sent_N: torch.Tensor) -> int:
        """Counts the wrong elements among the sums that this rank gets. Collective.

        It gathers what each rank has sent, and so uses none of the reductions under test.
        """
        own = range(case.numel)[case.owned(self.rank, self.world_size)]
        # Without quantisation a rank sends small integers only: as int8 they are gathered faster.
        sent_N, wrong = sent_N if case.is_quantised else sent_N.to(torch.int8), 0
        for start in range(0, case.numel, CHUNK):
            sent_nC = self._gather(sent_N[start : start + CHUNK])
            low, high = max(start, own.start), min(start + CHUNK, own.stop)
            if low < high:  # this rank gets sums in this chunk
                own_sent = [values_C[low - start : high - start] for values_C in sent_nC]
                wrong += case.count_wrong([grad_N[low:high]], own_sent)
        return wrong

    def _time(self, case: BucketCase, row: CollectiveRow, wire_rate: float) -> None:
        """Times the scheme and the dense collective in turn, and fills in the row.

        `wire_rate` is that of this rank's link, in payload bytes a second.
        """
        sweep, rank_reducer = self._cases, self._rank_reducer(case)
        base_N = case.normal_values(self.rank).to(self._device)
        bucket = case.bucket(base_N.clone(), self.world_size)
        spare_N = base_N.clone()

        def scheme(step: int) -> list[float]:
            """Synchronises fresh values; returns this rank's figures `MEASURED`."""
            bucket.grad_N.copy_(base_N)
            records: list[BucketRecord] = []
            total_us = self._from_last_start(lambda: records.append(rank_reducer.run(bucket, step)))
            figures = figures_of(records[0], total_us)
            return [figures[name] for name in MEASURED]

        def dense(_: int) -> list[float]:
            """Microseconds of the backend's dense collective."""
            spare_N.copy_(base_N)
            return [self._from_last_start(lambda: self._dense(case, spare_N))]

        timed, row.foreign_load = self._in_turn([scheme, dense], sweep.warmup, sweep.iters)
        scheme_nRM, dense_nR1 = timed  # by rank, round and figure
        row.measured(scheme_nRM, dense_nR1.squeeze(-1), wire_rate)

    def _from_last_start(self, action: Callable[[], object]) -> float:
        """Runs the action; returns this rank's microseconds since the last rank has started it."""
        return self._timed(lambda: (self._delay_last_rank(), action())) - self._cases.delay_ms * 1e3

    def _delay_last_rank(self) -> None:
        if self.rank == self.world_size - 1:
            time.sleep(self._cases.delay_ms * 1e-3)

    def _rank_reducer(self, case: BucketCase) -> RankReducer:
        return RankReducer(case, self._cases, self._groups(case), self._progress)

    def _groups(self, case: BucketCase) -> Groups:
        """All ranks; at level `node` also this rank's node and lane across nodes. Collective."""
        config = case.config(self._cases, self.world_size)
        choice = choose_level(config, self._transport.nodes)
        if choice.level != NODE:
            return Groups(self._transport)
        if not self._level_transports:
            self._level_transports = [
                ProcessGroupTransport(ranks, self._cases.timeout_s, self._device)
                for ranks in (choice.inside(self.rank), choice.across(self.rank))
            ]
        inside, across = self._level_transports
        return Groups(self._transport, level=LevelGroups(inside, across))

    def _dense(self, case: BucketCase, values_N: torch.Tensor) -> None:
        """Runs the backend's own collective, as training without the plugin does."""
        if case.op is CollectiveOp.ALL_REDUCE:
            with_typed_errors(lambda: dist.all_reduce(values_N))
        else:
            own_M = values_N[case.owned(self.rank, self.world_size)]
            with_typed_errors(lambda: _reduce_scatter(own_M, values_N))


def _model(
    case: BucketCase, row: CollectiveRow, sweep: CollectiveSweep, topology: Topology
) -> None:
    """Fills in the figures of a row: runs its case and the dense collective on virtual ranks."""
    n = topology.world_size
    dense = BucketCase(case.op, "dense", case.dtype, 1.0, case.numel)
    dense_s, _ = VirtualRanks(dense, sweep, topology).run_timed()
    modelled_s, records = VirtualRanks(case, sweep, topology).run_timed()
    times_us = [record.timer.times_us() for record in records]  # of each rank, by stage
    mean_us = {stage: sum(of_rank[stage] for of_rank in times_us) / n for stage in times_us[0]}
    row.time_us = row.network_us = modelled_s * 1e6
    row.dense_us = dense_s * 1e6
    row.speedup = dense_s / modelled_s if modelled_s else None
    row.prune_us = mean_us["threshold"] + mean_us["prune"]
    row.encode_us, row.decode_us = mean_us["encode"], mean_us["decode"]
    row.wire_bytes = max(record.wire_bytes for record in records)
    row.inside_bytes = max(record.inside_bytes for record in records)
    selected = sum(record.nnz for record in records)
    row.sent_density = selected / sum(record.numel for record in records)


class _Outcome(NamedTuple):
    """One rank's outcome of a step: the sums that it gets, what it has sent, times and bytes."""

    result: torch.Tensor
    sent_N: torch.Tensor
    record: BucketRecord


class VirtualRanks:
    """All ranks of a case in this process, on a virtual cluster whose clock begins at 0."""

    carried_by: str
    """The scheme that carried the bucket; known after a run."""

    def __init__(self, case: BucketCase, sweep: CollectiveSweep, topology: Topology) -> None:
        self._case, self._delay_s = case, sweep.delay_ms * 1e-3
        self._cluster = VirtualCluster(topology.world_size, topology)
        # The level determines the groups of each rank.
        choice = choose_level(case.config(sweep, topology.world_size), topology.nodes)
        self._rank_reducers = [
            RankReducer(case, sweep, groups) for groups in virtual_groups(self._cluster, choice)
        ]

    def run_timed(self) -> tuple[float, list[BucketRecord]]:
        """Synchronises normal values; returns seconds from the last start, and ranks' records."""
        gradients = [self._case.normal_values(rank) for rank in range(len(self._rank_reducers))]
        outcomes = self._run(gradients, 0)
        return self._cluster.modelled_s - self._delay_s, [outcome.record for outcome in outcomes]

    def count_wrong(self) -> int:
        """Counts the wrong elements of all ranks' results in `CHECK_STEPS` steps."""
        return sum(self._wrong(step) for step in range(CHECK_STEPS))

    def _wrong(self, step: int) -> int:
        """Synchronises the small integers of one step; counts the wrong elements of all results."""
        case, n = self._case, len(self._rank_reducers)
        outcomes = self._run([case.small_integers(rank, n, step) for rank in range(n)], step)
        results = [outcome.result for outcome in outcomes]
        sent = [outcome.sent_N for outcome in outcomes]
        if case.op is CollectiveOp.ALL_REDUCE:
            return case.count_wrong(results, sent)
        wrong = 0
        for rank, result_M in enumerate(results):
            shard = case.owned(rank, n)
            wrong += case.count_wrong([result_M], [sent_N[shard] for sent_N in sent])
        return wrong

    def _run(self, gradients: list[torch.Tensor], step: int) -> list[_Outcome]:
        """Synchronises each rank's gradient; sets `carried_by`, returns each rank's outcome."""
        outcomes = self._cluster.run(
            lambda transport: self._steps(transport, gradients[transport.rank], step)
        )
        self.carried_by = outcomes[0].record.scheme
        return outcomes

    def _steps(
        self, transport: VirtualTransport, input_N: torch.Tensor, step: int
    ) -> Generator[Any, None, _Outcome]:
        """Synchronises one rank's gradient `input_N`; yields what the cluster waits for."""
        rank, n = transport.rank, len(self._rank_reducers)
        rank_reducer = self._rank_reducers[rank]
        bucket = self._case.bucket(input_N.clone(), n)  # the sum will replace the copy
        residual_N = rank_reducer.residual(bucket)
        if rank == n - 1:
            transport.charge(self._delay_s)  # the last rank starts late
        record = yield from rank_reducer.steps(bucket, step)
        # Read after the collective, which adds to the residual what `scheme.sum_bits` rounds off.
        sent_N = input_N.float() + residual_N - rank_reducer.residual(bucket)
        return _Outcome(bucket.grad_N[self._case.owned(rank, n)], sent_N, record)


run = partial(run_bench, CollectiveBench)
