"""The interface between collectives and networks: `Transport`, which moves tensors between ranks.

To post an operation is to hand it to the backend (gloo, NCCL or virtual ranks). Every operation is
asynchronous and returns a `Work`. All ranks of a group post the same operations in the same order.
A collective is a generator: it yields each `Work` whose result it needs before it can go on, and
its caller decides how to wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol

import torch

from megatron_sparse.transport.nccl_communicator import NcclCommunicator


class Marker(Enum):
    """Yielded by a collective, besides its works, to say which operations it may still post."""

    POSTED = "posted"
    """It posts nothing more."""
    UNORDERED = "unordered"
    """It posts only pairwise messages with a tag of their own. They may be posted in any order
    relative to other collectives' messages. Not with NCCL, which has no tags."""
    QUEUED = "queued"
    """On CUDA: all work for the result is on the current stream. From here on it only checks what
    kernels have reported, and raises errors; each further yield is a copy of reports to the CPU."""


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
    """Makes an all-gather out of pairwise messages: every rank sends directly to every other.

    Args:
        transport: the ranks; `rank` and `world_size` are read.
        gathered: the output of the all-gather (world_size * M). Gets this rank's piece here.
        own_M: what this rank contributes.

    Returns:
        The sends and the receives, for `Transport.exchange`.
    """
    pieces = gathered.tensor_split(transport.world_size)  # one for each rank
    pieces[transport.rank].copy_(own_M)
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    return [(peer, own_M) for peer in peers], [(peer, pieces[peer]) for peer in peers]


type Arrive = Callable[[str], Future[float]]
"""Reports that this rank arrives at, that is, is ready for, the bucket of this name. Does not
block. The n-th calls of all ranks of a group for a bucket belong together.

Returns the seconds from this rank's arrival to the last rank's; 0 for the last rank. When the
transport is closed, futures that are still pending are never done.
"""


class Transport(Protocol):
    """Moves tensors between the ranks of one group.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        device: where tensors must live.
        nodes: for each rank the number of its node: equal numbers, one node.
        communicator: NCCL's, for collectives that are one C++ call (`collectives.nccl_sum`); None
            without `scheme.nccl_engine`.
    """

    rank: int
    world_size: int
    device: torch.device
    nodes: tuple[int, ...]
    communicator: NcclCommunicator | None

    def open_arrival_counter(self) -> Arrive:
        """Returns a function by which this rank reports its arrivals at buckets (see `Arrive`).

        Collective; blocks for one small broadcast. The function works until the transport's end.
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
        view of `values_N`; other elements of `values_N` are not changed.
        """
        ...

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """Gathers `own_M` (the same size on every rank) into `gathered` (world_size * M)."""
        ...

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> Work:
        """Posts pairwise sends and receives as one operation; other ranks need not take part.

        Messages between two ranks with the same tag match in the order in which they were posted.
        Empty tensors are skipped by sender and receiver. Until the work is finished, do not change
        the sent tensors and do not read the received ones.

        Args:
            sends: never to this rank itself.
            receives: each tensor exactly as long as the one that the peer sends.
            tag: 0 to 2^31 - 1; only messages of the same tag match, if the backend has tags.
        """
        ...


class SubsetTransport:
    """The transport of a subset of a group's ranks; has only `exchange` and `all_gather`.

    For a sparse collective of some ranks, for example across nodes: the other ranks need not take
    part. It makes no process group: all its operations are pairwise exchanges on the whole group's
    transport. Other attributes: `Transport`'s, of the subset.

    Attributes:
        ranks: for each rank of the subset its number in the whole group.
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
        """See `Transport`; peers are ranks of the subset, and are translated to the group's."""
        return self._transport.exchange(
            [(self.ranks[peer], values) for peer, values in sends],
            [(self.ranks[peer], values) for peer, values in receives],
            tag,
        )
