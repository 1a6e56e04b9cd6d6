"""Levels: which ranks' gradients are added up, dense, before anything is selected from them.

    rank       nothing is added up: each rank selects from its own gradient
    node       the ranks of a node add up; each of them selects from its part of the node's sum
    instance   the ranks of an instance of the distributed optimizer add up; each of them selects
               from its own shard

A level above `rank` has three steps, on n = m k ranks in k nodes of m:

1. Inside: the backend's reduce-scatter of the gradient over the m ranks of the node. Rank (i, j),
   at place j of node i, gets its part of the node's sum.
2. Across: the part is a bucket of its own. Everything that happens to a bucket at level `rank`
   happens to it: residual, selection, exchange. The k ranks with the same place in their nodes, a
   lane, are its group. So `sent + residual == node's gradient + residual before`, element by
   element, and the m ranks of a node together hold one residual of the model.
3. After an all-reduce: the backend's all-gather of the parts over the ranks of the node.

For an all-reduce, part j is the j-th of m contiguous pieces of floor(N / m) elements, and the last
part has the rest as well: fewer than m elements, which the ranks of a node all-reduce. For a
reduce-scatter, rank (i, j) must end with Megatron's shard i m + j. Its part is the shards j, m + j,
2 m + j, ..., back to back: k reduce-scatters over m adjacent shards each, and no permutation. The
lane's reduce-scatter of it leaves shard i m + j on rank (i, j).

`instance` is step 1 over the n ranks of an instance, and step 2 as an all-reduce over the ranks
that own the same shard in each instance.

Gradients are divided once, before step 1, as at level `rank`. Step 1 adds in the gradient's dtype,
as Megatron does; with `Bucket.fp32_sums` in fp32.

Cost of N elements of b bytes on a rank: (m - 1) / m N b bytes inside, twice for an all-reduce; and
across what the scheme sends of N / m elements.

Over gloo each rank of a node sends every other its piece at once, in both steps (`dense_allpairs`):
its own reduce-scatter reduces everything, and its rings copy more. Its sums are then added in
rank order and in fp32.

Order: all steps are posted behind the gate (`job.Gate`), so the selection comes after it, and a
bucket's steps follow those of the one before: all ranks post to all groups in one order.

Without a level, Megatron's distributed optimizer may still have several instances
(`num_distributed_optimizer_instances` = k > 1), each of which holds the whole optimizer state.
`sum_over_instances` is then the second half of a sum. A bucket is reduce-scattered inside the
instance by the scheme of its plan. Then each rank all-reduces its shard with the ranks that own the
same shard in the other instances: dense, by the backend's own all-reduce, which Megatron uses too,
because the sum inside the instance has filled in. Cost beside the scheme's: 2 (k - 1) / k N b / n
bytes on n ranks an instance, and one round.

Shape suffixes: N elements of the bucket, M of one shard or part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.accumulator import store
from megatron_sparse.collectives.base import POSTED, Exchange, Identity, exchange_sizes, without
from megatron_sparse.collectives.dense import dense
from megatron_sparse.collectives.dense_allpairs import dense_allpairs
from megatron_sparse.config.level import INSTANCE, NODE
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import Plan
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import GATE, Stage, one_after_another
from megatron_sparse.reduction.level_parts import instance_part, node_cuts, node_part
from megatron_sparse.transport import ProcessGroupTransport, Transport, Work
from megatron_sparse.transport.base import Marker, to_everyone

GATHER_TAG = 0
"""Of step 3's messages on a CPU. They match in the order in which they are posted."""


@dataclass(frozen=True)
class LevelGroups:
    """The groups of a level above `rank`; see the module's docstring.

    Attributes:
        inside: the ranks that add up before the selection: of this rank's node, or instance.
        across: the ranks that exchange selections: this rank's lane, in the order of the nodes, or
            the ranks that own the same shard in the other instances.
        level: `node` or `instance`.
    """

    inside: Transport
    across: Transport
    level: str = NODE


def level_of(
    data_parallel: Transport,
    groups: LevelGroups | None,
    options: SchemeConfig,
    buffers: MessageBuffers,
) -> Level:
    """The level of a reducer.

    Args:
        data_parallel: all ranks.
        groups: of the level; None for `rank`.
        options: `scheme` of the configuration.
        buffers: where the parts of a reduce-scatter live.
    """
    if groups is None:
        return Level(data_parallel)
    if groups.level == INSTANCE:
        return InstanceLevel(groups, options, buffers)
    if groups.across.world_size == 1:  # the only node
        return Level(data_parallel, is_alone=True)
    return NodeLevel(groups, options, buffers)


def alone(plan: Plan) -> Plan:
    """The plan on one node, where there is nothing to compress across: the backend's collective."""
    return replace(
        plan,
        scheme="dense",
        density=1.0,
        wire_dtype=None,
        sharded=False,
        reason="all ranks are on one node",
        predicted_us=None,
        value_bits=None,
    )


