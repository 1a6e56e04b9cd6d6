"""Levels: which ranks' gradients are added up, dense, before anything is selected from them.

    rank       nothing is added up: each rank selects from its own gradient
    node       the ranks of a node add up; each of them selects from its part of the node's sum
    instance   the ranks of an instance of the distributed optimizer add up; each of them selects
               from its own shard

Words, for n = m k ranks in k nodes of m; rank (i, j) is rank j within node i:

    inside     among the m ranks of a node (or among the ranks of an instance)
    across     among the ranks of different nodes (or of different instances)
    lane       the k ranks (0, j), ..., (k - 1, j): the group of the exchange across nodes
    part       the elements of a bucket that a rank selects from; itself a `Bucket`

The level `node` has three steps:

1. Inside: a reduce-scatter of the gradient over the node leaves its sum of part j on rank (i, j).
2. Across: part j is synchronised over the lane just as a bucket is at level `rank`: residual,
   selection, exchange. So for each element selected value + new residual = node's sum + old
   residual, and the m ranks of a node together hold one residual of the model.
3. After the exchange, for an all-reduce: an all-gather of the parts over the ranks of the node.

For an all-reduce, part j is the j-th of m contiguous pieces of floor(N / m) elements. The last part
also has the rest of the bucket: fewer than m elements, which the ranks of a node all-reduce. For a
reduce-scatter, rank (i, j) must end with Megatron's shard i m + j. Its part is the shards j, m + j,
2 m + j, ..., back to back: k reduce-scatters over m adjacent shards each, and no permutation. The
lane's reduce-scatter of the part leaves shard i m + j on rank (i, j).

The level `instance` is step 1 over the n ranks of an instance, and step 2 as an all-reduce over the
ranks that own the same shard in each instance.

Gradients are divided once, before step 1, as at level `rank`. Step 1 adds in the gradient's dtype,
as Megatron does; with `Bucket.fp32_sums` in fp32.

Cost of N elements of b bytes on a rank: (m - 1) / m N b bytes inside, twice for an all-reduce; and
across what the scheme sends of N / m elements.

Over gloo steps 1 and 3 send each piece directly to its receiver (`dense_allpairs`): gloo's own
reduce-scatter reduces the whole bucket on each rank, and its rings copy more. These sums are in
rank order and in fp32.

All steps are posted behind gates (`job.Gate`), so that all ranks post to all groups in one order.
On CUDA step 1 has a stream of its own: a reduce-scatter of the next bucket is added up inside, and
selected from, beside this one's exchange across. (Of an all-reduce step 1 comes after step 3 of the
bucket before: both are on the inner group's communicator.)

At levels `rank` and `node` the distributed optimizer may have several instances
(`num_distributed_optimizer_instances` = k > 1), each with the whole optimizer state. A bucket is
then reduce-scattered inside the instance by its plan's scheme, and `sum_over_instances` adds up the
shards across: dense, by the backend's all-reduce, as in Megatron, because a sum of many ranks has
few zeros left. Additional cost: 2 (k - 1) / k N b / n bytes on n ranks an instance, and one round.

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
from megatron_sparse.reduction.job import INSIDE, LOCAL, Stage, one_after_another
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
            the ranks that own the same shard in all instances.
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
    """Makes the `Level` that these groups are for.

    `groups` are those of a level above `rank`; None for `rank`. `buffers` have memory for parts
    that are no views of the bucket.
    """
    if groups is None:
        return Level(data_parallel)
    if groups.level == INSTANCE:
        return InstanceLevel(groups, options, buffers)
    if groups.across.world_size == 1:  # one node: there is nothing to exchange across
        return Level(data_parallel, has_one_node=True)
    return NodeLevel(groups, options, buffers)


def dense_plan(plan: Plan) -> Plan:
    """A plan changed to the backend's dense collective: with one node nothing is compressed."""
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
    """The steps before and after a part's exchange; level `rank`, which is this class, has none.

    Args:
        across: the group that exchanges selections: at level `rank` all ranks.
        has_one_node: all ranks are on one node: buckets are synchronised dense (`dense_plan`).
    """

    def __init__(self, across: Transport, *, has_one_node: bool = False) -> None:
        self.across = across
        self.has_one_node = has_one_node

    def part(self, bucket: Bucket) -> Bucket:
        """The part of `bucket` that this rank selects from; at level `rank` the bucket itself.

        Always the same object for a bucket. The part's gradient always has the right size, dtype
        and device, but step 1's sum only from `inside` to the end of the bucket's job.
        """
        return bucket

    def inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1: writes the inner group's sum to the part's gradient; may overwrite the bucket's.

        The record gets the bytes that this rank sends.
        """
        yield from ()  # does nothing at level `rank`; makes this a generator

    def after(
        self, steps: Stage[int], exchange: Exchange, bucket: Bucket, record: BucketRecord
    ) -> Stage[int]:
        """Runs step 2, which the caller has made, then step 3; returns the bytes of step 2.

        Args:
            steps: step 2: the collective that exchanges the part.
            exchange: the arguments of that collective; `exchange.bucket` is the part.
            bucket: the whole bucket, which gets the result.
            record: gets the bytes of step 3.
        """
        return steps  # there is no step 3 at level `rank`


class _LevelWithParts(Level):
    """What `node` and `instance` share: parts, and sums over the inner group (`groups.inside`)."""

    def __init__(self, groups: LevelGroups, options: SchemeConfig, buffers: MessageBuffers) -> None:
        super().__init__(groups.across)
        self._group = groups.inside
        # Over gloo: pairwise messages instead of gloo's collectives (see the module's docstring).
        # Virtual ranks may be on a CPU; they simulate a backend with ring collectives.
        is_process_group = isinstance(self._group, ProcessGroupTransport)
        self._sends_pieces = is_process_group and self._group.device.type == "cpu"
        self._options = options
        self._buffers = buffers
        # The bucket's name -> the bucket, and its part.
        self._parts: dict[str, tuple[Bucket, Bucket]] = {}

    def part(self, bucket: Bucket) -> Bucket:
        """See `Level`. A new bucket with the name of an earlier one gets a new part."""
        whole, part = self._parts.get(bucket.name, (None, None))
        if part is None or whole is not bucket:
            part = self._new_part(bucket)
            self._parts[bucket.name] = bucket, part
        return part

    def _new_part(self, bucket: Bucket) -> Bucket:
        raise NotImplementedError

    def _exchange(self, bucket: Bucket, record: BucketRecord) -> Exchange:
        """The arguments of a collective over the ranks of this node or instance."""
        options = self._options
        return Exchange(bucket, self._group, self._buffers, record.timer, options, stream="inside")

    def inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """See `Level`. On a CPU it raises unless all inner ranks are at the same bucket and step:
        gloo would end the process if they reduced buckets of different sizes.
        """
        yield INSIDE
        if self._group.device.type == "cpu":
            identity = Identity("inside", bucket, str(bucket.grad_N.dtype), record.step)
            yield from exchange_sizes([], identity, self._group)  # no sizes: the identity alone
        yield from self._sum_inside(bucket, record)
        yield LOCAL

    def _sum_inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1: writes the inner group's sum to the part's gradient."""
        raise NotImplementedError

    def _scatter(self, shard_M: torch.Tensor, region: Bucket, record: BucketRecord) -> Stage[None]:
        """Reduce-scatters `region` over the inner group: `shard_M` gets this rank's shard.

        May overwrite the gradient of `region`, a bucket or adjacent elements of one.
        """
        values_N = region.grad_N
        # The backend adds in the values' dtype; `dense_allpairs` always adds in fp32.
        needs_fp32 = region.fp32_sums and values_N.dtype != torch.float32
        if not (self._sends_pieces or needs_fp32):
            with record.timer.inside():
                yield self._group.reduce_scatter(shard_M, values_N)
            record.inside_bytes += _ring_bytes(values_N, self._group.world_size)
            return
        steps = dense_allpairs(self._exchange(region, record), values_N, record.step)
        with record.timer.inside():
            sent_bytes = yield from without(steps, Marker)  # no `POSTED`: step 2 posts more
        record.inside_bytes += sent_bytes
        store(shard_M, values_N[region.shard(self._group.rank)])


