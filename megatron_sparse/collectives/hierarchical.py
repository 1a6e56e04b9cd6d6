"""Hierarchical: `direct` across the nodes, dense sums within them.

The two levels of `dense_hierarchical` (PCCL, section 4.1; its lanes are used here), for gradients
that were selected rank by rank: links inside a node are fast, so there the contributions are added
densely. Between nodes only non-zero values travel, once for each node instead of once for each
rank.

With m lanes (the ranks of the smallest node) and k nodes, lane l of every node holds one of m parts
of the bucket; it has the k ranks that carry the part across.

Agreement: one all-gather of the collective's identity, 8 (2 + n) bytes a rank.
Decoding (local): a rank turns its own message into a dense vector. For a reduce-scatter it puts
the shards in the order of the lanes, so that a lane's part is contiguous.
Phase 1, rounds inside the nodes, as many as the largest node has other ranks: every rank sends each
lane its part, one peer at a time; the lane's rank adds them.
Phase 2, `direct`: each lane's rank encodes its part of the node's sum, and the lane's ranks reduce
it across the nodes. They have agreements of their own (8 (2 + k) bytes to each of the others). The
operation is the bucket's. But where nodes differ in size, a lane all-reduces and each rank keeps
its own shard.
Phase 3, rounds inside the nodes: a lane's rank sends its part to the node's other ranks. In a
reduce-scatter it sends each rank without a lane the shard of that rank, and nothing else.

A node with more ranks than lanes has surplus ranks, which only send in phase 1 and only receive in
phase 3; each is a guest of one of the node's lanes. A lane's *owners* are its rank and its guests.
Inside a node partial sums travel in fp32, and complete sums in the gradient's dtype. Between nodes
both are fp32, or bf16 where `scheme.wire_dtype=bf16` narrows an fp32 gradient: a node's sum may not
fit into fp16. So a node's sum of bf16 gradients is never rounded to bf16 before the last addition.
A lane's records are in `scheme.format`.

Of N elements a rank with a lane sends (m - 1) / m N 4 bytes in phase 1, in phase 3 for each other
rank of its node N / m b bytes, and between nodes the bytes of `direct` for N / m elements
with the density of a node's sum among k ranks. A rank without a lane sends 4 N bytes. In a
reduce-scatter phase 3 is 4 N / n bytes for each rank without a lane that the rank serves. A rank
with a lane holds up to N values of fp32 more than the other schemes, for phase 1.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import cast

import numpy as np
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts, Layout, ParameterSlice
from megatron_sparse.collectives.accumulator import partial_name, store
from megatron_sparse.collectives.base import (
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    exchange_sizes,
    without,
)
from megatron_sparse.collectives.dense_hierarchical import Lanes, piece_cuts, shards_of, unfold
from megatron_sparse.collectives.direct import cost as direct_cost
from megatron_sparse.collectives.direct import direct
from megatron_sparse.collectives.gather import pairwise_rounds
from megatron_sparse.collectives.records import CUTS, message_parts, shard_cuts, whole_cut
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.formats.message import Message, decode_add_, encode, record_spec
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.shape import FP32_BYTES, BucketShape
from megatron_sparse.transport import Transport
from megatron_sparse.transport.base import Marker, SubsetTransport

NAME = "hierarchical"


def hierarchical(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`.
    """
    bucket, transport, scatter = exchange.bucket, exchange.transport, exchange.scatters
    identity = Identity.of_message(f"{NAME} direct", exchange, message)  # `direct` between nodes
    yield from exchange_sizes([], identity, transport)
    tag = identity.tag
    lanes = Lanes(transport.nodes, transport.rank)
    inside = Subgroup(transport, lanes.members[lanes.node], tag)
    has_lane = not lanes.is_surplus
    sends_in_phase_3 = bool(lanes.guests) if scatter else inside.world_size > 1
    parts = LaneParts(bucket, message.layout, lanes)
    with exchange.timer.stage("decode"):
        values_N = _decoded(exchange, message, parts)

    nodes = len(lanes.members)
    # A rank with a lane that sends nothing in phase 3 receives nothing in it either.
    ends_early = has_lane and not sends_in_phase_3
    # Phase 1: on a rank with a lane, its part of `values_N` becomes the node's sum.
    yield from _sum_in_lanes(exchange, values_N, parts, inside, last=ends_early and nodes == 1)
    # Phase 2: the part becomes the sum of all nodes.
    sent_bytes = 0
    if has_lane and nodes > 1:
        lane = SubsetTransport(transport, [members[lanes.lane] for members in lanes.members], tag)
        # The cast below is safe: sparse schemes use only methods that a subset transport has.
        across = replace(
            exchange,
            bucket=parts.lane_bucket(values_N),
            transport=cast("Transport", lane),
            # A lane's sum has no residual that would keep the rounding errors of few bits.
            options=replace(exchange.options, sum_bits=None),
        )
        steps = direct(across, _encoded(across, bucket, message))
        # If phase 3 posts messages, the `POSTED` of `direct` comes too early: drop it.
        sent_bytes = yield from steps if ends_early else without(steps, Marker)
    # Phase 3: the complete sums reach the ranks of the node.
    if scatter:
        # A rank without a lane gets the sum of its own shard.
        yield from unfold(lambda rank: values_N[parts.shards[rank]], lanes, inside)
        own = parts.shards[transport.rank]
        store(bucket.grad_N[bucket.shard(transport.rank)], values_N[own])
    else:
        if has_lane:
            own = parts.part(lanes.lane)
            store(bucket.grad_N[own], values_N[own])
        yield from _spread_parts(bucket.grad_N, parts, inside)
    return inside.sent_bytes + sent_bytes


