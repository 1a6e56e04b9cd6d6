"""Times collectives between real ranks, from dense gradient to dense sum.

What is timed is what training does: `GradientReducer` with its residual, sampled threshold, error
feedback, progress thread and planner. A round is the backend's own dense collective and then the
scheme, each after a barrier and on fresh values; filling them in is not timed. The slowest rank's
time counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_sparse.bench.collective_floor import PAYLOAD_SHARE, Rates, floor_us
from megatron_sparse.bench.collective_row import Row
from megatron_sparse.bench.collective_sweep import Case, Sweep
from megatron_sparse.bucket import Bucket, Form
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.progress import ProgressThread
from megatron_sparse.recording import BUCKET_STAGES, BucketRecord, NullRecorder
from megatron_sparse.reducer import GradientReducer
from megatron_sparse.transport import ProcessGroupTransport

TIMEOUT_S = 120.0
COPIES = 7
RATE_BYTES = 8 << 20
MOST_FOREIGN_LOAD = 0.1
"""Of the machine; a row during which other programs took more is marked as noisy."""


class _LastRecord(NullRecorder):
    record: BucketRecord

    def record_bucket(self, record: BucketRecord) -> None:
        self.record = record


class RankBench:
    """One rank's part of the bench; a context manager that ends its threads and its group."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        self.device = torch.device(
            "cuda", torch.cuda.current_device()
        ) if backend == "nccl" else torch.device("cpu")  # fmt: skip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.name = backend
        self._transport = ProcessGroupTransport(dist.group.WORLD, TIMEOUT_S, self.device)  # type: ignore[arg-type]
        self._progress = ProgressThread(self.device, TIMEOUT_S)

    def __enter__(self) -> RankBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.close()
        self._transport.close(broken=kind is not None)
        if kind is None:
            dist.destroy_process_group()

    def rows(self) -> Iterator[Row]:
        """Every case, on every rank; the rows are the same on all."""
        rates = self.rates()
        for case in self._sweep.cases(self.world_size):
            yield self._row(case, rates)

    def rates(self) -> Rates:
        """What this machine copies and its links carry, measured unless the link is known."""
        source = torch.ones(self._sweep.max_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        copy_s = statistics.median(self._timed(lambda: target.copy_(source), COPIES))
        copy = 2 * source.numel() * self.world_size / copy_s
        if self._sweep.mbit is not None:
            wire = self._sweep.mbit * 1e6 / 8 * PAYLOAD_SHARE
        else:
            wire = RATE_BYTES / statistics.median(self._timed(self._shift, COPIES))
        return Rates(wire, copy, self.world_size)

    def _shift(self) -> None:
        """Every rank sends to the next and receives from the one before."""
        n, rank = self.world_size, self.rank
        sent = torch.zeros(RATE_BYTES, dtype=torch.uint8, device=self.device)
        sends = [((rank + 1) % n, sent)] if n > 1 else []
        receives = [((rank - 1) % n, torch.empty_like(sent))] if n > 1 else []
        self._transport.exchange(sends, receives, 1).finish()

    def _row(self, case: Case, rates: Rates) -> Row:
        n = self.world_size
        grad_N = case.small_integers(self.rank).to(self.device)
        bucket = case.bucket(grad_N, n)
        wrong, _, carried_by = self._synchronise_integers(case, bucket)
        if wrong:
            return self._row_of(case, carried_by, wrong)
        base_N = case.normal_values(self.rank).to(self.device)
        reducer, recorder = self._reducer(case)
        stages: dict[str, list[float]] = {stage: [] for stage in BUCKET_STAGES}
        own_s: list[float] = []

        def synchronise(step: int) -> None:
            start_s = time.perf_counter()
            reducer.start(bucket, step).wait()
            self._wait_for_device()
            own_s.append(time.perf_counter() - start_s)

        dense_s, sparse_s, copy_s = [], [], []
        quiet_before = self._busy()
        for number in range(self._sweep.warmup + self._sweep.iters):
            # The residual's first pages and the buffers are made in the rounds that do not count.
            bucket.grad_N.copy_(base_N)
            dense_s += self._timed(lambda: self._dense(bucket), 1)
            bucket.grad_N.copy_(base_N)
            sparse_s += self._timed(lambda number=number: synchronise(number), 1)
            copy_s += self._timed(lambda: bucket.grad_N.copy_(base_N), 1)
            for stage, time_us in recorder.record.stage_us().items():
                stages[stage].append(time_us)
        noisy = self._foreign_load(quiet_before) > MOST_FOREIGN_LOAD
        skip = self._sweep.warmup
        mean = {s: self._mean(statistics.median(us[skip:])) for s, us in stages.items()}
        total_us = self._mean(1e6 * statistics.median(own_s[skip:]))
        record = recorder.record
        wire = round(self._max(record.wire_bytes))
        nnz = round(self._mean(record.nnz))
        ordered = sorted(sparse_s[skip:])
        return self._row_of(
            case, record.scheme, 0,
            wire_bytes=wire, sent_density=nnz / case.numel,
            time_us=1e6 * statistics.median(ordered), p99_us=1e6 * _percentile(ordered, 0.99),
            dense_us=1e6 * statistics.median(dense_s[skip:]),
            copy_us=1e6 * statistics.median(copy_s[skip:]),
            host_us=max(0.0, total_us - sum(mean.values())),
            floor_us=floor_us(case, record.scheme, wire, nnz, n, rates),
            network_floor_us=1e6 * wire / rates.wire, noisy=noisy,
            **{f"{stage}_us": time_us for stage, time_us in mean.items()},
        )  # fmt: skip

    def _row_of(self, case: Case, carried_by: str, wrong: int, **fields: object) -> Row:
        known: dict[str, Any] = {
            "wire_bytes": 0, "sent_density": 0.0, "time_us": None, "dense_us": None,
            "encode_us": None, "network_us": None, "decode_us": None, "host_us": None,
        }  # fmt: skip
        known |= fields
        return Row.of(
            case, carried_by=carried_by, wrong=wrong, world_size=self.world_size,
            transport=self.name, modelled=False, **known,
        )  # fmt: skip

    def _synchronise_integers(self, case: Case, bucket: Bucket) -> tuple[int, int, str]:
        """Elements of the result that differ from the sum of what was selected, over all ranks."""
        given_N = bucket.grad_N.clone()
        residuals = _residuals()
        reducer, recorder = self._reducer(case, residuals)
        reducer.start(bucket, 0).wait()
        expected_N = given_N.double()
        if bucket.name in residuals:
            expected_N -= residuals.begin(bucket).double()
        dist.all_reduce(expected_N)
        own = slice(None) if case.form is Form.ALL_REDUCE else bucket.shard(self.rank)
        wrong = int((bucket.grad_N[own].double() != expected_N[own]).sum())
        return round(self._sum(wrong)), recorder.record.nnz, recorder.record.scheme

    def _reducer(
        self, case: Case, residuals: ResidualStore | None = None
    ) -> tuple[GradientReducer, _LastRecord]:
        config = case.config(self._sweep.message_format)
        recorder = _LastRecord()
        planner = FixedPlanner(config.compression, config.scheme)
        store = _residuals() if residuals is None else residuals
        reducer = GradientReducer(config, self._transport, planner, store, recorder, self._progress)
        return reducer, recorder

    def _dense(self, bucket: Bucket) -> None:
        """What training without the plugin does."""
        if bucket.form is Form.ALL_REDUCE:
            dist.all_reduce(bucket.grad_N)
        else:
            own = bucket.grad_N[bucket.shard(self.rank)]
            self._transport.reduce_scatter(own, bucket.grad_N).finish()

    def _timed(self, action: Callable[[], object], rounds: int) -> list[float]:
        """Seconds of the slowest rank in each round; all begin together."""
        times = []
        for _ in range(rounds):
            self._wait_for_device()
            dist.barrier()
            start_s = time.perf_counter()
            action()
            self._wait_for_device()
            times.append(self._max(time.perf_counter() - start_s))
        return times

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reduced(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(number, op=op)
        return float(number)

    def _max(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MAX)

    def _sum(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM)

    def _mean(self, value: float) -> float:
        return self._sum(value) / self.world_size

    def _busy(self) -> tuple[float, float, float]:
        """Seconds: of the clock, that the machine's cores worked, that this process worked."""
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        worked = machine.user + machine.nice + machine.system
        return time.monotonic(), worked, own.user + own.system

    def _foreign_load(self, before: tuple[float, float, float]) -> float:
        """The share of this machine that went to other programs, if all ranks are on it."""
        clock, worked, own = (now - then for now, then in zip(self._busy(), before, strict=True))
        cores = psutil.cpu_count() or 1
        return max(0.0, worked - self._sum(own)) / (clock * cores)


def _residuals() -> ResidualStore:
    return ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
