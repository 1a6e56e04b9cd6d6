"""Sparse ring (SparCML's ring; SpCCL, section IV-B): a ring that encodes its sums again and again.

The skeleton of `adaptive_ring`, which adds SpCCL's thresholds. Here each message is sparse or
dense, whichever is smaller. Ranks of one node are neighbours (`ring_order`), so the number of links
that cross nodes is the number of nodes. Below, ranks are numbered by their place in the ring.

Agreement: one all-gather of the collective's identity, 8 (2 + n) bytes a rank.
Reduce-scatter, n - 1 steps of two rounds (8 bytes with the size, then the records): every rank
passes the sum of one shard to its successor, adds its own contribution to the sum that it gets, and
encodes the result again. Shard i starts at rank i + 1, in its first encoding, and ends at rank i.
All-reduce only: the sums are encoded once more, their sizes all-gathered (as many bytes), and in
n - 1 rounds the records go round the ring unchanged.

In step s rank r sends the records of the sum of shard r - s by ranks r - s + 1, ..., r (s counts
from 1), and in the all-gather every sum but that of rank r + 1.
"""

from collections.abc import Sequence

import numpy as np

from megatron_sparse.collectives.accumulator import as_partial
from megatron_sparse.collectives.base import (
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    exchange_sizes,
)
from megatron_sparse.collectives.direct import encode_own_shard
from megatron_sparse.collectives.gather import ring_all_gather
from megatron_sparse.collectives.link_density import LinkDensity
from megatron_sparse.collectives.records import Cut, exchange_records, message_parts, shard_cuts
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import VALUE_DTYPES, Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import WORD_BYTES, DryRun
from megatron_sparse.pricing.records import RecordFormat
from megatron_sparse.transport import Transport

NAME = "sparse_ring"