class Level:
    """The steps before and after the exchange of a bucket's part; here of level `rank`: none.

    Args:
        across: the group that exchanges selections: at level `rank` all ranks.
        is_alone: this rank's node is the only one: buckets are synchronised dense.
    """

    def __init__(self, across: Transport, *, is_alone: bool = False) -> None:
        self.across = across
        self.is_alone = is_alone

    def part(self, bucket: Bucket) -> Bucket:
        """What this rank selects from: the same object for the same bucket.

        Its gradient has the right size, dtype and device; its content is that of the sum only
        while the bucket is under way.
        """
        return bucket

    def inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1: fills the part's gradient. Overwrites the bucket's; adds to the record."""
        yield from ()

    def after(
        self, steps: Stage[int], exchange: Exchange, bucket: Bucket, record: BucketRecord
    ) -> Stage[int]:
        """Runs the steps of the exchange of the part, then step 3; returns the exchange's bytes.

        Args:
            steps: of the exchange.
            exchange: with which it was started: its bucket is the part.
            bucket: the whole bucket, which gets the result.
            record: gets the bytes of step 3.
        """
        return steps


class _DenseInside(Level):
    """What `node` and `instance` share: parts that are kept, and sums over the inner group.

    Args:
        groups: of the level.
        options: `scheme` of the configuration.
        buffers: where the parts of a reduce-scatter live.
    """

    def __init__(self, groups: LevelGroups, options: SchemeConfig, buffers: MessageBuffers) -> None:
        super().__init__(groups.across)
        self._group = groups.inside
        # Over gloo ranks send the pieces themselves (module's docstring), without its collectives.
        # Virtual ranks stand for those of a cluster, whose backend has rings of its own.
        is_process_group = isinstance(self._group, ProcessGroupTransport)
        self._sends_pieces = is_process_group and self._group.device.type == "cpu"
        self._options = options
        self._buffers = buffers
        # By the bucket's name: the bucket, and its part.
        self._parts: dict[str, tuple[Bucket, Bucket]] = {}

    def part(self, bucket: Bucket) -> Bucket:
        """See `Level`; made anew only for another bucket of the same name."""
        whole, part = self._parts.get(bucket.name, (None, None))
        if part is None or whole is not bucket:
            part = self._new_part(bucket)
            self._parts[bucket.name] = bucket, part
        return part

    def _new_part(self, bucket: Bucket) -> Bucket:
        raise NotImplementedError

    def _exchange(self, bucket: Bucket, record: BucketRecord) -> Exchange:
        """The arguments of a collective over the ranks of the node or instance."""
        return Exchange(bucket, self._group, self._buffers, record.timer, self._options)

    def _agree(self, bucket: Bucket, step: int) -> Stage[None]:
        """Checks on a CPU that the inner group's ranks mean the same bucket and step.

        gloo ends processes that reduce buckets of different sizes.
        """
        if self._group.device.type == "cpu":
            identity = Identity("inside", bucket, str(bucket.grad_N.dtype), step)
            yield from exchange_sizes([], identity, self._group)

    def _scatter(self, shard_M: torch.Tensor, region: Bucket, record: BucketRecord) -> Stage[None]:
        """Adds up a bucket of the inner group; this rank's shard of the sum goes to `shard_M`.

        May overwrite the bucket's values.
        """
        values_N = region.grad_N
        # The backend adds in the values' own dtype, `dense_allpairs` in fp32.
        adds_wider = region.fp32_sums and values_N.dtype != torch.float32
        if not (self._sends_pieces or adds_wider):
            with record.timer.inside():
                yield self._group.reduce_scatter(shard_M, values_N)
            record.inside_bytes += _ring_bytes(values_N, self._group.world_size)
            return
        steps = dense_allpairs(self._exchange(region, record), values_N, record.step)
        with record.timer.inside():
            sent_bytes = yield from without(steps, Marker)
        record.inside_bytes += sent_bytes
        store(shard_M, values_N[region.shard(self._group.rank)])


class NodeLevel(_DenseInside):
    """See the module's docstring: inside is the node, across is the lane."""

    def _new_part(self, bucket: Bucket) -> Bucket:
        return node_part(bucket, self._group.world_size, self._group.rank)

    def inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Fills the part with the node's sum of it; see `Level`."""
        yield GATE
        yield from self._agree(bucket, record.step)
        if bucket.op is CollectiveOp.REDUCE_SCATTER:
            yield from self._shards_inside(bucket, record)
            return
        m, part = self._group.world_size, self.part(bucket)
        (own_cut,) = node_cuts(bucket, m, self._group.rank)  # one piece, for an all-reduce
        part.grad_N = bucket.grad_N[own_cut]
        piece_numel = bucket.numel // m
        even_N, rest = bucket.grad_N.tensor_split([m * piece_numel])
        if piece_numel:
            region = self._region(bucket, even_N)
            yield from self._scatter(part.grad_N[:piece_numel], region, record)
        if rest.numel():  # belongs to the last rank's part, a view of the bucket
            with record.timer.inside():
                yield self._group.all_reduce_(rest)
            record.inside_bytes += 2 * _ring_bytes(rest, m)

    def _shards_inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Fills a reduce-scatter's part: the node's sums of this rank's shards, back to back."""
        m = self._group.world_size
        part, grad_N = self.part(bucket), bucket.grad_N
        part.grad_N = self._exchange(bucket, record).take("node_sum", part.numel, grad_N.dtype)
        for node in range(self.across.world_size):  # its m ranks own m adjacent shards
            first, last = bucket.shard(node * m), bucket.shard(node * m + m - 1)
            region = self._region(bucket, grad_N[first.start : last.stop])
            yield from self._scatter(part.grad_N[part.shard(node)], region, record)

    def _region(self, bucket: Bucket, values_N: torch.Tensor) -> Bucket:
        """Elements of a bucket as a bucket of the node, whose ranks get a shard each."""
        return Bucket(
            f"{bucket.name}.node",
            values_N,
            (),
            CollectiveOp.REDUCE_SCATTER,
            self._group.world_size,
            fp32_sums=bucket.fp32_sums,
        )

    def after(
        self, steps: Stage[int], exchange: Exchange, bucket: Bucket, record: BucketRecord
    ) -> Stage[int]:
        """Appends step 3, or the copy of a reduce-scatter's shard; see `Level`."""
        if bucket.op is CollectiveOp.REDUCE_SCATTER:
            placed = self._place_shard(exchange, bucket)
            return one_after_another(steps, placed, second_posts=False)
        gathered = self._gather(exchange, bucket, record)
        return one_after_another(steps, gathered, second_posts=True)

    def _place_shard(self, exchange: Exchange, bucket: Bucket) -> Stage[int]:
        """Copies this rank's shard from its part to its place in the bucket; sends 0 bytes."""
        part, node = exchange.bucket, self.across.rank
        own_M = bucket.grad_N[bucket.shard(node * self._group.world_size + self._group.rank)]
        own_M.copy_(part.grad_N[part.shard(node)])
        yield from ()
        return 0

    def _gather(self, exchange: Exchange, bucket: Bucket, record: BucketRecord) -> Stage[int]:
        """Gathers the parts of all ranks of the node; returns 0, as the record gets the bytes."""
        part, m = exchange.bucket, self._group.world_size
        piece_numel = bucket.numel // m
        even_N, rest = bucket.grad_N.tensor_split([m * piece_numel])
        # Only the last rank's rest is right; it has fewer than m elements.
        rests = exchange.take("node_rest", m * rest.numel(), rest.dtype)
        works = []
        for gathered, own in ((even_N, part.grad_N[:piece_numel]), (rests, rest)):
            if own.numel():
                works.append(self._all_gather(gathered, own))
        yield POSTED
        with record.timer.inside():
            yield from works
        record.inside_bytes += _ring_bytes(even_N, m) + _ring_bytes(rests, m)
        rest.copy_(rests[len(rests) - rest.numel() :])
        return 0

    def _all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """See `Transport.all_gather`; over the ranks of the node."""
        if self._sends_pieces:
            return self._group.exchange(*to_everyone(self._group, gathered, own_M), GATHER_TAG)
        return self._group.all_gather(gathered, own_M)