class LaneParts:
    """Where each lane's part lies in `values_N`, a vector of the whole bucket, lane by lane.

    For an all-reduce `values_N` has the bucket's own order. For a reduce-scatter it has the shards
    in another order: first the shards of lane 0's owners, node by node, then those of lane 1.

    Args:
        bucket: the bucket to synchronise.
        layout: of a rank's message, cut into shards for a reduce-scatter.
        lanes: of this rank; also an attribute.

    Attributes:
        shards: for a reduce-scatter, where each rank's shard lies in `values_N`; else empty.
    """

    def __init__(self, bucket: Bucket, layout: Layout, lanes: Lanes) -> None:
        self._bucket, self._layout, self.lanes = bucket, layout, lanes
        order = lanes.order()
        # `piece_cuts` has a piece for each node in each lane: a part begins every `nodes` pieces.
        self._cuts = piece_cuts(bucket, order)[:: len(lanes.members)]
        is_scattered = bucket.op is CollectiveOp.REDUCE_SCATTER
        self.shards = shards_of(bucket, order) if is_scattered else {}

    def part(self, lane: int) -> slice:
        """The elements of a lane's part."""
        return slice(self._cuts[lane], self._cuts[lane + 1])

    def lane_bucket(self, values_N: torch.Tensor) -> Bucket:
        """The bucket that this lane's ranks, one of each node, reduce in phase 2: the lane's part.

        Its operation is the whole bucket's if nodes have equally many owners in this lane, so that
        shards are equal; else an all-reduce, after which each rank keeps its own shard.
        """
        lanes, part = self.lanes, self.part(self.lanes.lane)
        nodes = len(lanes.members)
        owner_counts = {len(lanes.owners(lanes.lane, node)) for node in range(nodes)}
        op = self._bucket.op if len(owner_counts) == 1 else CollectiveOp.ALL_REDUCE
        # The slices say which elements are always dense: one for each segment, named by its number.
        slices = [
            ParameterSlice(str(number), start - part.start, stop - part.start, keep)
            for number, (start, stop, keep) in enumerate(self._segments(part))
        ]
        layouts = _lane_layouts(self._layout, tuple(map(tuple, lanes.members)), lanes.lane)
        return Bucket(
            f"{self._bucket.name}/lane", values_N[part], slices, op, nodes, layouts=layouts
        )

    def _segments(self, part: slice) -> Iterator[tuple[int, int, bool]]:
        """The segments in a lane's part: (start, stop, whether always dense), as in `values_N`.

        In an all-reduce the part's borders may cut a segment. In a reduce-scatter the part consists
        of whole shards, at other offsets than in the bucket.
        """
        offsets, keeps = self._layout.segment_offsets.tolist(), self._layout.segment_keep.tolist()
        if not self.shards:  # an all-reduce
            for (start, stop), keep in zip(pairwise(offsets), keeps, strict=True):
                first, last = max(start, part.start), min(stop, part.stop)
                if first < last:
                    yield first, last, bool(keep)
            return
        for owner, shard in self.shards.items():
            if part.start <= shard.start < part.stop:
                shift = shard.start - self._bucket.shard(owner).start  # from the bucket to values_N
                for segment in range(*self._layout.shard_segments[owner : owner + 2]):
                    start, stop = offsets[segment] + shift, offsets[segment + 1] + shift
                    yield start, stop, bool(keeps[segment])


