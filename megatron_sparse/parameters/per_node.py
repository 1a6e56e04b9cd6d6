"""The exact gather of records once per node: across nodes compressed, inside them raw.

    across    every rank sends its record to one rank of each other node: the one with its own
              number in the node, modulo the ranks there. That rank turns the old bits of the
              sender's shard into the new ones.
    inside    every rank sends its own shard and those it has decoded, raw, to the other ranks of
              its node, in place.

In nodes of equal size these are the lanes of `collectives.dense_hierarchical`. A record crosses to
each other node once, whatever the number of ranks there, and each rank decodes k - 1 records on k
nodes instead of n - 1. Inside its node a rank with k shards sends them to m - 1 others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_sparse.collectives.base import Round, Steps, Subgroup, whole_group
from megatron_sparse.collectives.gather import pairwise_rounds
from megatron_sparse.transport import Transport
from megatron_sparse.transport.topology import members_of


class NodeRoutes:
    """The ranks that send to one another.

    Attributes:
        here: the ranks of this rank's node, ascending.
        targets: for each round across nodes the rank that this rank's record goes to.
        sources: for each round the ranks whose records come here.

    Args:
        nodes: the node of each rank.
        rank: this rank.

    Example:
        Ranks 0 and 1 share a node; rank 2 is alone on its own and takes both records.
        >>> routes = NodeRoutes((0, 0, 1), 2)
        >>> routes.targets, routes.sources, routes.carried_by(2)
        ([0], [[0, 1]], [2, 0, 1])
    """

    def __init__(self, nodes: Sequence[int], rank: int) -> None:
        members = members_of(nodes)
        own = next(node for node, ranks in enumerate(members) if rank in ranks)
        k = len(members)
        self.here = members[own]
        self._others = [members[(own + step) % k] for step in range(1, k)]
        place = self.here.index(rank)
        # In the round in which this node receives from the next one, it sends to the one before.
        self.targets = [there[place % len(there)] for there in reversed(self._others)]
        self.sources = [self._sent_to(rank, there) for there in self._others]

    def _sent_to(self, rank: int, there: Sequence[int]) -> list[int]:
        """The ranks of another node whose records go to a rank of this one."""
        return list(there[self.here.index(rank) :: len(self.here)])

    def carried_by(self, rank: int) -> list[int]:
        """The owners of the shards that a rank of this node hands on inside it, itself first."""
        return [rank] + [owner for there in self._others for owner in self._sent_to(rank, there)]


def gather_per_node(
    moves: torch.Tensor,
    sizes: Sequence[int],
    shards: torch.Tensor,
    transport: Transport,
    tag: int,
    take: Callable[[int, torch.Tensor], None],
) -> Steps:
    """Every rank ends with all shards; see the module's docstring.

    Args:
        moves: this rank's record.
        sizes: bytes of each rank's record.
        shards: [n, M], the parameters. `take` writes shards of other nodes; the exchange writes
            those of this node's other ranks, and those that they have taken.
        transport: the group; its `nodes` say the routes.
        tag: of the messages.
        take: called with a sender and its record, once for each record that comes here.
    """
    routes = NodeRoutes(transport.nodes, transport.rank)
    across = whole_group(transport, tag)
    received = [
        [(sender, moves.new_empty(sizes[sender])) for sender in senders]
        for senders in routes.sources
    ]
    rounds: list[Round] = [
        ([(target, moves)], come) for target, come in zip(routes.targets, received, strict=True)
    ]

    def arrived(number: int) -> None:
        for sender, record in received[number - 1] if number else ():
            take(sender, record)

    yield from across.in_rounds(rounds, arrived, independent=True)
    inside = Subgroup(transport, routes.here, tag)
    carried = [[shards[owner] for owner in routes.carried_by(rank)] for rank in routes.here]
    own = carried[inside.rank]
    exchanged = pairwise_rounds([own] * inside.world_size, carried, inside)
    yield from inside.in_rounds(exchanged, independent=True, last=True)
    return across.sent_bytes + inside.sent_bytes
