"""Checks and times collectives between real ranks, from dense gradient to dense sum.

It times the path that training uses: `GradientReducer` with its residual, sampled threshold, error
feedback, progress thread and planner. A round is the scheme, the backend's own dense collective and
a plain copy, each after a barrier and on fresh values; filling them in is not timed. Dense and
scheme take turns at going first, so that a temporary slowdown of the machine affects both.

On CUDA devices the backend is NCCL; that has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bench.collectives.case import CHECK_STEPS, CHUNK, Case, cases_of
from megatron_sparse.bench.collectives.floor import payload_rate
from megatron_sparse.bench.collectives.levels import LevelPath, groups_of_nodes
from megatron_sparse.bench.collectives.path import HalvedPath
from megatron_sparse.bench.collectives.row import Row, in_order, sent_figures
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bench.host_load import HostLoad
from megatron_sparse.bench.rank_group import RankGroup, typed
from megatron_sparse.bench.table import Progress
from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.config.level import NODE
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import GATE
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport

# torch 2.13 renamed it; older ones only have the first name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LINK_ROUNDS = 7
LINK_BYTES = 8 << 20


class RankBench(RankGroup):
    """One rank's part of the bench; see `RankGroup`.

    Args:
        sweep: the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.

    Raises:
        CommunicationError: the ranks cannot reach one another.
    """

    def __init__(self, sweep: Sweep, store: Any, rank: int, world_size: int) -> None:
        self._sweep = sweep
        super().__init__(
            sweep.timeout_s,
            store,
            rank,
            world_size,
            nccl_engine=sweep.nccl_engine,
        )
        self._place = {"transport": self.backend, "mbit": sweep.mbit}
        self._level_groups: Groups | None = None
        self._level_transports: list[ProcessGroupTransport] = []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for transport in self._level_transports:
            transport.close(broken=kind is not None)
        super().__exit__(kind, *rest)

    def rows(self, progress: Progress) -> Iterator[Row]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        wire_rate = self.wire_rate()
        cases = cases_of(self._sweep, self.world_size)
        for number, case in enumerate(cases):
            progress(number, len(cases), case.title)
            wrong, carried_by = self._check(case)
            place = self._place | {"level": case.level}
            row = Row.of(case, carried_by, self.world_size, wrong, **place)
            if not wrong:
                self._time(case, row, wire_rate)
            yield row

    def wire_rate(self) -> float:
        """Payload bytes a second that each rank's link carries, measured unless it is known."""
        if self._sweep.mbit is not None:
            return payload_rate(self._sweep.mbit)
        return LINK_BYTES / self._round_us(LINK_BYTES, LINK_ROUNDS) * 1e6

    def _round_us(self, nbytes: int, rounds: int) -> float:
        """Median microseconds in which all ranks send so many bytes round the ring."""
        n, rank = self.world_size, self.rank
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        sends = [((rank + 1) % n, sent)] if n > 1 else []
        receives = [((rank - 1) % n, torch.empty_like(sent))] if n > 1 else []
        return self._median_us(
            [
                self._timed(lambda: self._transport.exchange(sends, receives, 1).finish())
                for _ in range(rounds)
            ]
        )

    def _check(self, case: Case) -> tuple[int, str]:
        """Wrong elements on all ranks, and the scheme that the planner took."""
        path = self._path(case)
        wrong = self._count_wrong(
            case, path.residual, lambda bucket, step: path.reducer.start(bucket, step).wait()
        )
        return wrong, path.sink.record.scheme

    def _count_wrong(
        self,
        case: Case,
        residual: Callable[[Bucket], torch.Tensor],
        synchronise: Callable[[Bucket, int], None],
    ) -> int:
        """Elements, on all ranks, that differ from the sum of what was sent of small integers."""
        grad_N = torch.empty_like(case.normal_values(self.rank), device=self._device)
        bucket = case.bucket(grad_N, self.world_size)
        wrong = 0
        for step in range(CHECK_STEPS):
            given_N = case.small_integers(self.rank, self.world_size, step).to(self._device)
            grad_N.copy_(given_N)
            before_N = residual(bucket)
            synchronise(bucket, step)
            sent_N = given_N.float() + before_N - residual(bucket)
            wrong += self._wrong_elements(case, grad_N, sent_N)
        counts = self._gather(torch.tensor([wrong], dtype=torch.float64))
        return int(counts.sum())

    def _wrong_elements(self, case: Case, grad_N: torch.Tensor, sent_N: torch.Tensor) -> int:
        """Of this rank's part of the sum, without any reduction under test."""
        own = range(case.numel)[case.owned(self.rank, self.world_size)]
        sent_N, wrong = sent_N if case.rounds else sent_N.to(torch.int8), 0
        for start in range(0, case.numel, CHUNK):
            sent_nC = self._gather(sent_N[start : start + CHUNK])
            low, high = max(start, own.start), min(start + CHUNK, own.stop)
            if low < high:
                parts = [values_C[low - start : high - start] for values_C in sent_nC]
                wrong += case.count_wrong([grad_N[low:high]], parts)
        return wrong

    def _time(self, case: Case, row: Row, wire_rate: float) -> None:
        """Fills in the row's times."""
        base_N = case.normal_values(self.rank).to(self._device)
        bucket = case.bucket(base_N.clone(), self.world_size)
        spare_N = base_N.clone()
        run = self._whole_path(case, bucket) if self._sweep.prune else self._half(case, bucket)
        rounds: list[list[float]] = []
        load = HostLoad()
        for number in range(self._sweep.warmup + self._sweep.iters):
            if number == self._sweep.warmup:
                load = HostLoad()
            figures: dict[str, float] = {}

            def dense(figures: dict[str, float] = figures) -> None:
                spare_N.copy_(base_N)
                figures["dense"] = self._timed(lambda: self._dense(case, spare_N))

            def scheme(figures: dict[str, float] = figures, step: int = number) -> None:
                bucket.grad_N.copy_(base_N)
                figures.update(run(step))

            for action in (dense, scheme) if number % 2 else (scheme, dense):
                action()
            figures["copy"] = self._timed(lambda: spare_N.copy_(base_N))
            rounds.append(in_order(figures))
        row.set_load(self._foreign_load(load))
        counted = torch.tensor(rounds[self._sweep.warmup :], dtype=torch.float64)
        row.measured(case, self._gather(counted), wire_rate, prune=self._sweep.prune)

    def _whole_path(self, case: Case, bucket: Bucket) -> Callable[[int], dict[str, float]]:
        """Runs a step through the reducer; returns its figures."""
        path = self._path(case)

        def run(step: int) -> dict[str, float]:
            total_us = self._timed(lambda: path.reducer.start(bucket, step).wait())
            record = path.sink.record
            return {
                "total": total_us,
                **record.stage_us(),
                "host_cpu": record.host_cpu_us,
                **sent_figures(record),
            }

        return run

    def _half(self, case: Case, bucket: Bucket) -> Callable[[int], dict[str, float]]:
        """Runs a step's collective alone, its selection before the barrier."""
        path = HalvedPath(case, self._sweep, self._transport)

        def run(step: int) -> dict[str, float]:
            timer, sent = StageTimer(self._device), {"wire_bytes": 0.0}
            nnz, exchange = path.select(bucket, step, timer)
            before_us = timer.times_us()

            def job() -> Generator[Any, None, None]:
                yield GATE
                sent["wire_bytes"] = yield from exchange()

            def submit() -> None:
                pending = self._progress.submit(bucket.name, job, timer)
                pending.wait()
                sent["host_cpu"] = pending.host_cpu_s * 1e6

            total_us = self._timed(submit)
            stages = {name: us - before_us[name] for name, us in timer.times_us().items()}
            selected = {"inside_bytes": 0.0, "nnz": nnz, "selected_from": case.numel}
            return {"total": total_us, **stages, **sent, **selected}

        return run

    def _path(self, case: Case) -> LevelPath:
        return LevelPath(case, self._sweep, self._groups(case), self._progress)

    def _groups(self, case: Case) -> Groups:
        """All ranks, and at level `node` this rank's node and lane. Collective."""
        config = case.config(self._sweep, straggler=self.world_size - 1)
        choice = choose_level(config, self._transport.nodes)
        if choice.level != NODE:
            return Groups(self._transport)
        if self._level_groups is None:
            level = groups_of_nodes(choice, self.rank, self._open)
            self._level_groups = Groups(self._transport, level=level)
        return self._level_groups

    def _open(self, ranks: Sequence[int]) -> ProcessGroupTransport:
        transport = ProcessGroupTransport(ranks, self._sweep.timeout_s, self._device)
        self._level_transports.append(transport)
        return transport

    def _dense(self, case: Case, values_N: torch.Tensor) -> None:
        """The collective of training without the plugin."""
        if case.op is CollectiveOp.ALL_REDUCE:
            typed(lambda: dist.all_reduce(values_N))
        else:
            own_M = values_N[case.owned(self.rank, self.world_size)]
            typed(lambda: _reduce_scatter(own_M, values_N))
