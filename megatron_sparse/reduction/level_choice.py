"""Which level a group of ranks compresses at: from `compression.level` and the ranks' nodes.

`node` needs nodes of equally many ranks, more than one each, and ranks that are numbered node by
node. Where `node` is asked for but not possible, the ranks run at another level, and the reason is
logged. With the costs of a cluster `auto` takes the cheapest of the possible levels
(`planner.levels`); without, `instance` where there are several instances, then `node`. All ranks of
a group come to the same result: they have the same configuration and node numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import AUTO as AUTO_SCHEME
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.level import AUTO, INSTANCE, NODE, RANK
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.planner.levels import LevelComparison, LevelPricing
from megatron_sparse.planner.prices import DENSE, fits
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.pricing.shape import FP32_BYTES, BucketShape
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import Transport, VirtualCluster
from megatron_sparse.transport.topology import members_of

PRICED_NUMEL = 2**24
"""Elements of the fp32 bucket, 64 MiB, that `auto` prices if it does not know the model's."""
PRICED_NODES = 8
"""`auto` prices buckets on at most this many nodes: more take long, and hardly ever change which
level is cheaper."""
PRICED_SCHEMES = ("dense", "agsparse", "direct")
"""Schemes that `auto` prices at both levels if `scheme.name` has no price of its own."""


