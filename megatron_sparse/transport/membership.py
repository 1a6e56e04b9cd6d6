"""Finds out which ranks of a group are on one node.

The node of a rank is the value of the first of these environment variables that is set:

    MEGATRON_SPARSE_NODE    set by the plugin where one machine simulates several (`cluster.nodes`)
    GROUP_RANK              set by torchrun and other launchers of torch's elastic agent
    SLURM_NODEID            set by srun
    the host's name         if none is set

Every rank of a group sends its answer to every other, so all compute the same nodes, and all
raise the same error if the answers contradict one another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_sparse.errors import ConfigError

NODE_VARIABLE = "MEGATRON_SPARSE_NODE"
_SOURCES = (NODE_VARIABLE, "GROUP_RANK", "SLURM_NODEID", "the host's name")
_LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""How many ranks the launcher has started on this node; said by torchrun."""
_UNKNOWN = 0


class NodeAnswer(NamedTuple):
    """What one rank knows of its node; numbers below 2^63, for an all-gather of int64.

    Attributes:
        node: a number; equal for ranks of one node.
        host: a hash of the host's name.
        source: index in `_SOURCES` of the variable that `node` comes from.
        local_ranks: how many ranks the launcher has started on the node; 0 if unknown.
    """

    node: int
    host: int
    source: int
    local_ranks: int = _UNKNOWN

    @classmethod
    def of(cls, environment: Mapping[str, str], host: str) -> NodeAnswer:
        """Reads this rank's answer from its environment variables and its host's name.

        Raises:
            ConfigError: a variable is not a number.

        Example:
            >>> here = NodeAnswer.of({"GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, "gpu-17")
            >>> here.node, here.local_ranks
            (3, 8)
        """
        digest = hashlib.blake2b(host.encode(), digest_size=7).digest()  # 7 bytes: below 2^63
        host_number = int.from_bytes(digest)
        for source, variable in enumerate(_SOURCES[:-1]):
            if variable in environment:
                # torchrun sets LOCAL_WORLD_SIZE too, for the node that GROUP_RANK numbers.
                is_torchrun = variable == "GROUP_RANK"
                local = _number(environment, _LOCAL_RANKS) if is_torchrun else _UNKNOWN
                return cls(_number(environment, variable), host_number, source, local)
        return cls(host_number, host_number, len(_SOURCES) - 1)  # no variable is set: by the host


def _number(environment: Mapping[str, str], variable: str) -> int:
    """The variable as a number, `_UNKNOWN` if it is not set; raises ConfigError for other text."""
    value = environment.get(variable, str(_UNKNOWN))
    if not value.isdecimal():
        raise ConfigError(
            f"{variable} does not say which node this rank is on",
            expected="a number, 0 or more",
            got=value,
            remedy="unset it, or let the launcher set it",
        )
    return int(value)


def agreed_nodes(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The node of each rank of a group, named by the lowest rank on that node.

    Args:
        rows: each rank's `NodeAnswer`, as numbers.

    Raises:
        ConfigError: the answers contradict one another; raised by every rank.

    Example:
        >>> agreed_nodes([[7, 1, 0, 0], [9, 1, 0, 0], [7, 1, 0, 0]])
        (0, 1, 0)
    """
    answers = [NodeAnswer(*row) for row in rows]
    first = answers[0]
    nodes = [answer.node for answer in answers]
    counts = Counter(nodes)  # node -> the group's ranks on it
    for rank, answer in enumerate(answers):
        if answer.source != first.source:
            raise ConfigError(
                "ranks learn from different sources which node they are on",
                expected=f"rank 0 of the group: {_SOURCES[first.source]}",
                got=f"rank {rank}: {_SOURCES[answer.source]}",
                remedy=f"start all ranks by the same launcher, or set {NODE_VARIABLE} for each",
            )
        leader = nodes.index(answer.node)  # the first rank on the same node
        if answer.host != answers[leader].host:
            raise ConfigError(
                f"{_SOURCES[answer.source]} puts ranks of different hosts on one node",
                expected=f"ranks {leader} and {rank} of the group on one host, as node "
                f"{answer.node}",
                got="different host names",
                remedy="number ranks node by node (srun --distribution=block), give each "
                f"machine's launcher a node rank of its own, or set {NODE_VARIABLE}",
            )
        # Two launchers with the same node rank: their ranks add up to more than either started.
        if _UNKNOWN < answer.local_ranks < counts[answer.node]:
            raise ConfigError(
                f"node {answer.node} has more ranks than its launcher has started",
                expected=f"at most {_LOCAL_RANKS}={answer.local_ranks}",
                got=f"{counts[answer.node]} ranks of the group",
                remedy="give each launcher a node rank of its own (torchrun --node-rank), or set "
                f"{NODE_VARIABLE} for each rank",
            )
    return tuple(nodes.index(node) for node in nodes)


def node_of_cluster(
    environment: Mapping[str, str], nodes: int, ranks_per_node: int
) -> dict[str, str]:
    """MEGATRON_SPARSE_NODE for this rank, where one machine simulates several: name -> value.

    Empty if nothing is simulated: the configuration has one node, or the launcher has started no
    more ranks here than a configured node has. Empty, too, if the variable is already set.

    Args:
        environment: variables of this process; RANK and LOCAL_WORLD_SIZE are read.
        nodes: `cluster.nodes`.
        ranks_per_node: `cluster.ranks_per_node`.

    Example:
        >>> on_one_machine = {"RANK": "3", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        >>> node_of_cluster(on_one_machine, nodes=2, ranks_per_node=2)
        {'MEGATRON_SPARSE_NODE': '1'}
    """
    local_ranks = _number(environment, _LOCAL_RANKS)
    if nodes == 1 or NODE_VARIABLE in environment or local_ranks <= ranks_per_node:
        return {}
    return {NODE_VARIABLE: str(_number(environment, "RANK") // ranks_per_node)}
