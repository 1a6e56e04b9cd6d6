"""`bench bucket`: the time from one bucket's gradient to its sum on this device, without a network.

One process is a group of one rank, so that links cost nothing: what remains is the plugin's own
work, as in training (`GradientReducer` with residual, sampled threshold, error feedback and
progress thread). Each row is checked on small integers first; a wrong one is not timed. Columns:

- `floor`: a copy that moves 16 bytes an element: gradient and residual are read, residual and sum
  are written. Nothing that holds a residual can move less.
- `host`: the training thread's time in the calls that start the bucket and await it.
- `waits`: how often the host waited for the device between those calls, as torch's sync debug mode
  counts them. Null on a CPU, where nothing waits.
- `busy` and `both`: a compute kernel alone, about as long as the bucket, and beside the bucket, as
  in a backward pass. `hidden` is the share of the shorter one that costs no time.

CUDA_DEVICE_MAX_CONNECTIONS matters: with 1 hardware queue kernels of two streams may wait for one
another.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from statistics import median

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_sparse.bench.exchange.case import BucketCase, cases_of
from megatron_sparse.bench.exchange.collectives import CollectiveBench
from megatron_sparse.bench.exchange.options import BucketSweep, CollectiveSweep
from megatron_sparse.bench.table import copy_action, local
from megatron_sparse.reduction.job import Pending
from megatron_sparse.run.rows import CellRow, cell, optional

FLOOR_BYTES = 16
"""Of an element: fp32 gradient and residual read, residual and sum written."""
BUSY_SIZE = 4096
"""Rows and columns of the matrices whose product is the busy kernel."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(kw_only=True)
class BucketRow(CellRow):
    """One size; times are medians in microseconds, null where wrong."""

    bytes: int = cell("of the gradient", ">12 size(B)")
    scheme: str = cell("that carried it", ">10")
    queues: int | None = cell(
        "hardware queues that CUDA_DEVICE_MAX_CONNECTIONS allows; null where it is not set", ">6"
    )
    time_us: float | None = optional(
        "from gradient to sum, the device's work included", ">11.1f time(us)"
    )
    floor_us: float | None = optional(
        "see the module's docstring; so for the rest",
        ">11.1f floor(us) | floor_us/time_us >10.2f floor/time",
    )
    host_us: float | None = optional(
        "of the training thread, from the launch until the optimizer could begin", ">9.1f host(us)"
    )
    waits: int | None = optional("of the host for the device", ">5")
    busy_us: float | None = optional("the compute kernel alone", ">11.1f busy(us)")
    both_us: float | None = optional(
        "the compute kernel and the bucket", ">11.1f both(us) | hidden >6.2f"
    )
    wrong: int = cell("elements that differ from the exact sum", ">6 #wrong")

    @property
    def hidden(self) -> float | None:
        """The share of the shorter of `time_us` and `busy_us` that costs no time beside the other.

        Example:
            >>> row = BucketRow(bytes=4, scheme="direct", queues=None, wrong=0)
            >>> row.time_us, row.busy_us, row.both_us = 10.0, 20.0, 24.0
            >>> row.hidden
            0.6
        """
        if self.time_us is None or self.busy_us is None or self.both_us is None:
            return None
        shorter, longer = sorted((self.time_us, self.busy_us))
        return (shorter + longer - self.both_us) / shorter


class BucketBench(CollectiveBench):
    """Measures buckets in a group of this process alone, with the cases of `CollectiveBench`."""

    def __init__(self, sweep: BucketSweep) -> None:
        shared = dict(vars(sweep))  # all options but the density are those of `CollectiveSweep`
        cases = CollectiveSweep(densities=(shared.pop("density"),), **shared)
        super().__init__(cases, HashStore(), rank=0, world_size=1)

    def bucket_rows(self) -> Iterator[BucketRow]:
        """Checks each size and scheme, times it if no element is wrong, and yields its row."""
        queues = os.environ.get(QUEUES)
        for case in cases_of(self._cases, world_size=1):
            wrong, scheme = self._count_wrong(case)
            row = BucketRow(
                bytes=case.nbytes,
                scheme=scheme,
                queues=None if queues is None else int(queues),
                wrong=wrong,
            )
            if not wrong:
                self._measure(case, row)
            yield row

    def _measure(self, case: BucketCase, row: BucketRow) -> None:
        """Times the case on normal values, and fills in the row's times and waits."""
        base_N = case.normal_values(0).to(self._device)
        bucket = case.bucket(torch.empty_like(base_N), 1)
        reducer, steps = self._rank_reducer(case).reducer, count()

        def start() -> Pending:
            """Launches the bucket; each launch is another training step."""
            return reducer.start(bucket, next(steps))

        def synchronise(work: Callable[[], object] = lambda: None) -> None:
            """Starts the bucket, does other work as a backward pass does, and awaits the sum."""
            pending = start()
            work()
            pending.wait()

        def refill() -> None:
            """Restores the gradient, which the last synchronisation has replaced by the sum."""
            bucket.grad_N.copy_(base_N)

        row.floor_us = self._median(copy_action(FLOOR_BYTES * case.numel, self._device))
        row.time_us = self._median(synchronise, refill)
        busy = self._busy(row.time_us)
        row.busy_us = self._median(busy)
        row.both_us = self._median(lambda: synchronise(busy), refill)
        row.host_us = median(self._host_us(start, refill) for _ in range(self._cases.iters))
        refill()
        row.waits = self._waits(synchronise)

    def _median(
        self, action: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        """Median microseconds until the device has done the action; `before` is not timed."""
        times_us = []
        for _ in range(self._cases.warmup + self._cases.iters):
            before()
            times_us.append(self._timed(action))
        return median(times_us[self._cases.warmup :])

    def _busy(self, time_us: float) -> Callable[[], object]:
        """Returns an action that multiplies matrices for about `time_us`, the bucket's time."""
        on_cuda = self._device.type == "cuda"
        size = BUSY_SIZE if on_cuda else BUSY_SIZE // 16  # a CPU would need too long
        dtype = torch.bfloat16 if on_cuda else torch.float32
        a_KK = torch.ones(size, size, dtype=dtype, device=self._device)
        out_KK = torch.empty_like(a_KK)

        def product() -> object:
            return torch.mm(a_KK, a_KK, out=out_KK)

        products = max(round(time_us / self._median(product)), 1)
        return lambda: [product() for _ in range(products)]

    def _host_us(self, start: Callable[[], Pending], before: Callable[[], object]) -> float:
        """The training thread's microseconds to start a bucket and wait until the sum is queued.

        A training loop would now call the optimizer. Neither `before` nor the device's queued work
        is timed.
        """
        before()
        self._barrier()
        start_s = time.perf_counter()
        pending = start()
        pending.wait_until_queued()
        spent_us = (time.perf_counter() - start_s) * 1e6
        pending.confirm()  # the job must end before the next one
        return spent_us

    def _waits(self, action: Callable[[], object]) -> int | None:
        """How often torch sees the host wait for the device; None on a CPU."""
        if self._device.type != "cuda":
            return None
        self._barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                action()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # torch's warning that an operation waits has this word.
        return sum("synchronizing" in str(warning.message) for warning in caught)


def _where(_: BucketSweep) -> str:
    return f"1 rank, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}"


def _rows(sweep: BucketSweep) -> Iterator[BucketRow]:
    with BucketBench(sweep) as bench:
        yield from bench.bucket_rows()


run = local(_where, _rows)