class NodeLevel(_LevelWithParts):
    """The level `node`; see the module's docstring."""

    def _new_part(self, bucket: Bucket) -> Bucket:
        return node_part(bucket, self._group.world_size, self._group.rank)

    def _sum_inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1: writes the node's sum to the part's gradient."""
        if bucket.op is CollectiveOp.REDUCE_SCATTER:
            yield from self._shards_inside(bucket, record)
            return
        m, part = self._group.world_size, self.part(bucket)
        (own_cut,) = node_cuts(bucket, m, self._group.rank)  # an all-reduce's part has one cut
        part.grad_N = bucket.grad_N[own_cut]  # a view: step 2 writes its result to the bucket
        piece_numel = bucket.numel // m
        even_N, rest = bucket.grad_N.tensor_split([m * piece_numel])
        if piece_numel:
            region = self._region(bucket, even_N)
            yield from self._scatter(part.grad_N[:piece_numel], region, record)
        if rest.numel():  # the end of the last rank's part
            with record.timer.inside():
                yield self._group.all_reduce_(rest)
            record.inside_bytes += 2 * _ring_bytes(rest, m)

    def _shards_inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1 of a reduce-scatter: the part gets the node's sums of its k shards."""
        m = self._group.world_size
        part, grad_N = self.part(bucket), bucket.grad_N
        part.grad_N = self._buffers.take_own("node_sum", bucket, part.numel, grad_N.dtype)
        for node in range(self.across.world_size):  # the m adjacent shards of that node's ranks
            first, last = bucket.shard(node * m), bucket.shard(node * m + m - 1)
            region = self._region(bucket, grad_N[first.start : last.stop])
            yield from self._scatter(part.grad_N[part.shard(node)], region, record)

    def _region(self, bucket: Bucket, values_N: torch.Tensor) -> Bucket:
        """Makes a bucket of some elements of another, to reduce-scatter them over the node."""
        return Bucket(
            f"{bucket.name}.node",
            values_N,
            (),  # no parameters: only a selection needs them
            CollectiveOp.REDUCE_SCATTER,
            self._group.world_size,
            fp32_sums=bucket.fp32_sums,
        )

    def after(
        self, steps: Stage[int], exchange: Exchange, bucket: Bucket, record: BucketRecord
    ) -> Stage[int]:
        """Runs step 2, then step 3 or, for a reduce-scatter, a local copy. See `Level`."""
        if bucket.op is CollectiveOp.REDUCE_SCATTER:
            copied = self._copy_shard(exchange, bucket)
            return one_after_another(steps, copied, second_posts=False)
        gathered = self._gather(exchange, bucket, record)
        return one_after_another(steps, gathered, second_posts=True)

    def _copy_shard(self, exchange: Exchange, bucket: Bucket) -> Stage[int]:
        """Copies this rank's shard of the sum from its part to the bucket; returns 0 bytes sent."""
        part, node = exchange.bucket, self.across.rank
        own_M = bucket.grad_N[bucket.shard(node * self._group.world_size + self._group.rank)]
        own_M.copy_(part.grad_N[part.shard(node)])
        yield from ()  # makes this a stage, for `one_after_another`
        return 0

    def _gather(self, exchange: Exchange, bucket: Bucket, record: BucketRecord) -> Stage[int]:
        """Step 3: all-gathers the parts over the node. Returns 0: the record gets the bytes."""
        part, m = exchange.bucket, self._group.world_size
        piece_numel = bucket.numel // m
        even_N, rest = bucket.grad_N.tensor_split([m * piece_numel])
        # The rest is in the last rank's part: of the gathered rests only that one is the sum.
        rests = exchange.take("node_rest", m * rest.numel(), rest.dtype)
        works = []
        for gathered, own in ((even_N, part.grad_N[:piece_numel]), (rests, rest)):
            if own.numel():
                works.append(self._all_gather(gathered, own))
        yield POSTED
        with record.timer.inside():
            yield from works
        record.inside_bytes += _ring_bytes(even_N, m) + _ring_bytes(rests, m)
        rest.copy_(rests[len(rests) - rest.numel() :])  # the last rank's
        return 0

    def _all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """See `Transport.all_gather`; over the ranks of the node."""
        if self._sends_pieces:
            return self._group.exchange(*to_everyone(self._group, gathered, own_M), GATHER_TAG)
        return self._group.all_gather(gathered, own_M)


