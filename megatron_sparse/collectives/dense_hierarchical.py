"""Dense hierarchical (PCCL, section 4.1): rings inside nodes, recursive halving between them.

Every node has m lanes; lane l of each node forms a group across the k nodes. All lanes talk to
other nodes at the same time, so all network cards are busy, and the rounds between nodes are
logarithmic.

Shuffle (reduce-scatter only, local): shards are reordered lane by lane, so that each lane's part is
contiguous. (In an all-reduce PCCL's two shuffles cancel out.)
Phase 1, m - 1 rounds inside the nodes: ring reduce-scatter of m lane parts.
Phase 2, log2 k rounds between nodes (2 more if k is no power of two): recursive halving of the lane
part, as in `dense_rhd`.
All-reduce only: phase 3, recursive doubling between nodes; phase 4, m - 1 rounds, ring all-gather
inside the nodes.

Nodes of different size: m is the size of the smallest. A surplus rank folds into a lane of its
node: first it sends all its values to the lane's rank, which adds them; last it receives the result
from there (in a reduce-scatter its own shard). This takes one round each way inside the node. The
sum is exact, but a group of one small and many large nodes is slow.

With equal nodes and k a power of two, a rank sends (m - 1) / m N (p + b) bytes inside its node and
(k - 1) / (m k) N (p + b) to other nodes; the reduce-scatter sends the p terms only. Bytes of a
value and of a partial sum are as for `dense_ring`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.accumulator import Accumulator, store
from megatron_sparse.collectives.base import Exchange, Identity, Phase, Steps, Subgroup, even_cuts
from megatron_sparse.collectives.dense_rhd import (
    Folding,
    double,
    halve,
    halving_doubling_cost,
    unfold_pieces,
)
from megatron_sparse.collectives.dense_ring import (
    ring_all_gather,
    ring_all_gather_cost,
    ring_reduce_scatter,
    ring_reduce_scatter_cost,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport.topology import members_of


class Lanes:
    """The node and the lane of each rank: rank number l of a node has lane l, or folds into one.

    Attributes:
        members: for each node its ranks, ascending.
        count: lanes of each node.
        node: this rank's node.
        lane: this rank's lane; for a surplus rank the lane that it folds into.
        is_surplus: whether this rank has no lane of its own.
        guests: surplus ranks that fold into this one.
    """

    def __init__(self, nodes: Sequence[int], rank: int) -> None:
        self.members = members_of(nodes)
        self.count = min(map(len, self.members))
        self.node = sorted(set(nodes)).index(nodes[rank])
        number_in_node = self.members[self.node].index(rank)
        self.lane = number_in_node % self.count
        self.is_surplus = number_in_node >= self.count
        # The first owner is the lane's own rank.
        self.guests = [] if self.is_surplus else self.owners(self.lane, self.node)[1:]

    def owners(self, lane: int, node: int) -> list[int]:
        """The rank of a lane on a node, followed by the surplus ranks that fold into it."""
        return self.members[node][lane :: self.count]

    def order(self) -> list[list[int]]:
        """The owners of each piece: lane 0 on node 0, on node 1, ..., lane 1 on node 0, ..."""
        nodes = range(len(self.members))
        return [self.owners(lane, node) for lane in range(self.count) for node in nodes]


def dense_hierarchical(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `dense`."""
    bucket, transport, scatter = exchange.bucket, exchange.transport, exchange.scatters
    lanes = Lanes(transport.nodes, transport.rank)
    order, k = lanes.order(), len(lanes.members)
    cuts = piece_cuts(bucket, order)  # k pieces for each lane, lane by lane
    shards = shards_of(bucket, order)
    if scatter:
        values_N = _shuffled(exchange, values_N, owners=[*shards])
    tag = Identity.of_values("dense_hierarchical", exchange, values_N, step).tag
    inside = Subgroup(transport, lanes.members[lanes.node], tag)
    accumulator = Accumulator(exchange, values_N)
    sent_bytes = 0

    yield from _fold(accumulator, lanes, inside)
    if not lanes.is_surplus:  # phases 1 to 4
        ring = Subgroup(transport, lanes.members[lanes.node][: lanes.count], tag)
        across = Subgroup(transport, [members[lanes.lane] for members in lanes.members], tag)
        folding = Folding(across)
        lane_cuts = cuts[::k]  # borders of the lanes' parts
        node_cuts = cuts[lanes.lane * k : (lanes.lane + 1) * k + 1]  # of the pieces of this lane
        # `last`: this rank posts nothing later. Without guests the last phase is 2 in a
        # reduce-scatter (1 with one node), 4 in an all-reduce (3 with one lane).
        ends = scatter and not lanes.guests
        yield from ring_reduce_scatter(accumulator, lane_cuts, ring, last=ends and k == 1)
        yield from halve(accumulator, node_cuts, folding, last=ends and not folding.folds)
        if scatter:
            yield from unfold_pieces(accumulator, node_cuts, folding, last=ends)
        else:
            start, stop = folding.block(node_cuts)
            store(values_N[start:stop], accumulator.sum_N[start:stop])
            ends = not lanes.guests
            yield from double(values_N, node_cuts, folding, last=ends and lanes.count == 1)
            yield from ring_all_gather(values_N, lane_cuts, ring, last=ends)
        sent_bytes = ring.sent_bytes + across.sent_bytes

    if scatter:  # surplus ranks get their shards
        yield from unfold(lambda rank: accumulator.sum_N[shards[rank]], lanes, inside)
        own_M = accumulator.sum_N[shards[transport.rank]]
        store(bucket.grad_N[bucket.shard(transport.rank)], own_M)
    else:  # surplus ranks get the whole sum
        yield from unfold(lambda rank: values_N, lanes, inside)
        store(bucket.grad_N, values_N)
    return sent_bytes + inside.sent_bytes


