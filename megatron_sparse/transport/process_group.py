"""Transport over c10d's public operations: gloo on CPU, NCCL on CUDA, any group.

Streams, watchdog, flight recorder and timeouts are c10d's. The group is one of its own: its
operations cannot interleave with Megatron's on the same communicator, and its timeout is ours.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport.groups import borrow_group, return_group

# torch 2.13 renamed these two; older ones only have the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WAITERS = 8
"""Threads that wait for works that gloo does not let one poll."""


class ProcessGroupWork:
    """A c10d work, whose failure becomes a `CommunicationError` that names the operation."""

    def __init__(self, work: dist.Work | None, operation: str, on_cuda: bool) -> None:
        self._work = work
        self._operation = operation
        self._on_cuda = on_cuda

    def ready(self) -> bool:
        """See `Work`. On CUDA always true: `finish` only orders the stream."""
        return self._on_cuda or self._work is None or self._work.is_completed()

    def finish(self) -> None:
        """See `Work`."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise communication_error(self._operation, error) from error


class PairwiseWork:
    """The works of one NCCL group call; `finish` orders the current stream after all of them."""

    def __init__(self, works: list[dist.Work], operation: str) -> None:
        self._works = works
        self._operation = operation

    def ready(self) -> bool:
        """See `Work`. Always true: `finish` only orders the stream."""
        return True

    def finish(self) -> None:
        """See `Work`."""
        try:
            _wait_all(self._works)
        except RuntimeError as error:
            raise communication_error(self._operation, error) from error


def _wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "only members of the group exchange"
        work.wait()


class WaitedWork:
    """A gloo work that completes only inside `wait()`, which a thread of its own calls."""

    def __init__(self, waiting: Future[Any], operation: str) -> None:
        self._waiting = waiting
        self._operation = operation

    def ready(self) -> bool:
        """See `Work`."""
        return self._waiting.done()

    def finish(self) -> None:
        """See `Work`."""
        try:
            self._waiting.result()
        except RuntimeError as error:
            raise communication_error(self._operation, error) from error


def communication_error(operation: str, error: Exception) -> CommunicationError:
    """The typed form of a backend's exception."""
    return CommunicationError(
        f"{operation} failed",
        expected="every rank of the group takes part within scheme.timeout_s",
        got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        remedy="look at the other ranks' logs for the one that stopped first",
    )


class ProcessGroupTransport:
    """See `Transport`.

    Args:
        group: the group whose ranks take part; a second group over the same ranks is made.
        timeout_s: seconds after which an operation fails.
        device: CPU for gloo, the current CUDA device for NCCL.

    Raises:
        ConfigError: the device does not fit the backend.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, device: torch.device) -> None:
        backend = dist.get_backend(group)
        if (backend == "nccl") != (device.type == "cuda"):
            raise ConfigError(
                "the gradients' device does not fit the group's backend",
                expected="cuda with nccl, cpu with gloo",
                got=f"{device.type} with {backend}",
                remedy="choose --distributed-backend to match",
            )
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self.group = borrow_group(dist.get_process_group_ranks(group), backend, timeout_s)
        self._waiters = ThreadPoolExecutor(WAITERS, thread_name_prefix="megatron_sparse_wait")
        self.nodes = self._find_nodes()

    def _find_nodes(self) -> tuple[int, ...]:
        """Compares host names: one small all-gather, waited for on the host."""
        digest = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
        own = torch.tensor([int.from_bytes(digest)], dtype=torch.int64, device=self.device)
        gathered = own.new_empty(self.world_size)
        self.all_gather(gathered, own).finish()
        hosts = gathered.tolist()
        return tuple(hosts.index(host) for host in hosts)

    def _work(self, operation: str, post: object) -> ProcessGroupWork:
        return ProcessGroupWork(post, operation, self.device.type == "cuda")  # type: ignore[arg-type]

    def all_reduce_(self, values_N: torch.Tensor) -> ProcessGroupWork:
        """See `Transport`."""
        return self._work("all_reduce", dist.all_reduce(values_N, group=self.group, async_op=True))

    def reduce_scatter(
        self, shard_M: torch.Tensor, values_N: torch.Tensor
    ) -> ProcessGroupWork | WaitedWork:
        """See `Transport`."""
        work = _reduce_scatter(shard_M, values_N, group=self.group, async_op=True)
        if work is not None and self.device.type == "cpu":
            # gloo reduces everything and copies the shard out in wait(): it is never "completed"
            # before somebody waits.
            return WaitedWork(self._waiters.submit(work.wait), "reduce_scatter")
        return self._work("reduce_scatter", work)

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> ProcessGroupWork:
        """See `Transport`."""
        work = _all_gather(gathered, own_M, group=self.group, async_op=True)
        return self._work("all_gather", work)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> ProcessGroupWork:
        """See `Transport`."""
        work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self.group, async_op=True
        )
        return self._work("all_to_all", work)

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> ProcessGroupWork | PairwiseWork | WaitedWork:
        """See `Transport`. NCCL has no tags; there, the order of the posts tells them apart.

        With gloo a message that is longer than what waits for it aborts the process: agree on
        sizes first.
        """
        sends = [(peer, values) for peer, values in sends if values.numel()]
        receives = [(peer, values) for peer, values in receives if values.numel()]
        peers = {peer for peer, _ in [*sends, *receives]}
        assert self.rank not in peers, "a rank exchanges nothing with itself"
        operation = f"exchange with ranks {sorted(peers)}"
        if not peers:
            return self._work(operation, None)
        try:
            if self.device.type == "cuda":
                posted = self._post_batch(sends, receives, tag)
                return PairwiseWork(posted, operation)
            # Receives first: what arrives before its buffer is known waits in the socket.
            posted = [
                dist.irecv(values.view(torch.uint8), group=self.group, group_src=peer, tag=tag)
                for peer, values in receives
            ]
            posted += [
                dist.isend(values.view(torch.uint8), group=self.group, group_dst=peer, tag=tag)
                for peer, values in sends
            ]
        except RuntimeError as error:
            raise communication_error(operation, error) from error
        # gloo's pairwise works, too, complete only inside wait().
        return WaitedWork(self._waiters.submit(_wait_all, posted), operation)

    def _post_batch(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> list[dist.Work]:
        """One NCCL group call, so that sends and receives cannot block one another."""
        operations = [(dist.irecv, *item) for item in receives]
        operations += [(dist.isend, *item) for item in sends]
        return dist.batch_isend_irecv(
            [
                dist.P2POp(post, values, group=self.group, tag=tag, group_peer=peer)
                for post, peer, values in operations
            ]
        )

    def close(self, *, broken: bool = False) -> None:
        """Gives the transport's own group back; `broken` if an operation of it failed."""
        self._waiters.shutdown(wait=not broken)
        return_group(self.group, broken=broken)
