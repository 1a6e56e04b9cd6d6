"""Windows of GPU memory that all ranks of an NVLink domain reach by pointer.

The kernels (`cuda_ext.peer_ops`) take only pointers. A `WindowProvider` makes them: torch's
symmetric memory, CUDA IPC, or virtual ranks on one GPU. `PeerMemory` owns the windows, counts the
operations and reads the error words.

For a bucket of N elements in fp32 a window takes about 8 N (1 + 1 / n) bytes on each rank: two
areas for messages and two for sums, each with room for dense records. One set of windows serves all
buckets of a group, one after the other on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_sparse.cuda_ext.peer_ops import (
    CONTROL_BYTES,
    ERROR_AT,
    ERROR_WORDS,
    Operation,
    PeerCall,
    PeerDomain,
    PeerLayout,
    look_at,
    peer_collective,
    window_bytes,
)
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import ConfigError, DependencyError, HostError


@dataclass(frozen=True)
class PeerWindows:
    """The windows of a domain, as one process sees them.

    Attributes:
        own: uint8, the windows of this process's ranks.
        pointers: the address of every rank's window.
        mapped: objects that keep peers' memory mapped; never used otherwise.
    """

    own: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]
    mapped: tuple[Any, ...] = field(default=(), repr=False)


class WindowProvider(Protocol):
    """Makes windows.

    Attributes:
        world_size: ranks of the domain.
        first_rank: the first one that this process runs.
        local_ranks: how many it runs.
        device: the GPU.
    """

    world_size: int
    first_rank: int
    local_ranks: int
    device: torch.device

    def open(self, nbytes: int) -> PeerWindows:
        """Windows of `nbytes` for every rank, aligned to 256 bytes, their control part zeroed.

        Collective over the domain; returns when all ranks' control is zeroed. Waits for the device.

        Raises:
            HostError: the ranks cannot reach one another's memory.
        """
        ...


class VirtualRanks:
    """Several ranks in one process, on one GPU: for tests, and to time the kernels.

    They share the GPU's memory and caches, so the times do not predict times over NVLink.

    Args:
        world_size: number of ranks.
        device: the GPU.

    Raises:
        ConfigError: the device is no GPU.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        _check_cuda(device)
        self.world_size = self.local_ranks = world_size
        self.first_rank = 0
        self.device = device

    def open(self, nbytes: int) -> PeerWindows:
        """See `WindowProvider`."""
        own = tuple(_zeroed_window(nbytes, self.device) for _ in range(self.world_size))
        torch.cuda.synchronize(self.device)
        return PeerWindows(own, tuple(window.data_ptr() for window in own))


