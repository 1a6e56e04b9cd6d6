"""A transport for a subset of another transport's ranks.

For a collective inside a part of a group, for example across the nodes of a hierarchy: the other
ranks of the group need not take part. It makes no process group: all its operations are pairwise
exchanges on the whole group's transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.transport.base import PeerTensors, Transport, Work, to_everyone
from megatron_sparse.transport.nccl_communicator import NcclCommunicator


class SubsetTransport:
    """The part of `Transport` that sparse collectives use: `exchange` and `all_gather`.

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
