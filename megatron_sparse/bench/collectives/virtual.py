"""Runs collectives on the virtual cluster: real selection, messages and sums, a modelled network.

`time_us`, `dense_us` and `network_us` are the alpha-beta clock's, in which local work takes no
time. `prune_us`, `encode_us` and `decode_us` are this machine's, measured, means over the ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.bench.collectives.case import CHECK_STEPS, Case, cases_of
from megatron_sparse.bench.collectives.levels import LevelPath, virtual_groups
from megatron_sparse.bench.collectives.path import HalvedPath, residual_of
from megatron_sparse.bench.collectives.row import Row
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bench.host_load import free_memory_bytes
from megatron_sparse.bench.table import Progress
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.level import NODE
from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import BucketRecord, StageTimer
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.virtual_rank import VirtualTransport

TRANSPORT = "virtual"
BYTES_AN_ELEMENT = 40
"""Most tensors that a rank holds: gradient, input, residual before and after, sums,
messages."""


@dataclass
class _Outcome:
    """A rank's outcome of a step: its part of the result, its contribution, and what it sent."""

    result: torch.Tensor
    sent_N: torch.Tensor
    record: BucketRecord


def rows(sweep: Sweep, topology: Topology, progress: Progress) -> Iterator[Row]:
    """Every case.

    Raises:
        ConfigError: the ranks do not fit into this machine's memory.
        MegatronSparseError: a collective refuses a case.
    """
    n = topology.world_size
    cases = cases_of(sweep, n)
    check_memory(cases, n)
    for number, case in enumerate(cases):
        progress(number, len(cases), case.title)
        yield _row(case, sweep, topology)


def check_memory(cases: Sequence[Case], n: int) -> None:
    """Refuses ranks that would swap.

    Raises:
        ConfigError: they do not fit into this machine's memory.
    """
    needed = max(case.numel for case in cases) * n * BYTES_AN_ELEMENT
    if needed > free_memory_bytes():
        raise ConfigError(
            f"{n} virtual ranks do not fit into memory",
            expected=f"{needed / 2**30:.1f} GiB of free memory",
            got=f"{free_memory_bytes() / 2**30:.1f} GiB",
            remedy="lower --max-bytes or --ranks",
        )


def _row(case: Case, sweep: Sweep, topology: Topology) -> Row:
    n = topology.world_size
    ranks = VirtualRanks(case, sweep, topology)
    wrong = sum(ranks.count_wrong(step) for step in range(CHECK_STEPS))
    place = {"transport": TRANSPORT, "modelled": True, "level": case.level}
    row = Row.of(case, ranks.carried_by, n, wrong, **place)
    if wrong:
        return row
    given = [case.normal_values(rank) for rank in range(n)]
    modelled_s, outcomes = VirtualRanks(case, sweep, topology).run(given, 0)
    dense = Case(case.op, "dense", case.dtype, 1.0, case.numel)
    dense_s, _ = VirtualRanks(dense, sweep, topology).run(given, 0)
    records = [outcome.record for outcome in outcomes]
    stages = [record.stage_us() for record in records]
    mean_us = {stage: sum(each[stage] for each in stages) / n for stage in stages[0]}
    row.time_us = row.network_us = modelled_s * 1e6
    row.dense_us = dense_s * 1e6
    row.speedup = dense_s / modelled_s if modelled_s else None
    row.prune_us = mean_us["threshold"] + mean_us["prune"]
    row.encode_us, row.decode_us = mean_us["encode"], mean_us["decode"]
    row.wire_bytes = max(record.wire_bytes for record in records)
    row.inside_bytes = max(record.inside_bytes for record in records)
    row.sent_density = sum(r.nnz for r in records) / sum(r.numel for r in records)
    return row


class VirtualRanks:
    """All ranks of a case, on a cluster whose clock begins at 0.

    Args:
        case: what they synchronise.
        sweep: how.
        topology: of the cluster.
        straggler: a rank that all know to be late, for schemes that use it.
        delay_s: how late it is, on the modelled clock.

    Attributes:
        carried_by: the scheme that the planner takes.
        clock_s: the modelled clock of each rank.
    """

    def __init__(
        self,
        case: Case,
        sweep: Sweep,
        topology: Topology,
        straggler: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._case, self._straggler, self._delay_s = case, straggler, delay_s
        self._cluster = VirtualCluster(topology.world_size, topology)
        self.clock_s = self._cluster.clock_s
        self._paths = [HalvedPath(case, sweep, t, straggler) for t in self._cluster.transports]
        empty = case.bucket(torch.empty(case.numel), topology.world_size)
        self.carried_by = self._paths[0].carried_by(empty)
        self._levels: list[LevelPath] = []
        choice = choose_level(case.config(sweep, topology.world_size - 1), topology.nodes)
        if choice.level == NODE:
            groups = virtual_groups(self._cluster, choice)
            self._levels = [LevelPath(case, sweep, each) for each in groups]
            self.carried_by = self._levels[0].reducer.job(empty, 0).record.scheme

    def run(self, given: list[torch.Tensor], step: int) -> tuple[float, list[_Outcome]]:
        """Synchronises the ranks' gradients; returns the modelled clock's seconds, and the rest."""
        outcomes = self._cluster.run(lambda transport: self._steps(transport, given, step))
        return self._cluster.modelled_s, outcomes

    def count_wrong(self, step: int) -> int:
        """Elements of all results that differ from the sum of what was sent of small integers."""
        case, n = self._case, len(self._paths)
        _, outcomes = self.run([case.small_integers(rank, n, step) for rank in range(n)], step)
        results, sent = [each.result for each in outcomes], [each.sent_N for each in outcomes]
        if case.op is CollectiveOp.ALL_REDUCE:
            return case.count_wrong(results, sent)
        owned = [case.owned(rank, n) for rank in range(n)]
        return sum(
            case.count_wrong([result], [sent_N[own] for sent_N in sent])
            for result, own in zip(results, owned, strict=True)
        )

    def _steps(
        self, transport: VirtualTransport, given: list[torch.Tensor], step: int
    ) -> Generator[Any, None, _Outcome]:
        rank, n, path = transport.rank, transport.world_size, self._paths[transport.rank]
        if self._levels:
            return (yield from self._steps_at_level(self._levels[rank], given[rank], rank, step))
        bucket, timer = self._case.bucket(given[rank].clone(), n), StageTimer()
        before_N = residual_of(path.residuals, bucket)
        if rank == self._straggler:
            transport.charge(self._delay_s)
        nnz, exchange = path.select(bucket, step, timer)
        wire_bytes = yield from exchange()
        # Only now: with `scheme.sum_bits` an owner's residual keeps what the gathered sum loses.
        sent_N = given[rank].float() + before_N - residual_of(path.residuals, bucket)
        result = bucket.grad_N[self._case.owned(rank, n)]
        record = BucketRecord(bucket.name, step, "", "", 0.0, bucket.numel, nnz)
        record.wire_bytes, record.timer = wire_bytes, timer
        return _Outcome(result, sent_N, record)

    def _steps_at_level(
        self, path: LevelPath, given_N: torch.Tensor, rank: int, step: int
    ) -> Generator[Any, None, _Outcome]:
        n = len(self._paths)
        bucket = self._case.bucket(given_N.clone(), n)
        before_N = path.residual(bucket)
        record = yield from path.steps(bucket, step)
        sent_N = given_N.float() + before_N - path.residual(bucket)
        return _Outcome(bucket.grad_N[self._case.owned(rank, n)], sent_N, record)
