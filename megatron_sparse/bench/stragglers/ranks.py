"""Checks and times collectives between real ranks, one of them late.

A round: all ranks leave a barrier, the straggler sleeps, and each rank notes when it begins and
when it has the sum. Selection is timed with the collective, on every rank: the straggler's gradient
is ready only when it arrives. The schemes of a group take turns, on the same gradients.

Readings of different ranks are compared, so their clocks must be one: CLOCK_MONOTONIC of one
kernel, which all processes, containers and namespaces of a machine share. Ranks of several machines
are refused, because nothing here would keep their clocks together to within a few microseconds.

On CUDA devices the backend is NCCL; that has not been run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.path import HalvedPath, residual_of
from megatron_sparse.bench.collectives.ranks import RankBench
from megatron_sparse.bench.host_load import HostLoad
from megatron_sparse.bench.stragglers.groups import (
    AUTO_FACTOR,
    RULE,
    Group,
    groups_of,
    reduce_scatter_of,
    taken_by_the_rule,
)
from megatron_sparse.bench.stragglers.row import StragglerRow, compare
from megatron_sparse.bench.stragglers.sweep import StragglerSweep
from megatron_sparse.bench.table import Progress
from megatron_sparse.bucket import Bucket
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import GATE
from megatron_sparse.transport import Link

LATENCY_ROUNDS, LATENCY_BYTES, DELAY_ROUNDS = 20, 8, 3
CHECK_DELAY_S = 0.05
"""How late the straggler is in every other step that is checked."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Run = Callable[[int, float], list[float]]
"""Synchronises in one step, the straggler being so many seconds late; returns `MEASURED`."""


class StragglerBench(RankBench):
    """One rank's part of the bench; see `RankBench`.

    Args:
        bench: the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.

    Raises:
        CommunicationError: the ranks cannot reach one another.
        ConfigError: there is no such straggler.
    """

    def __init__(self, bench: StragglerSweep, store: Any, rank: int, world_size: int) -> None:
        self._bench = bench
        self._late_rank = bench.late_rank(world_size)
        super().__init__(bench, store, rank, world_size)

    def straggler_rows(self, progress: Progress) -> Iterator[StragglerRow]:
        """Every group with every delay, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            ConfigError: the ranks are on several machines, or a delay is too long.
            MegatronSparseError: a collective refuses a case.
        """
        self._check_clocks()
        latency_us = self._round_us(LATENCY_BYTES, LATENCY_ROUNDS)
        link = Link(latency_us * 1e-6, 1 / self.wire_rate())
        for group in groups_of(self._bench, self.world_size):
            checked = []
            for number, case in enumerate(group):
                progress(number, len(group), case.title)
                checked.append(self._check(case))
            for delay_ms in self._bench.delays_ms:
                auto = delay_ms is None
                delay_s = self._auto_delay_s(group) if auto else delay_ms * 1e-3
                yield from self._time_group(group, checked, delay_s, link)

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
        run = self._whole_path(case, bucket)
        times_us = [run(step)["total"] for step in range(1 + DELAY_ROUNDS)][1:]
        delay_s = AUTO_FACTOR * self._median_us(times_us) * 1e-6
        if delay_s >= self._sweep.timeout_s:
            raise ConfigError(
                "bench stragglers: the automatic delay is longer than a rank may wait",
                expected=f"--timeout above {delay_s:.1f} s",
                got=f"{self._sweep.timeout_s:g} s",
                remedy="raise --timeout, or lower --max-bytes",
            )
        return delay_s

    def _check(self, case: Case) -> tuple[int, str]:
        """As in `RankBench`; the straggler is late in every other step."""
        path = HalvedPath(case, self._sweep, self._transport, self._late_rank)

        def synchronise(bucket: Bucket, step: int) -> None:
            if self.rank == self._late_rank and step % 2:
                time.sleep(CHECK_DELAY_S)
            self._synchronise(path, bucket, step)

        wrong = self._count_wrong(
            case, lambda bucket: residual_of(path.residuals, bucket), synchronise
        )
        return wrong, path.carried_by(case.bucket(torch.empty(case.numel), self.world_size))

    def _time_group(
        self, group: Group, checked: Sequence[tuple[int, str]], delay_s: float, link: Link
    ) -> list[StragglerRow]:
        """Times the correct cases of a group in turn, and the case that the rule chooses."""
        named = [(case.scheme, case) for case in group]
        if self._bench.rule:
            taken = taken_by_the_rule(group[0], self.world_size, delay_s, link)
            named.append((RULE, taken))
            checked = [*checked, self._check(taken)]
        rows = [
            StragglerRow.of(
                case,
                carried_by,
                self.world_size,
                wrong,
                scheme=name,
                straggler=self._late_rank,
                delay_us=delay_s * 1e6,
                alpha_us=link.alpha_s * 1e6,
                **self._place,
            )
            for (name, case), (wrong, carried_by) in zip(named, checked, strict=True)
        ]
        base_N = group[0].normal_values(self.rank).to(self._device)
        bucket = group[0].bucket(base_N.clone(), self.world_size)
        right = {
            index: self._run_of(name, case, bucket)
            for index, (name, case) in enumerate(named)
            if not rows[index].wrong
        }
        rounds: dict[int, list[list[float]]] = {index: [] for index in right}
        load = HostLoad()
        for number in range(self._sweep.warmup + self._sweep.iters):
            if number == self._sweep.warmup:
                load = HostLoad()
            for place in range(len(right)):
                index = [*right][(place + number) % len(right)]
                bucket.grad_N.copy_(base_N)
                rounds[index].append(right[index](number, delay_s))
        share = self._foreign_load(load)
        for index, row in enumerate(rows):
            if index in right:
                counted = torch.tensor(rounds[index][self._sweep.warmup :], dtype=torch.float64)
                row.measured(self._gather(counted), link)
                row.set_load(share)
        compare(group, rows)
        return rows

    def _run_of(self, name: str, case: Case, bucket: Bucket) -> Run:
        """How a row is measured; `dense` is the backend's own, without the plugin."""
        path = HalvedPath(case, self._sweep, self._transport, self._late_rank)
        ring_bytes = dense_wire_bytes(bucket, bucket.grad_N.element_size())

        def run(step: int, delay_s: float) -> list[float]:
            sent = [ring_bytes, bucket.numel]

            def action() -> None:
                if name == "dense":
                    self._dense(case, bucket.grad_N)
                else:
                    sent[:] = self._synchronise(path, bucket, step)

            spans = self._arrive(action, delay_s)
            return [*spans, *sent]

        return run

    def _synchronise(self, path: HalvedPath, bucket: Bucket, step: int) -> tuple[int, int]:
        """Selection and collective, as the reducer has them; returns bytes and elements sent."""
        timer, sent = StageTimer(self._device), (0, 0)

        def job() -> Generator[Any, None, None]:
            nonlocal sent
            nnz, exchange = path.select(bucket, step, timer)
            yield GATE
            wire_bytes = yield from exchange()
            sent = (wire_bytes, nnz)

        self._progress.submit(bucket.name, job, timer).wait()
        return sent

    def _arrive(self, action: Callable[[], None], delay_s: float) -> tuple[float, float]:
        """This rank's begin and end, in seconds of the machine's monotonic clock."""
        self._meet()
        if self.rank == self._late_rank:
            time.sleep(delay_s)
        arrived_s = time.monotonic()
        action()
        self._wait_for_device()
        return arrived_s, time.monotonic()