@lru_cache(CUTS)
def _lane_layouts(
    layout: Layout, members: tuple[tuple[int, ...], ...], lane: int
) -> dict[tuple[bool, Cuts], Layout]:
    """The cache of layouts for `Bucket.layout`, which fills it: one dict for each lane's bucket.

    The lane's bucket is a new object in each step. If its layouts were new too, the caches in
    `records`, whose keys are layouts, would grow in each step.
    """
    return {}


def _decoded(exchange: Exchange, message: Message, parts: LaneParts) -> torch.Tensor:
    """This rank's message as a dense fp32 vector, in the order that `LaneParts` describes."""
    layout, rank = message.layout, exchange.transport.rank
    bucket, scatter = exchange.bucket, exchange.scatters
    grad_N = bucket.grad_N
    if grad_N.dtype == torch.float32 and not scatter:
        values_N = grad_N  # the message replaces it, and later the sum
    else:
        values_N = exchange.take("lanes", bucket.numel, torch.float32)
    cuts, targets = (whole_cut(layout),), [values_N]
    if scatter:
        cuts = shard_cuts(layout)
        targets = [values_N[parts.shards[owner]] for owner in range(bucket.world_size)]
    for records, target_M, cut in zip(message_parts(message, cuts), targets, cuts, strict=True):
        expected = message.expected(cut.offsets, rank)
        decode_add_(target_M, records, expected, fresh=True)  # replaces the old values
    return values_N


def _sum_in_lanes(
    exchange: Exchange, values_N: torch.Tensor, parts: LaneParts, inside: Subgroup, *, last: bool
) -> Phase:
    """Phase 1: each rank with a lane adds up its node's values of the lane's part, in place.

    In round i rank r of the node sends to rank r - i and receives from rank r + i, as in `direct`.
    A rank without a lane only sends.
    """
    m, rank, lanes = inside.world_size, inside.rank, parts.lanes  # `rank` of m in the node
    # For each peer a list: its lane's part, or nothing if it has no lane.
    sent = [[values_N[parts.part(peer)]] if peer < lanes.count else [] for peer in range(m)]
    received: list[list[torch.Tensor]] = [[] for _ in range(m)]
    part_M = values_N[parts.part(lanes.lane)]
    if rank < lanes.count:
        # Phase 2 (`direct`) takes the buffer "received", so this one has another name.
        room = exchange.take("parts", (m - 1) * part_M.numel(), torch.float32)
        for number, room_M in enumerate(room.view(m - 1, part_M.numel()), 1):
            received[(rank + number) % m] = [room_M]

    def add(number: int) -> None:
        """Adds the part that arrived in round `number`, from 1 on; for 0 there is none."""
        for room_M in received[(rank + number) % m]:
            with exchange.timer.stage("decode"):
                part_M.add_(room_M)

    rounds = pairwise_rounds(sent, received, inside)
    yield from inside.in_rounds(rounds, add, independent=True, last=last)


def _encoded(across: Exchange, bucket: Bucket, message: Message) -> Message:
    """Encodes the node's sum of this lane's part as a message for `direct`, cut into k shards."""
    lane_bucket, options = across.bucket, across.options
    value_dtype = partial_name(bucket, message.sum_dtype)
    # Rice records need a density, for their chunk size: the message's, as the sum's is not known.
    density = min(1.0, message.nnz / max(bucket.numel, 1))
    spec = record_spec(
        value_dtype,
        message.step,
        options.format,
        options.block_size,
        density,
        checksum=options.checksum,
    )
    with across.timer.stage("encode"):
        return encode(lane_bucket, lane_bucket.layout(sharded=True), spec, across.buffers)


def _spread_parts(grad_N: torch.Tensor, parts: LaneParts, inside: Subgroup) -> Phase:
    """Phase 3 of an all-reduce: each lane's rank sends its part to all ranks of its node."""
    m, rank, lanes = inside.world_size, inside.rank, parts.lanes.count  # `rank` of m in the node
    # For each peer a list: where its part lies in the gradient, or nothing if it has no lane.
    parts_M = [[grad_N[parts.part(peer)]] if peer < lanes else [] for peer in range(m)]
    rounds = pairwise_rounds([parts_M[rank]] * m, parts_M, inside)
    yield from inside.in_rounds(rounds, independent=True, last=True)