def piece_cuts(bucket: Bucket, order: Sequence[Sequence[int]]) -> list[int]:
    """Offsets that cut a bucket into one piece for each lane of each node, lane by lane.

    In a reduce-scatter a piece consists of its owners' shards. `order` is `Lanes.order`: the owners
    of each piece.
    """
    if bucket.op is CollectiveOp.ALL_REDUCE:
        return even_cuts(bucket.numel, len(order))
    shard_numel = bucket.numel // bucket.world_size
    return [0, *accumulate(len(owners) * shard_numel for owners in order)]


def shards_of(bucket: Bucket, order: Sequence[Sequence[int]]) -> dict[int, slice]:
    """For each rank, where its shard lies in a vector with the shards in the order of `order`."""
    owners, numel = chain(*order), bucket.numel // bucket.world_size
    return {owner: slice(i * numel, (i + 1) * numel) for i, owner in enumerate(owners)}


def _shuffled(exchange: Exchange, values_N: torch.Tensor, owners: list[int]) -> torch.Tensor:
    """A copy of the values with the shards in the order of `owners`, a list of all ranks."""
    bucket = exchange.bucket
    shuffled_N = exchange.take("shuffled", bucket.numel, values_N.dtype)
    with exchange.timer.stage("encode"):
        # One operation, because there may be a thousand shards.
        order = codec_cuda.on_device(torch.tensor(owners), values_N.device)
        shape = (len(owners), bucket.numel // len(owners))
        torch.index_select(values_N.view(shape), 0, order, out=shuffled_N.view(shape))
    return shuffled_N


def _fold(accumulator: Accumulator, lanes: Lanes, inside: Subgroup) -> Phase:
    """Surplus ranks send all their values to their lane's rank, which adds them.

    `inside` is the group of the node's ranks: number i has lane i, numbers from `lanes.count` on
    are surplus.
    """
    numel = accumulator.sum_N.numel()
    if lanes.is_surplus:
        yield from inside.exchange([(lanes.lane, accumulator.outgoing(0, numel))], [])
    for guest in lanes.guests:
        received = accumulator.incoming(numel)
        yield from inside.exchange([], [(inside.ranks.index(guest), received)])
        accumulator.add(0, numel, received)


def unfold(result_of: Callable[[int], torch.Tensor], lanes: Lanes, inside: Subgroup) -> Phase:
    """Sends each surplus rank its result from its lane's rank: the whole sum, or its shard in fp32.

    `result_of` takes a surplus rank and returns the tensor in which this rank has that rank's
    result (if it sends it) or receives it. `inside`: the group of the node's ranks, as in `_fold`.
    """
    if lanes.is_surplus:
        own = result_of(inside.ranks[inside.rank])
        yield from inside.exchange([], [(lanes.lane, own)], last=True)
    elif lanes.guests:
        sends = [(inside.ranks.index(guest), result_of(guest)) for guest in lanes.guests]
        yield from inside.exchange(sends, [], last=True)


def cost(run: DryRun) -> None:
    """Predicts the time of rings in nodes, halving and doubling between them (PCCL, section 4.1).

    With s = N b bytes, m lanes and k nodes: 2 (m - 1) alpha + 2 (m - 1) / m s beta on the links
    inside a node, and 2 log2 k alpha + 2 (k - 1) / (m k) s beta on the links between nodes. A
    reduce-scatter takes half. Added: the additions, the shuffle of a reduce-scatter, and the rounds
    in which surplus ranks (guests) fold into a lane.
    """
    sizes = run.clocks.topology.node_sizes
    lanes, nodes = min(sizes), len(sizes)
    guests = max(sizes) - lanes  # of the largest node
    numel = run.shape.numel
    if run.scatter:
        run.work(run.plain(CodecOp.COPY, numel))  # the shuffle
    intra = run.clocks.topology.intra
    most_guests = -(-guests // lanes)  # of one lane, rounded up
    if guests:
        # A lane adds its guests' values one guest after another.
        run.clocks.work(most_guests * (intra.alpha_s + intra.beta_s * numel * run.p))
        run.work(most_guests * run.plain(CodecOp.ADD, numel))
    node = run.node(lanes)
    inside = run.part(run.shape, node)
    ring_reduce_scatter_cost(inside, numel)  # phase 1
    run.clocks.wait_for(inside.clocks)
    # The slowest lane decides: lane 0, which has the most guests. It has a piece for each node: in
    # a reduce-scatter the shards of the piece's owners, in an all-reduce an equal part.
    units_by_node = [-(-size // lanes) if run.scatter else 1 for size in sizes]
    unit_numel = numel / (run.n if run.scatter else lanes * nodes)
    offsets = [unit_numel * units for units in accumulate(units_by_node, initial=0)]
    shape = BucketShape(
        round(offsets[-1]), 0, run.b, run.shape.op, world_size=nodes, partial_bytes=run.p
    )
    across = run.part(shape, run.lane(lanes))
    halving_doubling_cost(across, offsets)  # phases 2 and 3
    run.clocks.wait_for(across.clocks)
    if not run.scatter:  # phase 4
        inside = run.part(run.shape, node)
        ring_all_gather_cost(inside, numel)
        run.clocks.wait_for(inside.clocks)
    if guests:
        nbytes = numel / run.n * run.p if run.scatter else numel * run.b
        # A lane posts the results of all its guests together: one latency.
        run.clocks.work(intra.alpha_s + most_guests * intra.beta_s * nbytes)


SCHEME = Scheme("dense_hierarchical", Input.DENSE, run=dense_hierarchical, place=60, cost=cost)