def sparse_ring(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards also for an all-reduce.
    """
    transport, scatter = exchange.transport, exchange.scatters
    identity = Identity.of_message(NAME, exchange, message)
    group = Subgroup(transport, ring_order(transport), identity.tag)
    cuts = shard_cuts(message.layout)
    yield from exchange_sizes([], identity, transport)
    sums = SparseSum(exchange, message)
    yield from ring_reduce_scatter(cuts, sums, group, last=scatter)
    if scatter:
        sums.write(cuts[transport.rank].elements)
    else:
        yield from ring_gather_sums(identity, cuts, sums, group)
    return group.sent_bytes


def ring_order(transport: Transport) -> list[int]:
    """The ranks in the order in which they form a ring: node by node, ascending in each.

    Example:
        With nodes (0, 1, 0, 1) the ring is 0, 2, 1, 3, and two of its four links cross nodes.
    """
    return sorted(range(transport.world_size), key=lambda rank: (transport.nodes[rank], rank))


def ring_reduce_scatter(
    cuts: Sequence[Cut],
    sums: SparseSum,
    group: Subgroup,
    links: tuple[LinkDensity, LinkDensity] | None = None,
    *,
    last: bool,
) -> Phase:
    """Leaves the sum of this rank's shard in `sums`; the other shards hold partial sums.

    Args:
        cuts: the shard of each rank.
        sums: receives the sum; its message is cut into shards. Mutated.
        group: all ranks, in the ring's order. A place is a rank's number in it.
        links: (to the successor, from the predecessor): decide whether a sum crosses the link as
            dense values, without records and size round; None: all sums are encoded.
        last: this rank will post nothing more.

    Raises:
        WireFormatError: a peer's records are not what was announced.
    """
    n, place, ranks, message = group.world_size, group.rank, group.ranks, sums.message
    source = ranks[(place - 1) % n]
    own = message_parts(message, cuts)
    most_bytes = max(cut.capacity("fp32", message.value_dtype) for cut in cuts)
    out, room = sums.take("encoded", most_bytes), sums.take("received", most_bytes)
    # The sums begin with this rank's own message.
    for shard, records in enumerate(own):
        sums.add_message(records, cuts[shard], ranks[place], fresh=True)

    for step in range(1, n):
        # The shard that goes to the successor, and the one that comes from the predecessor.
        give, take = ranks[(place - step) % n], ranks[(place - 1 - step) % n]
        is_sum = step > 1  # the first step carries the ranks' own records
        dtype = sums.partial_dtype if is_sum else message.value_dtype
        sends_dense = receives_dense = False
        for link in links or ():
            link.extrapolate()  # to the sum of this step
        if links and is_sum:  # own records are encoded already, so they never go dense
            sends_dense, receives_dense = links[0].is_dense, links[1].is_dense
        if sends_dense:
            sum_M = sums.sum_N[cuts[give].elements]
            sent = as_partial(sums.exchange, sum_M, VALUE_DTYPES[dtype])
        else:
            sent = sums.encode(cuts[give], dtype, out) if is_sum else own[give]
        if receives_dense:
            space = sums.take("incoming", cuts[take].numel, VALUE_DTYPES[dtype])
        else:
            space = room[: cuts[take].capacity(dtype)]
        received = yield from exchange_records(
            group,
            ((place + 1) % n, sent),
            ((place - 1) % n, space),
            known=(sends_dense, receives_dense),
            last=last and step == n - 1,
        )
        if receives_dense:
            sums.add_dense(received, cuts[take])
        elif is_sum:
            sums.add_sum(received, cuts[take], dtype, source)
        else:
            sums.add_message(received, cuts[take], source)
        # Both ends of a link read the same records, so they compute the same density.
        if links and not sends_dense:
            links[0].calibrate(sent, cuts[give])
        if links and not receives_dense:
            links[1].calibrate(received, cuts[take])


def ring_gather_sums(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, group: Subgroup
) -> Phase:
    """Writes the sum of every shard on all ranks: SpCCL's all-gather (section IV-B).

    Each rank encodes its sum once; the records go round the ring unchanged and are decoded as they
    arrive. The collective's last phase. `cuts`: the shard of each rank; `sums` holds the complete
    sum of this rank's shard, and receives all others; `group`: all ranks, in the ring's order.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's records are not what was announced.
    """
    buffer, sizes = yield from encode_own_shard(identity, cuts, sums)
    write_sum = sums.sum_writer(cuts)
    yield from ring_all_gather(
        buffer,
        [sizes[rank] for rank in group.ranks],
        group,
        lambda place, records: write_sum(group.ranks[place], records),
    )


def cost(run: DryRun) -> None:
    """Predicts the time of `sparse_ring`, which encodes the sum again in each step.

    Reduce-scatter: (n - 1) alpha + sum over steps s of (n'_s / n beta + T_comp + T_decomp), as
    SpCCL says in words: n'_s are the bytes of the records of a sum of s ranks, T_comp and T_decomp
    the seconds of one encoding and one decoding. All-gather: (n - 1) alpha + (n - 1) / n n' beta +
    T_cd (SpCCL's equation 6): n' are the bytes of the complete sum's records (equation 4 for Pici),
    T_cd the seconds of one encoding and n - 1 decodings (equation 5). Added: 8 bytes for the size
    before each record; the shards' densities: each step waits for the densest; it passes all ranks.
    """
    own = run.messages(SCHEME.message_format(run.options))
    ring_reduce_scatter_cost(run, own, run.sum_format(), thresholds=(np.inf, np.inf))
    if not run.scatter:
        ring_gather_sums_cost(run, np.zeros(run.n, dtype=bool), run.gathered_sums())


def ring_reduce_scatter_cost(
    run: DryRun, own: RecordFormat, form: RecordFormat, thresholds: tuple[float, float]
) -> np.ndarray:
    """Runs the agreement and the reduce-scatter's n - 1 steps on the clocks of `run`.

    The first step carries records of format `own`, later steps sums of format `form`. On links
    (within, between) nodes a sum goes dense from the density in `thresholds` on. Returns the
    density that each rank assumes for its own shard at the end, [n].
    """
    n, ranks, shard = run.n, np.arange(run.n), run.piece(run.n)
    nodes = np.array(run.clocks.topology.nodes)
    inside_n = nodes == nodes[(ranks + 1) % n]  # whether the successor is on the same node
    threshold_n = np.where(inside_n, *thresholds)
    initial, own_density_n = run.densities.whole(1), run.densities.shards(1, n)
    run.agree()
    run.work(np.sum(own.seconds(CodecOp.DECODE, shard, own_density_n, run.b)))  # own message
    link_n = np.zeros(n)  # the density that each rank assumes on the link to its successor
    dense_addition_s = run.plain(CodecOp.ADD, shard.numel)
    for step in range(1, n):
        # The density of what rank r sends: the sum of `step` ranks of shard r - step.
        density_n = run.densities.shards(step, n)[(ranks - step) % n]
        link_n = 1 - (1 - link_n) * (1 - initial)  # equation 7 (`link_density`)
        is_sum = step > 1
        goes_dense_n = (link_n >= threshold_n) & is_sum
        if is_sum:
            encoding_n = form.seconds(CodecOp.ENCODE, shard, density_n, run.p)
            run.work(np.where(goes_dense_n, 0.0, encoding_n))
            sparse_bytes_n = form.nbytes(shard, density_n, run.p)
            sparse_addition_n = form.seconds(CodecOp.DECODE_ADD, shard, density_n, run.p)
        else:
            sparse_bytes_n = own.nbytes(shard, density_n, run.b)
            sparse_addition_n = own.seconds(CodecOp.DECODE_ADD, shard, density_n, run.b)
        # A shift by -1 goes to the successor. The sizes of records go first; dense sums have none.
        if not goes_dense_n.all():
            run.shift(-1, np.where(goes_dense_n, 0, WORD_BYTES))
        run.shift(-1, np.where(goes_dense_n, shard.numel * run.p, sparse_bytes_n))
        addition_n = np.where(goes_dense_n, dense_addition_s, sparse_addition_n)
        run.work(addition_n[ranks - 1])  # of what the predecessor sent
        link_n = np.where(goes_dense_n, link_n, density_n)  # records calibrate, dense sums do not
    # What the predecessor sent last, extrapolated by this rank's own contribution.
    return 1 - (1 - link_n[ranks - 1]) * (1 - initial)


def ring_gather_sums_cost(run: DryRun, dense_n: np.ndarray, form: RecordFormat) -> None:
    """Runs the all-gather on the clocks: each sum is encoded once and goes round the ring.

    The records are dense where `dense_n` (bool, by owner) is true, else of format `form`.
    """
    n, ranks, shard = run.n, np.arange(run.n), run.piece(run.n)
    sum_density_n, dense = run.densities.shards(n, n), RecordFormat("dense", run.cluster)
    ones_n = np.ones(n)  # the density of dense records

    def seconds(op: CodecOp) -> np.ndarray:
        """Seconds to encode or decode each owner's sum."""
        return np.where(
            dense_n,
            dense.seconds(op, shard, ones_n, run.b),
            form.seconds(op, shard, sum_density_n, run.b),
        )

    run.work(seconds(CodecOp.ENCODE))
    run.agree()
    nbytes_n = np.where(
        dense_n, dense.nbytes(shard, ones_n, run.b), form.nbytes(shard, sum_density_n, run.b)
    )
    decoding_n = seconds(CodecOp.DECODE)
    # In a round rank r passes the sum of rank r - step + 1 to rank r + 1 (a shift by -1), and
    # decodes it meanwhile. The sum that arrives last, of rank r + 1, is decoded at the end.
    owners = [(ranks - step + 1) % n for step in range(1, n)]
    run.shifts([(-1, nbytes_n[owner_n], decoding_n[owner_n]) for owner_n in owners])
    run.work(decoding_n[(ranks + 1) % n])


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=sparse_ring,
    place=120,
    cost=cost,
    needs_shards=True,
)