def cost(run: DryRun) -> None:
    """Predicts the time of the three phases, of which phase 2 is that of the densest lane.

    With m lanes, k nodes and s = N b bytes: (m - 1) (alpha + 4 N / m beta) inside the nodes,
    `direct` on N / m elements and k ranks, and (m - 1) (alpha + s / m beta) inside the nodes. This
    is PCCL's dense hierarchy (section 4.1) with a sparse phase between the nodes. `direct` sees the
    density of a node's sum: gamma of ZEN's definition 4 times the density of a rank.

    Added: decoding the whole message first, counting and encoding a lane's part, surplus ranks.
    Lanes that share a network card share its rate in proportion to the bytes that each sends.
    """
    sizes = run.clocks.topology.node_sizes
    lanes, nodes, largest = min(sizes), len(sizes), max(sizes)
    whole, part = run.piece(), run.piece(lanes)
    form = run.messages(SCHEME.message_format(run.options))
    run.agree()
    run.work(form.seconds(CodecOp.DECODE, whole, run.densities.whole(1), run.b))
    addition_s = run.plain(CodecOp.ADD, part.numel)
    _within_node_cost(run, largest, lanes, FP32_BYTES, addition_s)  # phase 1
    if nodes > 1:
        _across_cost(run, lanes, nodes)  # phase 2
    if not run.scatter:  # phase 3
        _within_node_cost(run, largest, lanes, run.b, addition_s=0.0)
    elif largest > lanes:
        link = run.clocks.topology.intra
        most_guests = -(-(largest - lanes) // lanes)  # of one lane, rounded up
        guests_s = most_guests * link.beta_s * FP32_BYTES * whole.numel / run.n
        run.clocks.work(link.alpha_s + guests_s)


def _within_node_cost(
    run: DryRun, ranks: int, lanes: int, value_bytes: int, addition_s: float
) -> None:
    """Phase 1 or 3 in a node of `ranks` ranks: a round moves a lane's part, the next adds it.

    `addition_s`: seconds to add a part; 0 in phase 3, which only copies.
    """
    inside = run.part(run.shape, run.node(ranks))
    nbytes = run.shape.numel / lanes * value_bytes
    # Step, bytes, and the addition of the part that arrived in the round before.
    inside.shifts([(step, nbytes, addition_s if step > 1 else 0.0) for step in range(1, ranks)])
    inside.work(addition_s if ranks > 1 else 0.0)
    run.clocks.wait_for(inside.clocks)


def _across_cost(run: DryRun, lanes: int, nodes: int) -> None:
    """Phase 2: the densest lane encodes its part of the node's sum, and runs `direct` on it.

    The other lanes only slow it down, where they share its network card.
    """
    sizes = run.clocks.topology.node_sizes
    op = run.shape.op if len(set(sizes)) == 1 else CollectiveOp.ALL_REDUCE
    # Between nodes all values, also those of complete sums, have the bytes of partial sums.
    shape = BucketShape(
        round(run.shape.numel / lanes),
        round(run.shape.kept_numel / lanes),
        element_bytes=run.p,
        op=op,
        world_size=nodes,
        partial_bytes=run.p,
    )
    densities = run.densities.of_lane(max(sizes), lanes)
    form, part = run.sum_format(SCHEME.message_format(run.options)), run.piece(lanes)
    # For each lane, densest first, the bytes of its part of a node's sum and of the whole sum.
    node_L, whole_L = (
        np.asarray(form.nbytes(part, run.densities.shards(ranks, lanes), run.p))
        for ranks in (max(sizes), run.n)
    )
    sent_L = node_L + whole_L
    busiest = max(float(np.max(sent_L)), 1.0)  # at least 1: an empty bucket sends 0 bytes
    sharing = float(np.sum(sent_L)) / busiest  # see `DryRun.lane`
    lane = run.part(shape, run.lane(sharing), densities)  # its clocks start at 0
    lane.options = replace(lane.options, sum_bits=None)  # no lane quantises its sums
    message = lane.messages(lane.options.format)
    lane.work(message.seconds(CodecOp.ENCODE, lane.piece(), densities.whole(1), lane.b))
    direct_cost(lane)
    run.clocks.wait_for(lane.clocks)


SCHEME = Scheme(NAME, Input.SPARSE, run=hierarchical, place=170, cost=cost)
