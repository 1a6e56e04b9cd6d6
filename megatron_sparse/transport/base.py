"""The interface that collectives are written against.

Every operation is asynchronous and returns a `Work`. All ranks of a group post the same operations
in the same order. A collective yields each `Work` whose result it needs before it can go on; its
caller decides how to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol

import torch

from megatron_sparse.transport.nccl_communicator import NcclCommunicator


class Marker(Enum):
    """A collective yields one, besides its works, to say which operations it may still post."""

    POSTED = "posted"
    """It posts nothing more."""
    UNORDERED = "unordered"
    """It posts only pairwise messages with a tag of their own. They may be posted in any order
    relative to other collectives' messages. Not with NCCL, which has no tags."""
    QUEUED = "queued"
    """On CUDA: the result is complete on the current stream. From here on it only reads reports,
    and raises the errors in them; each further yield is a copy of reports."""


type PeerTensors = Sequence[tuple[int, torch.Tensor]]
"""A peer and a contiguous tensor for each message that is sent, or received."""


class Work(Protocol):
    """A posted operation."""

    def ready(self) -> bool:
        """Whether `finish` would return at once. Never blocks."""
        ...

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Registers `wake`: some thread calls it as soon as `ready` may have become true.

        An operation that never ends never calls it, so also poll `ready` now and then.
        """
        ...

    def finish(self) -> None:
        """Makes the result usable: the host waits (CPU), or the current stream does (CUDA).

        Raises:
            CommunicationError: the operation failed or timed out.
        """
        ...


def to_everyone(
    transport: Any, gathered: torch.Tensor, own_M: torch.Tensor
) -> tuple[PeerTensors, PeerTensors]:
    """`Transport.all_gather` in one round: its messages from every rank directly to every other.

    Args:
        transport: all ranks, or some; their number and this one's are read.
        gathered: see `Transport.all_gather`; gets this rank's part.
        own_M: see there.

    Returns:
        What this rank sends, and where it receives.
    """
    places = gathered.tensor_split(transport.world_size)
    places[transport.rank].copy_(own_M)
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    return [(peer, own_M) for peer in peers], [(peer, places[peer]) for peer in peers]


type Arrive = Callable[[str], Future[float]]
"""Reports that this rank is ready for the bucket of this name. Does not block. The n-th calls of
all ranks of a group for a bucket belong together.

Returns the seconds from this rank's arrival to the last one's; 0 for the last. Arrivals that are
pending when the transport is closed are never answered.
"""


class Transport(Protocol):
    """Moves tensors between the ranks of one group.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        device: where tensors must live.
        nodes: for each rank the node it is on; equal numbers share a host.
        communicator: NCCL's, for collectives that are one C++ call (`collectives.nccl_sum`); None
            without `scheme.nccl_engine`.
    """

    rank: int
    world_size: int
    device: torch.device
    nodes: tuple[int, ...]
    communicator: NcclCommunicator | None

    def open_arrival_counter(self) -> Arrive:
        """Begins to count the ranks that are ready. Collective; ends with the transport.

        The host waits for one small broadcast.
        """
        ...

    def all_reduce_(self, values_N: torch.Tensor) -> Work:
        """Sums `values_N` over all ranks, in place, by the backend's own collective."""
        ...

    def reduce_scatter(
        self, shard_M: torch.Tensor, values_N: torch.Tensor, *, average: bool = False
    ) -> Work:
        """Sums `values_N` (N = M * world_size) and leaves this rank's shard in `shard_M`.

        With `average` the backend itself divides the sum by the number of ranks. `shard_M` may be a
        view of `values_N`; the rest of `values_N` stays as it is.
        """
        ...

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """Gathers `own_M` (the same size on every rank) into `gathered` (world_size * M)."""
        ...

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> Work:
        """Sends to and receives from single peers, all at once; other ranks need not take part.

        Messages between two ranks with the same tag match in the order in which they were posted.
        Empty tensors are skipped on both sides. Until the work is finished, do not change the sent
        tensors and do not read the received ones.

        Args:
            sends: never to this rank itself.
            receives: each tensor exactly as long as the one that the peer sends.
            tag: 0 to 2^31 - 1; keeps different collectives apart where the backend has tags.
        """
        ...


class SubsetTransport:
    """Some of a transport's ranks, with what sparse collectives use: `exchange` and `all_gather`.

    For a collective inside a part of a group, for example across the nodes of a hierarchy: the
    other ranks need not take part. It makes no process group: all its operations are pairwise
    exchanges on the whole group's transport.

    Attributes:
        rank: this rank's place in the subset.
        world_size: ranks in the subset.
        device: where tensors must live.
        nodes: for each rank of the subset the node it is on.
        ranks: each one's number in the whole group.
        communicator: None; the whole group's communicator cannot serve a part of it.

    Args:
        transport: of the whole group.
        ranks: the group's ranks that take part, in order; this rank is one of them.
        tag: of the all-gathers' messages; see `Transport.exchange`.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], tag: int) -> None:
        self.rank = ranks.index(transport.rank)
        self.world_size = len(ranks)
        self.device = transport.device
        self.nodes = tuple(transport.nodes[rank] for rank in ranks)
        self._transport = transport
        self.ranks = ranks
        self.communicator: NcclCommunicator | None = None
        self._tag = tag

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """See `Transport` and `to_everyone`."""
        return self.exchange(*to_everyone(self, gathered, own_M), self._tag)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> Work:
        """See `Transport`; peers are places in the subset."""
        return self._transport.exchange(
            [(self.ranks[peer], values) for peer, values in sends],
            [(self.ranks[peer], values) for peer, values in receives],
            tag,
        )
