"""`bench bucket --stub-nccl`: the host's time for a bucket when a device does the work.

Needs no GPU. This process is rank 0 of n and runs one bucket through the same code as with NCCL:
the reducer, its progress thread, and the calls of c10d. But the process group is torch's fake one,
which moves no data. The peers' messages were recorded on the virtual cluster before; they are
copied into the receive buffers while the clock is stopped. The bucket is so small that the codecs,
which run on the CPU here, cost almost nothing compared with the code that calls them.

`dense`, which is one call of c10d, is measured in turn with every scheme, because processors
differ, and one processor's speed changes from minute to minute. With `scheme.nccl_engine`
everything runs except for its one call of C++. The times do not include launching kernels, the
events of the breakdown, and NCCL's work inside its calls.

Messages have fixed sizes (`scheme.capacity`); without them the host would wait for the device
anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.bench.exchange.options import BucketSweep, CollectiveSweep
from megatron_sparse.bench.exchange.path import BucketPath
from megatron_sparse.bench.row import CellRow, cell
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.cuda_ext.nccl_ops import SumCall
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import Transport, VirtualCluster
from megatron_sparse.transport.nccl_communicator import NcclCommunicator
from megatron_sparse.transport.nccl_library import POSTING
from megatron_sparse.transport.process_group import ProcessGroupTransport

NUMEL_A_RANK = 64
DENSITY = 0.25
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class StubRow(CellRow, gap="  "):
    """Medians for one bucket."""

    scheme: str = cell("of the bucket")
    world_size: int = cell("ranks of the group", ">7 ranks | name <17 scheme")
    posts: int = cell("calls of c10d that post something", ">5")
    host_cpu_us: float = cell("processor time of the progress thread", ">8.0f host(us)")
    c10d_us: float = cell(
        "the part of it inside those calls; 0 with the engine, which does not call c10d",
        ">14.0f of it c10d(us)",
    )
    dense_us: float = cell(
        "the same time for a bucket of `dense`, measured in turn",
        ">9.0f dense(us) | host_cpu_us/dense_us >11.1f times dense",
    )
    nccl_engine: bool = cell("whether `scheme.nccl_engine` was on", default=False)

    @property
    def name(self) -> str:
        """The scheme's name, marked if the engine ran it."""
        return f"{self.scheme} (engine)" if self.nccl_engine else self.scheme


def rows(sweep: BucketSweep) -> Iterator[StubRow]:
    """Every case. Replaces the process's default group while it runs."""
    for n in sweep.ranks:
        with _fake_group(n):
            for scheme in sweep.schemes:
                has_engine = sweep.nccl_engine and SCHEMES[scheme].has_engine
                for nccl_engine in (False, True) if has_engine else (False,):
                    yield _measure(sweep, scheme, n, nccl_engine)