@dataclass(frozen=True)
class LevelChoice:
    """The level that runs.

    Attributes:
        level: `rank`, `node` or `instance`.
        reason: one sentence without a full stop.
        nodes: for `node`, the ranks of each node, in order; empty for the other levels.
    """

    level: str
    reason: str
    nodes: tuple[tuple[int, ...], ...] = ()

    def inside(self, rank: int) -> tuple[int, ...]:
        """The ranks of the rank's node. Only for `node`."""
        return self.nodes[rank // len(self.nodes[0])]

    def across(self, rank: int) -> tuple[int, ...]:
        """The rank's lane: the ranks with its place in every node. Only for `node`.

        Example:
            >>> choice = LevelChoice("node", "", ((0, 1), (2, 3)))
            >>> choice.inside(3), choice.across(3)
            ((2, 3), (1, 3))
        """
        place = rank % len(self.nodes[0])
        return tuple(members[place] for members in self.nodes)


def virtual_groups(
    cluster: VirtualCluster, choice: LevelChoice, instances: int = 1
) -> list[Groups]:
    """The groups of each rank of a virtual cluster.

    Args:
        cluster: its ranks are numbered instance by instance.
        choice: the level; its ranks are those of the first instance.
        instances: of the distributed optimizer.
    """
    n = len(cluster.transports)
    size = n // instances  # ranks of an instance

    @cache
    def transports_of(ranks: tuple[int, ...]) -> dict[int, Transport]:
        """The transports of a group of these ranks, by rank; a group is made only once."""
        return dict(zip(ranks, cluster.group(ranks), strict=True))

    def groups_of(rank: int) -> Groups:
        place = rank % size  # in its instance

        def own(places: Iterable[int]) -> Transport:
            """This rank's transport of the group of the ranks at these places of its instance."""
            return transports_of(tuple(rank - place + member for member in places))[rank]

        whole = own(range(size))
        same_place = tuple(range(place, n, size))  # one rank of every instance
        others = transports_of(same_place)[rank] if instances > 1 else None
        if choice.level == INSTANCE:
            assert others is not None, "the choice needs several instances"
            return Groups(whole, level=LevelGroups(whole, others, INSTANCE))
        level = None
        if choice.nodes:
            level = LevelGroups(own(choice.inside(place)), own(choice.across(place)))
        return Groups(whole, others, level)

    return [groups_of(rank) for rank in range(n)]


def choose_level(
    config: SparseConfig,
    nodes: Sequence[int],
    instances: int = 1,
    shapes: Mapping[BucketShape, int] | None = None,
) -> LevelChoice:
    """The level of one data-parallel group.

    Args:
        config: resolved; `compression`, `scheme` and `planner.cluster` are read.
        nodes: for each rank of the group the node that it is on.
        instances: of Megatron's distributed optimizer.
        shapes: of the model's buckets on all ranks -> how many there are of each, for `auto` with
            `planner.cluster`; None prices an all-reduce of `PRICED_NUMEL` elements.

    Raises:
        ConfigError: the cluster file cannot be read, or lacks a rate.

    Example:
        >>> node = SparseConfig.from_overrides(level="node")
        >>> choose_level(node, (0, 0, 1, 1)).level, choose_level(node, (0, 0, 1)).level
        ('node', 'rank')
    """
    asked = config.compression.level
    if asked == RANK:
        return LevelChoice(RANK, "compression.level=rank")
    name = config.scheme.name
    is_dense = name != AUTO_SCHEME and SCHEMES[name].takes is Input.DENSE
    if is_dense or not config.compression.enabled:
        return LevelChoice(RANK, "nothing is ever pruned: the backend's own collective")
    if asked == INSTANCE:
        if instances == 1:
            return LevelChoice(RANK, "there is one instance of the distributed optimizer")
        return LevelChoice(INSTANCE, "compression.level=instance")
    by_nodes = _by_nodes(nodes, asked)
    is_only_choice = by_nodes.level == RANK and instances == 1
    if asked == NODE or is_only_choice:
        return by_nodes
    # From here on `auto`, with several levels to choose from.
    if config.planner.cluster is not None:
        sizes = [len(members) for members in by_nodes.nodes or members_of(nodes)]
        cheapest = _cheapest(config, find(config.planner.cluster), sizes, shapes, instances)
        members = by_nodes.nodes if cheapest.level == NODE else ()
        return LevelChoice(cheapest.level, cheapest.reason, members)
    if instances > 1:
        # Their links are the slow ones, or there would be one instance.
        return LevelChoice(INSTANCE, f"{instances} instances of the distributed optimizer")
    return by_nodes


def _by_nodes(nodes: Sequence[int], asked: str) -> LevelChoice:
    """The level `node` if the ranks' places on the nodes allow it, else `rank`.

    One node alone is enough if `node` is asked for, and not for `auto`.
    """
    members = tuple(map(tuple, members_of(nodes)))
    sizes = sorted({len(ranks) for ranks in members})
    if len(members) == 1 and asked == AUTO:
        return LevelChoice(RANK, "all ranks are on one node")
    if sizes == [1]:
        return LevelChoice(RANK, "each node has one rank")
    if len(sizes) > 1:
        return LevelChoice(RANK, f"nodes have {sizes[0]} to {sizes[-1]} ranks")
    ordered = sorted(members)
    if [*chain(*ordered)] != list(range(len(nodes))):
        return LevelChoice(RANK, "ranks are not numbered node by node")
    shape = f"{len(members)} nodes of {sizes[0]} ranks"
    if len(members) == 1:
        shape = f"{sizes[0]} ranks on one node, where nothing is compressed: dense"
    return LevelChoice(NODE, shape, tuple(ordered))


def _cheapest(
    config: SparseConfig,
    cluster: ClusterModel,
    node_sizes: Sequence[int],
    shapes: Mapping[BucketShape, int] | None,
    instances: int,
) -> LevelComparison:
    """The level that is fastest by the target density and the links of a cluster file."""
    priced_sizes = node_sizes[:PRICED_NODES]
    value_bits, ranks = config.compression.given_value_bits, sum(priced_sizes)
    if shapes is None:
        op = CollectiveOp.ALL_REDUCE
        shape = BucketShape(PRICED_NUMEL, 0, FP32_BYTES, op, ranks, value_bits=value_bits)
        shapes = {shape: 1}  # one such bucket
    # As if the group had only the ranks that are priced.
    counts = {replace(shape, world_size=ranks): count for shape, count in shapes.items()}
    name, options = config.scheme.name, config.scheme
    is_priced = name != AUTO_SCHEME and all(
        fits(name, shape.op, options, value_bits) for shape in counts
    )
    names = (DENSE, name) if is_priced else PRICED_SCHEMES
    pricing = LevelPricing(cluster, options, names, priced_sizes, instances)
    return pricing.best(counts, config.compression.given_density)
