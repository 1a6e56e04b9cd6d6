"""The predicted time of a bucket at each level, and the comparison of levels: a MODEL.

With m ranks inside (of a node, or of an instance of the distributed optimizer), k groups of them
and a bucket of N elements of b bytes, a level other than `rank` takes three steps:

1. inside, a dense reduce-scatter by the backend: (m - 1) (alpha + N b / m beta). In a
   reduce-scatter it is k of them, of N / k elements each: every rank then has its own shards.
   Within an instance that is Megatron's own, one reduce-scatter.
2. across, the scheme on a lane's k ranks and N / m elements (`pricing.levels`), selection included.
3. inside, an all-gather of the sums, for an all-reduce only: (m - 1) (alpha + N b / m beta).

Added on a CPU: the agreement inside, an all-gather of 8 (2 + m) bytes.

Steps of one bucket follow one another. The next bucket's first step may run beside this bucket's
second one; that is not counted, as the planner counts no overlap of buckets at any level.

What crosses has the density that was asked for, whatever m is: a rank selects from the node's sum.
At level `rank` the ranks of a node select apart, and up to m times as much crosses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.config.level import INSTANCE, NODE, RANK
from megatron_sparse.config.sparse import SchemeConfig, SparseConfig
from megatron_sparse.planner.costs import predict_all
from megatron_sparse.planner.plan import bucket_facts
from megatron_sparse.planner.prices import DENSE, prior
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.dry_run import WORD_BYTES
from megatron_sparse.pricing.levels import inside_cluster
from megatron_sparse.pricing.shape import BucketShape


@dataclass(frozen=True)
class LevelPrice:
    """The least time of a bucket at one level.

    Attributes:
        scheme: the cheapest one: of all ranks, or of a lane.
        inside_s: seconds of the dense steps inside; 0 at level `rank`.
        across_s: seconds of the scheme.
    """

    scheme: str
    inside_s: float
    across_s: float

    @property
    def total_s(self) -> float:
        """Of both tiers."""
        return self.inside_s + self.across_s


@dataclass(frozen=True)
class LevelComparison:
    """The cheapest level for some buckets.

    Attributes:
        level: its name.
        seconds: of all buckets together, by level.
        reason: in words.
    """

    level: str
    seconds: Mapping[str, float]
    reason: str


def shapes_of(buckets: Iterable[Bucket], config: SparseConfig) -> Counter[BucketShape]:
    """How many buckets there are of each shape: what `best_level` compares."""
    wire_dtype, bits = config.scheme.wire_dtype, config.compression.given_value_bits
    return Counter(BucketShape(**bucket_facts(each, wire_dtype, bits)) for each in buckets)


def inside_s(shape: BucketShape, cluster: ClusterModel, inside: int, *, grouped: bool) -> float:
    """Seconds of the dense steps inside, by the backend's own collectives.

    Args:
        shape: of the whole bucket. Values travel inside in `shape.element_bytes`.
        cluster: of all ranks.
        inside: ranks of a node or instance.
        grouped: whether a reduce-scatter is one for each node, as at level `node`.
    """
    link = inside_cluster(cluster, inside).dense_link(inside)
    scatters = shape.op is CollectiveOp.REDUCE_SCATTER
    rounds = (inside - 1) * (shape.world_size // inside if scatters and grouped else 1)
    part_bytes = -(-shape.numel // inside) * shape.element_bytes
    scatter_s = rounds * link.alpha_s + (inside - 1) * part_bytes * link.beta_s
    agreed_s = 0.0
    if cluster.device == "cpu":
        agreed_s = link.alpha_s + (inside - 1) * WORD_BYTES * (2 + inside) * link.beta_s
    return agreed_s + (scatter_s if scatters else 2 * scatter_s)


def price_level(
    level: str,
    shape: BucketShape,
    density: float,
    cluster: ClusterModel,
    options: SchemeConfig,
    names: Collection[str],
    inside: int,
) -> LevelPrice:
    """The cheapest scheme for a bucket at one level.

    Args:
        level: `rank`, `node` or `instance`.
        shape: of the whole bucket, on all ranks. At level `instance` the sum across instances is an
            all-reduce of the lane's part, whatever `shape.op` is.
        density: that is selected, from a rank's or a node's gradient; positions are taken to be
            uniform and independent.
        cluster: links, codecs and host of all ranks.
        options: of the schemes.
        names: the candidates; `dense` should be one.
        inside: ranks of a node or instance; divides the number of ranks. Not used at level `rank`.

    Raises:
        ConfigError: the cluster file lacks a rate, or instances lie across nodes.
    """
    lane, within_s = shape, 0.0
    if level != RANK:
        within_s = inside_s(shape, cluster, inside, grouped=level == NODE)
        lane = shape.lane(inside)
    if level == INSTANCE:
        lane = replace(lane, op=CollectiveOp.ALL_REDUCE)
    found = predict_all(lane, prior(lane, density), cluster, options, names)
    scheme = min(found, key=lambda name: found[name])
    return LevelPrice(scheme, within_s, found[scheme])


def price_in_instances(
    level: str,
    shape: BucketShape,
    density: float,
    cluster: ClusterModel,
    options: SchemeConfig,
    names: Collection[str],
    inside: int,
    instances: int,
) -> LevelPrice:
    """The cheapest scheme for a bucket of one of several instances of the distributed optimizer.

    At level `instance` nothing but the sum over the instances is compressed. At the others that sum
    is the backend's, of each rank's shard, and counts to `across_s`.

    Args:
        level: see `price_level`, as the arguments that follow.
        shape: of the bucket, on the ranks of an instance.
        density: that is selected.
        cluster: of the ranks of all instances.
        options: of the schemes.
        names: the candidates.
        inside: ranks of a node.
        instances: how many; 1 for none.
    """
    n = shape.world_size
    whole = replace(shape, world_size=n * instances)
    if level == INSTANCE:
        return price_level(level, whole, density, cluster, options, names, n)
    price = price_level(level, shape, density, cluster, options, names, inside)
    if instances == 1:
        return price
    shard = replace(whole.lane(n), op=CollectiveOp.ALL_REDUCE)
    sums_s = predict_all(shard, prior(shard, 1.0), cluster, options, (DENSE,))[DENSE]
    return replace(price, across_s=price.across_s + sums_s)


def has_lanes(node_sizes: Sequence[int]) -> bool:
    """Whether level `node` is another one than `rank`: several nodes of one size, above 1.

    Example:
        >>> has_lanes((4, 4)), has_lanes((8,)), has_lanes((1, 1)), has_lanes((4, 2))
        (True, False, False, False)
    """
    return len(node_sizes) > 1 < node_sizes[0] and len(set(node_sizes)) == 1


def best_level(
    shapes: Mapping[BucketShape, int],
    density: float,
    cluster: ClusterModel,
    options: SchemeConfig,
    names: Collection[str],
    node_sizes: Sequence[int],
    instances: int = 1,
) -> LevelComparison:
    """Compares the levels that are possible by the predicted time of all buckets together.

    A pure function: ranks with the same arguments get the same answer, bit for bit.

    Args:
        shapes: of the whole buckets, on all ranks of an instance -> how many there are of each.
        density: the target.
        cluster: links, codecs and host.
        options: of the schemes.
        names: the candidates at every level; `dense` should be one.
        node_sizes: ranks of an instance on each of its nodes, as they are, whatever the cluster
            file was measured on.
        instances: of the distributed optimizer.

    Returns:
        `rank` where it is the only one: one instance, and one node, one rank a node, or nodes of
        different sizes.

    Raises:
        ConfigError: the cluster file lacks a rate.
    """
    possible = [RANK, *[NODE] * has_lanes(node_sizes), *[INSTANCE] * (instances > 1)]
    if possible == [RANK]:
        return LevelComparison(RANK, {}, f"nodes of {', '.join(map(str, node_sizes))} ranks")
    here = replace(cluster, nodes=tuple(node_sizes) * instances)
    price = partial(
        price_in_instances,
        density=density,
        cluster=here,
        options=options,
        names=names,
        inside=node_sizes[0],
        instances=instances,
    )
    seconds = {
        level: sum(count * price(level, shape).total_s for shape, count in shapes.items())
        for level in possible
    }
    level = min(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {time_s * 1e3:.4g} ms" for name, time_s in seconds.items())
    return LevelComparison(level, seconds, f"predicted: {told} ({cluster.name})")