@contextmanager
def _fake_group(n: int) -> Generator[None, None, None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(sweep: BucketSweep, name: str, n: int, nccl_engine: bool) -> StubRow:
    """Times a scheme in turn with `dense`, so that a slowdown of the machine affects both."""
    progress = ProgressThread(torch.device("cpu"), TIMEOUT_S)
    paths = [
        _StubbedPath(sweep, name, n, progress, nccl_engine),
        _StubbedPath(sweep, "dense", n, progress, False),
    ]
    try:
        figures = [[path.run() for path in paths] for _ in range(sweep.warmup + sweep.iters)]
    finally:
        progress.close()
        for path in paths:
            path.transport.close()
    counted = torch.tensor(figures[sweep.warmup :], dtype=torch.float64)
    (spent_us, c10d_us), (dense_us, _) = counted.median(0).values.tolist()
    posts = 1 if nccl_engine else paths[0].transport.posts
    return StubRow(name, n, posts, spent_us, c10d_us, dense_us, nccl_engine)


class _StubbedPath:
    """One scheme's bucket on rank 0 of n, without peers.

    Args:
        sweep: the options.
        name: of the scheme.
        n: ranks.
        progress: the thread that runs it.
        nccl_engine: whether the engine runs it.
    """

    def __init__(
        self, sweep: BucketSweep, name: str, n: int, progress: ProgressThread, nccl_engine: bool
    ) -> None:
        density = 1.0 if SCHEMES[name].takes is Input.DENSE else DENSITY
        case = BucketCase(CollectiveOp.ALL_REDUCE, name, "fp32", density, NUMEL_A_RANK * n)
        settings = CollectiveSweep(
            min_bytes=4 * case.numel,
            max_bytes=4 * case.numel,
            densities=[density],
            schemes=[name],
            capacity=sweep.capacity,
            timeout_s=TIMEOUT_S,
        )
        self.transport = _RankWithoutPeers(_record(case, settings, n), nccl_engine=nccl_engine)
        self._path = BucketPath(case, settings, Groups(self.transport), progress)
        self._values_N = case.normal_values(0)
        self._bucket = case.bucket(self._values_N.clone(), n)

    def run(self) -> tuple[float, float]:
        """Synchronises the bucket; returns the host's microseconds, and those inside c10d."""
        self.transport.begin()
        self._bucket.grad_N.copy_(self._values_N)
        record = self._path.run(self._bucket, 0)
        return record.host_cpu_us - 1e6 * self.transport.paused_s, 1e6 * self.transport.c10d_s


def _record(case: BucketCase, sweep: CollectiveSweep, n: int) -> list[torch.Tensor]:
    """The bytes of all messages to rank 0, in the order in which it receives them."""
    cluster = VirtualCluster(n)
    recorded = _Recorded(cluster.transports[0])

    def start(transport: Any) -> Generator[Any, None, None]:
        seen: Any = recorded if transport.rank == 0 else transport
        bucket = case.bucket(case.normal_values(transport.rank), n)
        for outcome in BucketPath(case, sweep, Groups(seen)).steps(bucket, 0):
            yield outcome
            if transport.rank == 0:
                recorded.finished(outcome)

    cluster.run(start)
    return [
        values.view(torch.uint8).view(-1)
        for _, pieces in sorted(recorded.came.items())
        for values in pieces.values()
    ]


class _Recorded:
    """The data that rank 0 received in each of its exchanges on the virtual cluster."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: dict[object, tuple[int, Sequence[tuple[int, torch.Tensor]]]] = {}
        self.came: dict[int, dict[int, torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any], tag: int) -> Any:
        """Posts it, and remembers where its messages will be."""
        work = self._transport.exchange(sends, receives, tag)
        self._under_way[work] = (len(self._under_way), receives)
        return work

    def finished(self, work: object) -> None:
        """Copies the data that a work has received."""
        if work in self._under_way:
            number, receives = self._under_way[work]
            self.came[number] = {peer: values.clone() for peer, values in receives}


_NO_NCCL: Any = SimpleNamespace(
    addresses=(0,) * len(POSTING),
    unique_id=bytes,
    make=lambda unique_id, rank, world_size: 0,
    trouble=lambda communicator: None,
    destroy=lambda communicator: None,
)
"""In place of `NcclLibrary`: functions that the engine's one call would use, and no NCCL."""
_QUEUED: Any = SimpleNamespace(query=lambda: True)
"""In place of a CUDA event: the device has always reached it."""


class _CommunicatorWithoutPeers(NcclCommunicator):
    """Rank 0's communicator, which stops before the call of C++."""

    @staticmethod
    def _post(communicator: torch.Tensor, summed: SumCall) -> tuple[torch.Tensor, int]:
        summed.arguments(communicator)
        return torch.zeros(summed.plan.report_words, dtype=torch.int64), 0

    def _record(self) -> Any:
        return _QUEUED


class _RankWithoutPeers(ProcessGroupTransport):
    """Rank 0, which posts as with NCCL and receives the recorded messages."""

    def __init__(self, came: Sequence[torch.Tensor], *, nccl_engine: bool) -> None:
        self._came = came
        self.begin()
        assert dist.group.WORLD is not None, "made by the caller"
        super().__init__(dist.group.WORLD, TIMEOUT_S, torch.device("cpu"), liveness=False)
        if nccl_engine:
            self.communicator: NcclCommunicator | None = _CommunicatorWithoutPeers(
                _NO_NCCL,
                0,
                self.world_size,
                self.device,
                TIMEOUT_S,
                lambda text: text,
                self._announce,
            )
        self.device = torch.device("cuda")  # from here on it only selects the way of posting

    def begin(self) -> None:
        """Resets the counts; called before each bucket."""
        self.posts, self.c10d_s, self.paused_s, self._taken = 0, 0.0, 0.0, 0

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any], tag: int) -> Any:
        """See `Transport`. All peers' messages arrive at once."""
        work = self._counted(lambda: super(_RankWithoutPeers, self).exchange(sends, receives, tag))
        begun_s = time.thread_time()
        for _, values in receives:
            values.view(torch.uint8).view(-1).copy_(self._came[self._taken])
            self._taken += 1
        self.paused_s += time.thread_time() - begun_s
        return work

    def _collective(self, name: str, post: Callable[[], Any]) -> Any:
        return self._counted(lambda: super(_RankWithoutPeers, self)._collective(name, post))

    def _counted(self, post: Callable[[], Any]) -> Any:
        begun_s = time.thread_time()
        work = post()
        self.c10d_s += time.thread_time() - begun_s
        self.posts += 1
        return work
