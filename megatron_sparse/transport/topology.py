"""A two-level network: nodes of ranks, one kind of link inside a node and one between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_sparse.config.checks import one_of


@dataclass(frozen=True)
class Link:
    """The alpha-beta model of one kind of link: a message of m bytes takes alpha + beta m.

    Attributes:
        alpha_s: latency: seconds before a message's first byte arrives.
        beta_s: seconds per byte; the reciprocal of the bandwidth.
    """

    alpha_s: float
    beta_s: float


NO_TIME = Link(0.0, 0.0)


def members_of(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, ascending; nodes in the order of their numbers.

    Args:
        nodes: the node of each rank.

    Example:
        >>> members_of((0, 2, 0))
        [[0, 2], [1]]
    """
    members: dict[int, list[int]] = {node: [] for node in sorted(set(nodes))}
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    return list(members.values())


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node, and what the links between them cost.

    Attributes:
        node_sizes: ranks on each node; ranks are numbered node by node.
        intra: links between ranks of one node; each rank has one port for them.
        inter: links between nodes.
        nic: which ports `inter` links have: `rank`: one port for each rank; `node`: one port for
            each node, which its ranks share.

    Example:
        >>> Topology((2, 1), NO_TIME, NO_TIME).nodes
        (0, 0, 1)
    """

    node_sizes: tuple[int, ...]
    intra: Link
    inter: Link
    nic: str = "rank"

    def __post_init__(self) -> None:
        """Refuses an unknown `nic`."""
        one_of("topology.nic", self.nic, ("rank", "node"))
        assert min(self.node_sizes) > 0, "every node has ranks"

    @classmethod
    def even(
        cls, world_size: int, ranks_per_node: int, intra: Link, inter: Link, nic: str = "rank"
    ) -> Topology:
        """A topology of nodes with `ranks_per_node` ranks; the last node may have fewer."""
        full, rest = divmod(world_size, ranks_per_node)
        sizes = (ranks_per_node,) * full + ((rest,) if rest else ())
        return cls(sizes, intra, inter, nic)

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return sum(self.node_sizes)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    def link(self, source: int, target: int) -> Link:
        """The link from one rank to another."""
        same = self.nodes[source] == self.nodes[target]
        return self.intra if same else self.inter

    def ports(self, source: int, target: int) -> tuple[tuple[str, int], tuple[str, int]]:
        """The two ports that a message occupies: one of the sender, one of the receiver.

        A port carries one message at a time. It is a pair: its kind, and the number of its rank
        (or of its node, for a port that the ranks of a node share).
        """
        nodes = self.nodes
        if nodes[source] == nodes[target]:
            return ("intra_out", source), ("intra_in", target)
        if self.nic == "node":
            return ("inter_out", nodes[source]), ("inter_in", nodes[target])
        return ("inter_out", source), ("inter_in", target)
