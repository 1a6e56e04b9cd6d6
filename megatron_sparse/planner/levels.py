"""The predicted time of a bucket at each level, and the comparison of levels: a MODEL.

With m ranks inside (of a node, or of an instance of the distributed optimizer), k groups of them
and a bucket of N elements of b bytes, a level other than `rank` takes three steps:

1. inside, a dense reduce-scatter by the backend: (m - 1) (alpha + N b / m beta). In a
   reduce-scatter it is k of them, of N / k elements each: every rank then has its own shards.
   Within an instance that is Megatron's own, one reduce-scatter.
2. across, the scheme on N / m elements, selection included, in each of m lanes: a lane is the k
   ranks with the same number in the k groups (`lane_cluster`).
3. inside, an all-gather of the sums, for an all-reduce only: (m - 1) (alpha + N b / m beta).

Added on a CPU: the agreement inside, an all-gather of 8 (2 + m) bytes.

Steps of one bucket follow one another. The next bucket's first step may run beside this bucket's
second one; that is not counted, as the planner counts no overlap of buckets at any level.

What crosses has the density that was asked for, whatever m is: a rank selects from the node's sum.
At level `rank` the ranks of a node select apart, and up to m times as much crosses.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.config.level import INSTANCE, NODE, RANK
from megatron_sparse.config.sparse import SchemeConfig, SparseConfig
from megatron_sparse.planner.plan import shape_of
from megatron_sparse.planner.prices import DENSE, least, predict_all, prior
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.dry_run import WORD_BYTES
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
        """Seconds inside and across."""
        return self.inside_s + self.across_s


@dataclass(frozen=True)
class LevelComparison:
    """The cheapest level for some buckets, why, and the seconds of all of them by level."""

    level: str
    seconds: Mapping[str, float]
    reason: str


def shapes_of(buckets: Iterable[Bucket], config: SparseConfig) -> Counter[BucketShape]:
    """How many buckets there are of each shape: what `LevelPricing.best` compares."""
    wire_dtype, bits = config.scheme.wire_dtype, config.compression.given_value_bits
    return Counter(shape_of(each, wire_dtype, bits) for each in buckets)


def inside_s(shape: BucketShape, cluster: ClusterModel, inside: int, *, grouped: bool) -> float:
    """Seconds of the module's steps 1 and 3: the backend's collectives inside a node or instance.

    Args:
        shape: of the whole bucket. Values have `shape.element_bytes` bytes inside.
        cluster: of all ranks.
        inside: m, the ranks of a node or instance.
        grouped: whether a reduce-scatter runs as k, one for each group, as at level `node`.
    """
    link = cluster.dense_link(inside)
    is_reduce_scatter = shape.op is CollectiveOp.REDUCE_SCATTER
    # k reduce-scatters of N / k elements: the bytes of a single one, but k times its latencies.
    calls = shape.world_size // inside if is_reduce_scatter and grouped else 1
    part_bytes = -(-shape.numel // inside) * shape.element_bytes  # elements rounded up
    scatter_s = (inside - 1) * (calls * link.alpha_s + part_bytes * link.beta_s)
    # On a CPU the m ranks first compare 2 + m words each, to be sure that the bucket is the same.
    agreement_s = 0.0
    if cluster.device == "cpu":
        agreement_s = link.alpha_s + (inside - 1) * WORD_BYTES * (2 + inside) * link.beta_s
    # An all-reduce also gathers the sums (step 3), which takes as long as step 1.
    return agreement_s + (scatter_s if is_reduce_scatter else 2 * scatter_s)


def has_lanes(node_sizes: Sequence[int]) -> bool:
    """Whether level `node` differs from `rank`: several nodes, all of one size above 1.

    Example:
        >>> has_lanes((4, 4)), has_lanes((8,)), has_lanes((1, 1)), has_lanes((4, 2))
        (True, False, False, False)
    """
    are_equal = len(set(node_sizes)) == 1
    return are_equal and len(node_sizes) > 1 and node_sizes[0] > 1


@dataclass(frozen=True)
class LevelPricing:
    """The ranks whose levels are compared, and the schemes that they may take.

    Attributes:
        cluster: the costs of links, codecs and CPU, of the ranks of all instances.
        options: of the schemes.
        names: the candidates at every level; `dense` should be one.
        node_sizes: ranks of an instance on each of its nodes.
        instances: of the distributed optimizer.
    """

    cluster: ClusterModel
    options: SchemeConfig
    names: Collection[str]
    node_sizes: Sequence[int]
    instances: int = 1

    def price(self, level: str, shape: BucketShape, density: float) -> LevelPrice:
        """Predicts the cheapest scheme for a bucket at one level, and its times.

        At level `instance` the scheme adds up the instances' sums: an all-reduce of a lane's part
        of the bucket, whatever `shape.op` is. At the other levels the backend adds up these sums,
        dense; its time is included in `across_s`.

        Args:
            level: `rank`, `node` (of nodes of one size) or `instance` (of several).
            shape: of the whole bucket, on the ranks of an instance.
            density: of the selection from a rank's, node's or instance's gradient; positions are
                assumed to be uniform and independent.

        Raises:
            ConfigError: the cluster file lacks a rate, or a node and an instance overlap in part.
        """
        instance_ranks = shape.world_size
        # Ranks with the same number in every instance hold the same shard, which they add up.
        whole = replace(shape, world_size=instance_ranks * self.instances)
        shard = replace(whole.lane(instance_ranks), op=CollectiveOp.ALL_REDUCE)
        lane, within_s = shape, 0.0  # at level `rank` nothing is added inside
        if level == INSTANCE:
            lane = shard
            within_s = inside_s(whole, self.cluster, instance_ranks, grouped=False)
        elif level == NODE:
            size = self.node_sizes[0]
            lane = shape.lane(size)
            within_s = inside_s(shape, self.cluster, size, grouped=True)
        prices_s = self._predict(lane, density, self.names)
        scheme = least(prices_s, prices_s.keys())
        across_s = prices_s[scheme]
        if level != INSTANCE and self.instances > 1:
            # The backend adds up the shards of all instances.
            across_s += self._predict(shard, 1.0, (DENSE,))[DENSE]
        return LevelPrice(scheme, within_s, across_s)

    def _predict(
        self, lane: BucketShape, density: float, names: Collection[str]
    ) -> dict[str, float]:
        return predict_all(lane, prior(lane, density), self.cluster, self.options, names)

    def best(self, shapes: Mapping[BucketShape, int], density: float) -> LevelComparison:
        """Compares the possible levels: by the predicted time of all buckets together.

        The nodes are those of `node_sizes`, whatever the cluster file was measured on. A pure
        function: ranks with the same arguments get the same answer, bit for bit.

        Args:
            shapes: shape of a whole bucket, on all ranks of an instance -> number of such buckets.
            density: the target.

        Returns:
            The comparison. Level `rank` without times where no other level is possible: if nodes
            differ in size, or if a single instance has one node, or one rank on each node.

        Raises:
            ConfigError: the cluster file lacks a rate.
        """
        sizes, instances = self.node_sizes, self.instances
        has_instances = instances > 1 and len(set(sizes)) == 1
        is_possible = {RANK: True, NODE: has_lanes(sizes), INSTANCE: has_instances}
        possible = [level for level, can_run in is_possible.items() if can_run]
        if possible == [RANK]:
            return LevelComparison(RANK, {}, f"nodes of {', '.join(map(str, sizes))} ranks")
        pricing = replace(self, cluster=replace(self.cluster, nodes=tuple(sizes) * instances))

        def total_s(level: str) -> float:
            """Predicted seconds of all buckets together."""
            prices = {shape: pricing.price(level, shape, density) for shape in shapes}
            return sum(count * prices[shape].total_s for shape, count in shapes.items())

        seconds = {level: total_s(level) for level in possible}
        level = least(seconds, seconds.keys())
        times = ", ".join(f"{name} {time_s * 1e3:.4g} ms" for name, time_s in seconds.items())
        return LevelComparison(level, seconds, f"predicted: {times} ({self.cluster.name})")