class _OneRankEach:
    """The common part of the providers with one process for each rank.

    Args:
        group: the ranks of the domain, one process and one GPU each, all on one machine.
        device: this rank's GPU, which must reach the peers' (`nvidia-smi topo -p2p r`).

    Raises:
        ConfigError: the device is no GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        _check_cuda(device)
        self._group = group
        self.world_size, self.local_ranks = dist.get_world_size(group), 1
        self.first_rank = dist.get_rank(group)
        self.device = device

    def _meet(self, by: str, error: RuntimeError | None) -> None:
        """Shares the outcome with all ranks; on return every rank has zeroed its control.

        Raises:
            HostError: some rank cannot reach the others; raised on all ranks.
        """
        if error is None:
            torch.cuda.synchronize(self.device)
        got = None if error is None else (str(error) or repr(error)).split("\n", 1)[0]
        found: list[str | None] = [None] * self.world_size
        dist.all_gather_object(found, got, group=self._group)
        failed = {rank: text for rank, text in enumerate(found) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            raise HostError(
                f"the ranks cannot reach one another's GPU memory by {by}",
                expected="GPUs of one machine with peer access (nvidia-smi topo -p2p r)",
                got=f"rank {rank} of {self.world_size}: {text}",
                remedy="use scheme.name=direct, or another scheme.peer_windows",
            ) from error


class SymmetricMemory(_OneRankEach):
    """torch's symmetric memory. It is an alpha interface, so no other module uses it.

    Only its buffers are used: its signals trap when they time out, which kills the process. The
    kernels have flags and deadlines of their own.
    """

    def open(self, nbytes: int) -> PeerWindows:
        """See `WindowProvider`.

        Raises:
            DependencyError: this torch has no symmetric memory.
        """
        try:
            from torch.distributed import _symmetric_memory
        except ImportError as error:
            raise DependencyError(
                "torch has no symmetric memory",
                expected="torch 2.11 or newer, built with CUDA",
                got=torch.__version__,
                remedy="set scheme.peer_windows=cuda_ipc",
            ) from error
        try:
            window = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
            window[:CONTROL_BYTES].zero_()
            handle = _symmetric_memory.rendezvous(window, self._group)
            bases = [
                handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr()
                for rank in range(self.world_size)
            ]
        except RuntimeError as error:
            self._meet("torch's symmetric memory", error)
            raise
        self._meet("torch's symmetric memory", None)
        # Where torch allocates from a pool, the tensor lies somewhere in the buffer.
        inside = window.data_ptr() - bases[self.first_rank]
        return PeerWindows((window,), tuple(base + inside for base in bases), (handle,))


class CudaIpc(_OneRankEach):
    """Memory that one process allocates and the others map (cudaIpcOpenMemHandle)."""

    def open(self, nbytes: int) -> PeerWindows:
        """See `WindowProvider`."""
        from torch.multiprocessing.reductions import reduce_tensor

        window = _zeroed_window(nbytes, self.device)
        shared: list[Any] = [None] * self.world_size
        dist.all_gather_object(shared, reduce_tensor(window), group=self._group)
        tensors: list[torch.Tensor] = []
        try:
            for rank, (rebuild, arguments) in enumerate(shared):
                mine = rank == self.first_rank
                tensors.append(window if mine else _map(rebuild, arguments, self.device))
        except RuntimeError as error:
            self._meet("CUDA IPC", error)
            raise
        self._meet("CUDA IPC", None)
        return PeerWindows((window,), tuple(t.data_ptr() for t in tensors), tuple(tensors))


class PeerMemory:
    """A domain's windows, and the collectives that run in them. Making one is collective.

    All operations go to one stream, in the same order on every rank. After an error the windows
    cannot be used any more: a rank that has failed stops waiting and tells all ranks.

    Attributes:
        domain: pointers, and the room for messages and sums.
        layouts: of each bucket, by its name.
        in_order_of_coming: see `peer_collective`.

    Args:
        provider: makes the windows.
        layouts: of all buckets, by name; windows have room for the largest.
        deadline_s: seconds for each wait for messages; twice as many for a wait for sums.
        in_order_of_coming: owners add shards as they arrive, for groups with stragglers.

    Raises:
        ConfigError: a layout is for another number of ranks.
        HostError: the ranks cannot reach one another's memory.
    """

    def __init__(
        self,
        provider: WindowProvider,
        layouts: Mapping[str, PeerLayout],
        deadline_s: float,
        *,
        in_order_of_coming: bool = False,
    ) -> None:
        for name, layout in layouts.items():
            if layout.world_size != provider.world_size:
                raise ConfigError(
                    f"bucket {name} is cut for another number of ranks",
                    expected=f"{provider.world_size} shards",
                    got=layout.world_size,
                    remedy="cut it for the ranks of the NVLink domain",
                )
        message_room = max(layout.message_room for layout in layouts.values())
        sum_room = max(layout.sum_room for layout in layouts.values())
        self._windows = provider.open(window_bytes(message_room, sum_room))
        self.domain = PeerDomain(
            self._windows.pointers,
            provider.first_rank,
            provider.local_ranks,
            message_room,
            sum_room,
            deadline_s,
        )
        self.layouts = dict(layouts)
        self.in_order_of_coming = in_order_of_coming
        self._counts = [0, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of this process's windows."""
        return sum(window.numel() for window in self._windows.own)

    def run(
        self,
        operation: Operation,
        bucket: str,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        step: int,
        *,
        densities: tuple[float, float] = (1.0, 1.0),
        message_slots: torch.Tensor | None = None,
    ) -> None:
        """Launches an operation on the current stream and returns; see `peer_collective`.

        Args:
            operation: all-reduce, reduce-scatter or all-gather.
            bucket: its name.
            inputs: of each local rank.
            outs: of each local rank. Mutated.
            step: the step.
            densities: above these, messages and sums are dense.
            message_slots: where the records of messages lie in capacity mode.

        Raises:
            ExtensionError: arguments that do not fit together; nothing was launched.
        """
        ahead = [count + (p in operation.phases) for p, count in enumerate(self._counts)]
        areas = (ahead[0] % 2, ahead[1] % 2)
        peer_collective(
            self.domain,
            self.layouts[bucket],
            PeerCall(operation, areas, inputs, outs, step, message_slots),
            message_density=densities[0],
            sum_density=densities[1],
            in_order_of_coming=self.in_order_of_coming,
        )
        self._counts = ahead

    def report(self, reports: Reports, bucket: str, step: int) -> None:
        """Adds the error words of this process's ranks to reports that are read later.

        Args:
            reports: raises `CommunicationError` or `WireFormatError` when it is read. Mutated.
            bucket: its name.
            step: the step.
        """
        for place, window in enumerate(self._windows.own):
            rank = self.domain.first_rank + place
            words = window[ERROR_AT : ERROR_AT + 8 * ERROR_WORDS].view(torch.int64).clone()
            reports.add(words, self._look(rank, bucket, step))

    def check(self, bucket: str, step: int) -> None:
        """Waits for the device and raises the first error of this process's ranks.

        Raises:
            CommunicationError: a rank did not arrive in time.
            WireFormatError: a rank's records are wrong.
        """
        reports = Reports()
        self.report(reports, bucket, step)
        reports.read()

    def _look(self, rank: int, bucket: str, step: int) -> Callable[[torch.Tensor], None]:
        layout, deadline_s = self.layouts[bucket], self.domain.deadline_s
        return lambda words: look_at(words, layout, rank, deadline_s, bucket, step)


def _check_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            "peer memory needs a GPU",
            expected="a CUDA device",
            got=device,
            remedy="use scheme.name=direct, which does the same over any process group",
        )


def _zeroed_window(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory from torch's allocator, which aligns to 512 bytes."""
    window = torch.empty(nbytes, dtype=torch.uint8, device=device)
    window[:CONTROL_BYTES].zero_()
    return window


def _map(rebuild: Any, arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """A peer's window, mapped in the context of this rank's GPU, where the kernels run."""
    changed = list(arguments)
    storage_device = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
    assert isinstance(changed[storage_device], int), "torch passes the device as a number here"
    changed[storage_device] = torch.cuda.current_device() if device.index is None else device.index
    return rebuild(*changed)