class InstanceLevel(_DenseInside):
    """See the module's docstring. For reduce-scatters, across the owners of the same shard."""

    def _new_part(self, bucket: Bucket) -> Bucket:
        return instance_part(bucket, self._group.rank)

    def inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Leaves the instance's sum of this rank's shard in the part; see `Level`."""
        yield GATE
        yield from self._agree(bucket, record.step)
        part = self.part(bucket)
        part.grad_N = bucket.grad_N[bucket.shard(self._group.rank)]
        yield from self._scatter(part.grad_N, bucket, record)


def sum_over_instances(
    steps: Stage[int], exchange: Exchange, instances: Transport, step: int
) -> Stage[int]:
    """Runs a collective, then adds up this rank's shard over all instances, dense.

    Args:
        steps: of the collective, a reduce-scatter.
        exchange: with which it was started.
        instances: the ranks that own the same shard, one of each instance.
        step: the training step.

    Returns:
        The bytes sent in both.

    Raises:
        CommunicationError: an instance means another bucket or step.
    """
    shards = _sum_of_shards(exchange, instances, step)
    return one_after_another(steps, shards, second_posts=True)


def _sum_of_shards(exchange: Exchange, instances: Transport, step: int) -> Stage[int]:
    """Overwrites this rank's shard with its sum over all instances; returns the bytes sent."""
    bucket = exchange.bucket
    own_M = bucket.grad_N[bucket.shard(exchange.transport.rank)]
    if exchange.averages:  # the backend has divided by the ranks of one instance only
        own_M.div_(bucket.instances)
    name, op = f"{bucket.name}.instances", CollectiveOp.ALL_REDUCE
    shard = Bucket(name, own_M, (), op, bucket.instances)
    across = replace(exchange, bucket=shard, transport=instances, averages=False)
    return (yield from dense(across, own_M, step))


def _ring_bytes(values: torch.Tensor, ranks: int) -> int:
    """What a rank of a ring sends in a reduce-scatter or an all-gather."""
    return (ranks - 1) * values.nbytes // ranks
