"""Chooses the level (`reduction.level`) at which a group of ranks compresses.

The choice follows from `compression.level` and the ranks' nodes. `node` needs nodes of equally many
ranks, more than one each, and ranks that are numbered node by node; where it is configured but not
possible, the level is `rank`, and the reason is logged. `auto` with a cluster file takes the level
of the least modelled time (`planner.levels`); without one, `instance` if there are several
instances of the distributed optimizer, else `node` if possible. All ranks of a group come to the
same result: they have the same configuration and node numbers.
"""

from collections.abc import Mapping, Sequence
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
    """The chosen level.

    Attributes:
        level: `rank`, `node` or `instance`.
        reason: for the log; one sentence without a full stop.
        nodes: for `node`, the ranks of each node, in order; empty for the other levels.
    """

    level: str
    reason: str
    nodes: tuple[tuple[int, ...], ...] = ()

    def inside(self, rank: int) -> tuple[int, ...]:
        """The ranks of the rank's node. Only for `node`."""
        return self.nodes[rank // len(self.nodes[0])]

    def across(self, rank: int) -> tuple[int, ...]:
        """The rank's lane: from each node the rank at the same index. Only for `node`.

        Example:
            >>> choice = LevelChoice("node", "", ((0, 1), (2, 3)))
            >>> choice.inside(3), choice.across(3)
            ((2, 3), (1, 3))
        """
        index = rank % len(self.nodes[0])
        return tuple(members[index] for members in self.nodes)


def virtual_groups(
    cluster: VirtualCluster, choice: LevelChoice, instances: int = 1
) -> list[Groups]:
    """Makes the groups of a virtual cluster at a level; returns those of each rank, in order.

    Args:
        cluster: its ranks are numbered instance by instance.
        choice: the level; its rank numbers count within an instance.
        instances: of the distributed optimizer.
    """
    n = len(cluster.transports)
    size = n // instances  # ranks of an instance

    @cache  # all members of a group must get their transports from one call of `cluster.group`
    def transports_of(ranks: tuple[int, ...]) -> dict[int, Transport]:
        """Makes a group of these ranks of the cluster; rank -> its transport."""
        return dict(zip(ranks, cluster.group(ranks), strict=True))

    groups = []
    for rank in range(n):
        index = rank % size  # the rank's number in its instance
        first = rank - index  # the first rank of its instance
        data_parallel = transports_of(tuple(range(first, first + size)))[rank]
        across_instances, level = None, None
        if instances > 1:  # the ranks at the same index of every instance
            across_instances = transports_of(tuple(range(index, n, size)))[rank]
        if choice.level == INSTANCE:
            assert across_instances is not None, "the choice needs several instances"
            level, across_instances = LevelGroups(data_parallel, across_instances, INSTANCE), None
        elif choice.nodes:
            inside = tuple(first + member for member in choice.inside(index))
            across = tuple(first + member for member in choice.across(index))
            level = LevelGroups(transports_of(inside)[rank], transports_of(across)[rank])
        groups.append(Groups(data_parallel, across_instances, level))
    return groups


def choose_level(
    config: SparseConfig,
    nodes: Sequence[int],
    instances: int = 1,
    shapes: Mapping[BucketShape, int] | None = None,
) -> LevelChoice:
    """Chooses the level of one data-parallel group; see the module's docstring.

    Args:
        config: resolved; `compression`, `scheme` and `planner.cluster` are read.
        nodes: for each rank of the group the node that it is on.
        instances: of Megatron's distributed optimizer.
        shapes: shape of a bucket of the model -> how many buckets have it, for `auto` with
            `planner.cluster`; None stands for one all-reduce of `PRICED_NUMEL` elements.

    Raises:
        ConfigError: the cluster file cannot be read, or lacks a rate.

    Example:
        >>> node = SparseConfig.from_overrides(level="node")
        >>> choose_level(node, (0, 0, 1, 1)).level, choose_level(node, (0, 0, 1)).level
        ('node', 'rank')
    """
    configured = config.compression.level
    if configured == RANK:
        return LevelChoice(RANK, "compression.level=rank")
    name = config.scheme.name
    is_dense = name != AUTO_SCHEME and SCHEMES[name].takes is Input.DENSE
    if is_dense or not config.compression.enabled:
        return LevelChoice(RANK, "nothing is ever pruned: the backend's own collective")
    if configured == INSTANCE:
        if instances == 1:
            return LevelChoice(RANK, "there is one instance of the distributed optimizer")
        return LevelChoice(INSTANCE, "compression.level=instance")
    node_or_rank = _node_or_rank(nodes, configured)
    if configured == NODE or (node_or_rank.level == RANK and instances == 1):
        return node_or_rank
    # From here on `auto`: `node`, `instance` or both are possible.
    if config.planner.cluster is not None:
        sizes = [len(members) for members in members_of(nodes)]
        cheapest = _cheapest(config, find(config.planner.cluster), sizes, shapes, instances)
        members = node_or_rank.nodes if cheapest.level == NODE else ()
        return LevelChoice(cheapest.level, cheapest.reason, members)
    if instances > 1:
        # Users set up several instances where the links between these are slow: compress there.
        return LevelChoice(INSTANCE, f"{instances} instances of the distributed optimizer")
    return node_or_rank


def _node_or_rank(nodes: Sequence[int], configured: str) -> LevelChoice:
    """The level `node` if the ranks' distribution over nodes allows it, else `rank`.

    A single node allows it only if `node` is configured: buckets are then sent dense. `auto` takes
    `rank` there, which compresses.
    """
    members = tuple(map(tuple, members_of(nodes)))
    sizes = sorted({len(ranks) for ranks in members})
    if len(members) == 1 and configured == AUTO:
        return LevelChoice(RANK, "all ranks are on one node")
    if sizes == [1]:
        return LevelChoice(RANK, "each node has one rank")
    if len(sizes) > 1:
        return LevelChoice(RANK, f"nodes have {sizes[0]} to {sizes[-1]} ranks")
    ordered = sorted(members)
    if [*chain(*ordered)] != list(range(len(nodes))):
        return LevelChoice(RANK, "ranks are not numbered node by node")
    reason = f"{len(members)} nodes of {sizes[0]} ranks"
    if len(members) == 1:
        reason = f"{sizes[0]} ranks on one node, where nothing is compressed: dense"
    return LevelChoice(NODE, reason, tuple(ordered))


def _cheapest(
    config: SparseConfig,
    cluster: ClusterModel,
    node_sizes: Sequence[int],
    shapes: Mapping[BucketShape, int] | None,
    instances: int,
) -> LevelComparison:
    """The level of the least modelled time, at the target density, on a cluster file's links."""
    priced_sizes = node_sizes[:PRICED_NODES]  # pricing more nodes takes long
    value_bits, ranks = config.compression.given_value_bits, sum(priced_sizes)
    if shapes is None:
        op = CollectiveOp.ALL_REDUCE
        shape = BucketShape(PRICED_NUMEL, 0, FP32_BYTES, op, ranks, value_bits=value_bits)
        shapes = {shape: 1}  # one such bucket; no element is always sent (`kept_numel` 0)
    # The buckets are priced as if the group had only the ranks on the priced nodes.
    counts = {replace(shape, world_size=ranks): count for shape, count in shapes.items()}
    name, options = config.scheme.name, config.scheme
    has_price = name != AUTO_SCHEME and all(
        fits(name, shape.op, options, value_bits) for shape in counts
    )
    names = (DENSE, name) if has_price else PRICED_SCHEMES  # `dense` is always a candidate
    pricing = LevelPricing(cluster, options, names, priced_sizes, instances)
    return pricing.best(counts, config.compression.given_density)