class InstanceLevel(_LevelWithParts):
    """The level `instance`, for reduce-scatters; see the module's docstring."""

    def _new_part(self, bucket: Bucket) -> Bucket:
        return instance_part(bucket, self._group.rank)

    def _sum_inside(self, bucket: Bucket, record: BucketRecord) -> Stage[None]:
        """Step 1: writes the instance's sum of this rank's shard to the part."""
        part = self.part(bucket)
        part.grad_N = bucket.grad_N[bucket.shard(self._group.rank)]
        yield from self._scatter(part.grad_N, bucket, record)


def sum_over_instances(
    steps: Stage[int], exchange: Exchange, instances: Transport, step: int
) -> Stage[int]:
    """Runs a reduce-scatter inside the instance, then all-reduces this rank's shard over instances.

    Returns the bytes sent in both collectives.

    `steps` is the reduce-scatter, `exchange` has its arguments. `instances` are the ranks that own
    the same shard, one of each instance.

    Raises:
        CommunicationError: another instance is at another bucket or step.
    """
    shard_sum = _sum_of_shards(exchange, instances, step)
    return one_after_another(steps, shard_sum, second_posts=True)


def _sum_of_shards(exchange: Exchange, instances: Transport, step: int) -> Stage[int]:
    """All-reduces this rank's shard over all instances, in place; returns the bytes sent."""
    bucket = exchange.bucket
    own_M = bucket.grad_N[bucket.shard(exchange.transport.rank)]
    if exchange.averages:  # the backend has divided by the ranks of one instance only
        own_M.div_(bucket.instances)
    name, op = f"{bucket.name}.instances", CollectiveOp.ALL_REDUCE
    shard = Bucket(name, own_M, (), op, bucket.instances)
    # `averages=False`: the shard has been divided completely.
    across = replace(exchange, bucket=shard, transport=instances, averages=False)
    return (yield from dense(across, own_M, step))


def _ring_bytes(values: torch.Tensor, ranks: int) -> int:
    """What a rank of a ring sends in a reduce-scatter or an all-gather."""
    return (ranks - 1) * values.nbytes // ranks
