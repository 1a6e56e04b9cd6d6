"""`bench collectives`: every scheme beside the backend's dense collective, as nccl-tests does it.

`#wrong` counts the elements, on small integers, that differ from the exact sum of what the ranks
selected; a row that has any is not timed.

Between processes it times the path that training uses: `GradientReducer` with its residual, sampled
threshold, error feedback, progress thread and planner. A round is the scheme and the backend's own
dense collective, each after a barrier and on fresh values; filling them in is not timed. They take
turns at going first, so that a slowdown of the machine affects both. With `--delay-ms` the last
rank comes so much later, and time counts from its arrival on.

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
    BucketPath,
    cases_of,
)
from megatron_sparse.bench.exchange.frame import Bench, typed
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

LINK_ROUNDS = 7
LINK_BYTES = 8 << 20
VIRTUAL = "virtual"
BYTES_AN_ELEMENT = 40
"""Most tensors that a virtual rank holds: gradient, input, residual before and after, sums,
messages."""


class CollectiveBench(Bench[CollectiveSweep]):
    """See the module's docstring."""

    def __init__(self, sweep: CollectiveSweep, store: Any, rank: int, world_size: int) -> None:
        super().__init__(sweep, store, rank, world_size, nccl_engine=sweep.nccl_engine)
        late_us = sweep.delay_ms * 1e3
        # Cells that are the same in every row.
        self._place = {"transport": self.backend, "mbit": sweep.mbit, "delay_us": late_us}
        self._level_transports: list[ProcessGroupTransport] = []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for transport in self._level_transports:
            transport.close(broken=kind is not None)
        super().__exit__(kind, *rest)

    @classmethod
    def check(cls, cases: CollectiveSweep, ranks: int, *, virtual: bool) -> None:
        """Refuses options that do not fit."""
        can_run = not (cases.nccl_engine and virtual)
        check_arguments(
            cases.NAME, [("nccl_engine", True, can_run, "false: virtual ranks have no NCCL")]
        )
        cases_of(cases, ranks)  # raises where a case does not fit

    def rows(self) -> Iterator[CellRow]:
        """Checks each case, times it if no element is wrong, and yields its row; see `Bench`."""
        wire_rate = self._wire_rate()
        for case in cases_of(self._cases, self.world_size):
            wrong, carried_by = self._check(case)
            row = CollectiveRow.of(case, carried_by, self.world_size, wrong, **self._place)
            if not wrong:
                self._time(case, row, wire_rate)
            yield row

    @classmethod
    def virtual_rows(cls, cases: CollectiveSweep, topology: Topology) -> Iterator[CellRow]:
        """Checks each case, models its times if no element is wrong, and yields its row."""
        n = topology.world_size
        to_run = cases_of(cases, n)
        needed = max(case.numel for case in to_run) * n * BYTES_AN_ELEMENT
        # All ranks are in this process: with more it would swap.
        free = free_memory_bytes()
        expected = (
            f"fewer: they need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
        )
        check_arguments(cases.NAME, [("ranks", n, needed <= free, expected)])
        for case in to_run:
            ranks = VirtualRanks(case, cases, topology)
            wrong = ranks.count_wrong()
            place = {"transport": VIRTUAL, "delay_us": cases.delay_ms * 1e3}
            row = CollectiveRow.of(case, ranks.carried_by, n, wrong, **place)
            if not wrong:
                _model(case, row, cases, topology)
            yield row

    def _wire_rate(self) -> float:
        """Payload bytes a second that each rank's link carries, measured unless it is known."""
        if self._cases.mbit is not None:
            return payload_rate(self._cases.mbit)
        sweep, clock = LinkSweep((LINK_BYTES,), LINK_ROUNDS, rounds=1), host_clock(self._device)
        (round_s,) = complete(ring_times(self._transport, [range(self.world_size)], sweep, clock))
        return LINK_BYTES / round_s

    def _check(self, case: BucketCase) -> tuple[int, str]:
        """Synchronises small integers, and compares results with the sum of what ranks sent.

        Returns:
            How many elements differ, on all ranks, and the scheme that the planner took.
        """
        path, record = self._path(case), None
        grad_N = torch.empty_like(case.normal_values(self.rank), device=self._device)
        bucket = case.bucket(grad_N, self.world_size)
        wrong = 0
        for step in range(CHECK_STEPS):
            integers_N = case.small_integers(self.rank, self.world_size, step).to(self._device)
            grad_N.copy_(integers_N)
            before_N = path.residual(bucket)
            self._arrive()
            record = path.run(bucket, step)
            # The residual keeps what this rank did not send.
            sent_N = integers_N.float() + before_N - path.residual(bucket)
            wrong += self._wrong_elements(case, grad_N, sent_N)
        assert record is not None, "there are steps"
        return self._count(wrong), record.scheme

    def _wrong_elements(self, case: BucketCase, grad_N: torch.Tensor, sent_N: torch.Tensor) -> int:
        """Counts wrong elements in this rank's part of the sum; every rank takes part.

        It gathers what all ranks sent, and so uses none of the reductions under test.
        """
        own = range(case.numel)[case.owned(self.rank, self.world_size)]
        # Unrounded values are small integers still: int8 makes the gathers short.
        sent_N, wrong = sent_N if case.rounds else sent_N.to(torch.int8), 0
        for start in range(0, case.numel, CHUNK):
            sent_nC = self._gather(sent_N[start : start + CHUNK])
            low, high = max(start, own.start), min(start + CHUNK, own.stop)
            if low < high:  # this rank owns a part of the chunk
                own_sent = [values_C[low - start : high - start] for values_C in sent_nC]
                wrong += case.count_wrong([grad_N[low:high]], own_sent)
        return wrong

    def _time(self, case: BucketCase, row: CollectiveRow, wire_rate: float) -> None:
        """Times the scheme and the dense collective in turn, and fills in the row.

        `wire_rate` is that of this rank's link, in payload bytes a second.
        """
        sweep, path = self._cases, self._path(case)
        base_N = case.normal_values(self.rank).to(self._device)
        bucket = case.bucket(base_N.clone(), self.world_size)
        spare_N = base_N.clone()

        def scheme(step: int) -> list[float]:
            """Synchronises fresh values; returns this rank's figures `MEASURED`."""
            bucket.grad_N.copy_(base_N)
            records: list[BucketRecord] = []
            total_us = self._since_last(lambda: records.append(path.run(bucket, step)))
            figures = figures_of(records[0], total_us)
            return [figures[name] for name in MEASURED]

        def dense(_: int) -> list[float]:
            """Microseconds of the backend's dense collective."""
            spare_N.copy_(base_N)
            return [self._since_last(lambda: self._dense(case, spare_N))]

        figures, row.foreign_load = self._in_turn([scheme, dense], sweep.warmup, sweep.iters)
        scheme_nRM, dense_nR1 = figures
        row.measured(scheme_nRM, dense_nR1.squeeze(-1), wire_rate)

    def _since_last(self, action: Callable[[], object]) -> float:
        """This rank's microseconds from the last rank's arrival on."""
        return self._timed(lambda: (self._arrive(), action())) - self._cases.delay_ms * 1e3

    def _arrive(self) -> None:
        if self.rank == self.world_size - 1:
            time.sleep(self._cases.delay_ms * 1e-3)

    def _path(self, case: BucketCase) -> BucketPath:
        return BucketPath(case, self._cases, self._groups(case), self._progress)

    def _groups(self, case: BucketCase) -> Groups:
        """All ranks, and at level `node` this rank's node and lane. Collective."""
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
        """The collective of training without the plugin."""
        if case.op is CollectiveOp.ALL_REDUCE:
            typed(lambda: dist.all_reduce(values_N))
        else:
            own_M = values_N[case.owned(self.rank, self.world_size)]
            typed(lambda: _reduce_scatter(own_M, values_N))


