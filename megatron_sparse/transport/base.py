"""The interface that collectives are written against.

Every operation is asynchronous and returns a `Work`. All ranks of a group post the same operations
in the same order. A collective yields each `Work` whose result it needs before it can go on; its
caller decides how to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch

from megatron_sparse.transport.arrival_counter import ArrivalCounter
from megatron_sparse.transport.nccl_communicator import NcclCommunicator


class Marker(Enum):
    """Yielded by a collective, beside works, to say what it will still post."""

    POSTED = "posted"
    """Nothing more."""
    UNORDERED = "unordered"
    """Only pairwise messages with a tag of their own, which may be posted in any order relative to
    those of other collectives. Not with NCCL, which has no tags."""


class Work(Protocol):
    """A posted operation."""

    def ready(self) -> bool:
        """Whether `finish` would return at once. Never blocks."""
        ...

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, by any thread, as soon as `ready` may have become true.

        An operation that never ends does not call it: ask `ready` now and then, too.
        """
        ...

    def finish(self) -> None:
        """Makes the result usable: the host waits (CPU), or the current stream does (CUDA).

        Raises:
            CommunicationError: the operation failed or ran out of time.
        """
        ...


class Transport(Protocol):
    """Moves tensors between the ranks of one group.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        device: where tensors must live.
        nodes: for each rank the node it is on; equal numbers share a host.
        communicator: NCCL's, for collectives in one call of C++ (`collectives.nccl_sum`); None
            without `scheme.nccl_engine`.
    """

    rank: int
    world_size: int
    device: torch.device
    nodes: tuple[int, ...]
    communicator: NcclCommunicator | None

    def open_arrival_counter(self) -> ArrivalCounter:
        """Makes a counter of the ranks that are ready. Collective; closed with the transport.

        One small broadcast, for which the host waits.
        """
        ...

    def all_reduce_(self, values_N: torch.Tensor) -> Work:
        """Sums `values_N` over all ranks, in place, by the backend's own collective."""
        ...

    def reduce_scatter(self, shard_M: torch.Tensor, values_N: torch.Tensor) -> Work:
        """Sums `values_N` (N = M * world_size) and leaves this rank's shard in `shard_M`.

        `shard_M` may be a view of `values_N`.
        """
        ...

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """Gathers `own_M` (the same size on every rank) into `gathered` (world_size * M)."""
        ...

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> Work:
        """Sends to and receives from single peers, all at once; other ranks need not take part.

        Messages between two ranks with the same tag match in the order in which they were posted.
        Tensors without elements are left out on both sides. The sent tensors must not change, and
        the received ones must not be read, before the work is finished.

        Args:
            sends: (peer, contiguous tensor) each; never to this rank itself.
            receives: (peer, contiguous tensor) each, exactly as long as what the peer sends.
            tag: 0 to 2^31 - 1; keeps different collectives apart where the backend has tags.
        """
        ...