def _model(
    case: BucketCase, row: CollectiveRow, sweep: CollectiveSweep, topology: Topology
) -> None:
    """Runs the case and its dense collective on virtual ranks, and fills in the row's figures."""
    n = topology.world_size
    dense = BucketCase(case.op, "dense", case.dtype, 1.0, case.numel)
    dense_s = VirtualRanks(dense, sweep, topology).run_timed()[0]
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
    """A rank's outcome of a step: its part of the result, its contribution, and what it sent."""

    result: torch.Tensor
    sent_N: torch.Tensor
    record: BucketRecord


class VirtualRanks:
    """All ranks of a case, on a cluster whose clock begins at 0.

    Attributes:
        carried_by: the scheme that the planner took; known after a run.
    """

    carried_by: str

    def __init__(self, case: BucketCase, sweep: CollectiveSweep, topology: Topology) -> None:
        self._case, self._delay_s = case, sweep.delay_ms * 1e-3
        self._cluster = VirtualCluster(topology.world_size, topology)
        # The level says which ranks add up before they select, and so the groups of each rank.
        choice = choose_level(case.config(sweep, topology.world_size), topology.nodes)
        self._paths = [  # by rank: its reducer
            BucketPath(case, sweep, groups) for groups in virtual_groups(self._cluster, choice)
        ]

    def run_timed(self) -> tuple[float, list[BucketRecord]]:
        """Seconds from the last rank's arrival on, and each rank's record, of values for timing."""
        gradients = [self._case.normal_values(rank) for rank in range(len(self._paths))]
        outcomes = self._run(gradients, 0)
        return self._cluster.modelled_s - self._delay_s, [outcome.record for outcome in outcomes]

    def count_wrong(self) -> int:
        """Elements of all results that differ from the sum of what was sent of small integers."""
        return sum(self._wrong(step) for step in range(CHECK_STEPS))

    def _wrong(self, step: int) -> int:
        """Synchronises small integers once; counts the wrong elements of all ranks' results."""
        case, n = self._case, len(self._paths)
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
        """Synchronises each rank's gradient; notes the scheme, and returns each rank's outcome."""
        outcomes = self._cluster.run(
            lambda transport: self._steps(transport, gradients[transport.rank], step)
        )
        self.carried_by = outcomes[0].record.scheme
        return outcomes

    def _steps(
        self, transport: VirtualTransport, given_N: torch.Tensor, step: int
    ) -> Generator[Any, None, _Outcome]:
        """One rank's synchronisation of its gradient `given_N`; the last rank starts late."""
        rank, n, path = transport.rank, len(self._paths), self._paths[transport.rank]
        bucket = self._case.bucket(given_N.clone(), n)
        before_N = path.residual(bucket)
        if rank == n - 1:
            transport.charge(self._delay_s)
        record = yield from path.steps(bucket, step)
        # The residual of now: with `scheme.sum_bits` the collective adds what the sum has lost.
        sent_N = given_N.float() + before_N - path.residual(bucket)
        return _Outcome(bucket.grad_N[self._case.owned(rank, n)], sent_N, record)


run = partial(run_bench, CollectiveBench)
