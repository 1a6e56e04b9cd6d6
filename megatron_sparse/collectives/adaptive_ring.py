"""Adaptive ring (SpCCL, section IV): a ring whose sums go dense when that is faster.

Re-encoding a sum pays only while it is sparse. The density up to which it pays depends on the link
that the sum will cross next. Three densities decide (section IV-C; the paper states them as
sparsities): `scheme.ring_intra_density` for links inside a node, `scheme.ring_inter_density` for
links between nodes, and `scheme.ring_gather_density` for the all-gather, whose records are encoded
once only.

The phases are those of `sparse_ring`. Below, ranks are numbered by their place in the ring.
Agreement: one all-gather of the collective's identity, thresholds included, and of the number of
non-zero elements that each rank has selected, 8 (2 + n) bytes a rank.
Reduce-scatter, n - 1 steps: as `sparse_ring`. But from the second step on, if the density of a sum
has reached the threshold of the link to the successor, the rank sends the sum dense: no count, no
encoding, no size round, no copy of an fp32 sum. The density is measured in the records that cross a
link and extrapolated from there by equation (7) (`link_density`). It never falls while nothing is
measured, so a link that has gone dense stays dense. A link of the other kind may still be sparse,
so a shard may travel sparse, then dense, then sparse again, as in the paper.
All-gather (all-reduce only): as `sparse_ring`. Each rank extrapolates the density of its own sum
from the link that the sum came by. If it has reached the third threshold, the rank sends dense
records (the paper's phase-aware adaptivity).

Sums travel in the format that `scheme.format` names (section IV-D: Pici or COO). A segment that is
not smaller in that format than dense travels dense.

Deviations, beside those of `link_density`: rank r's first transfer is always sparse, because
selection has encoded it already; whole shards are encoded, not slices of a pipeline.

In step s rank r sends, in a round each, 8 bytes and the records of shard r - s summed over ranks
r - s + 1, ..., r; or the shard's N / n partial sums of p bytes each (`dense_ring`) in one round.
"""

from collections.abc import Generator, Sequence

from megatron_sparse.collectives.base import (
    Exchange,
    Identity,
    Steps,
    Subgroup,
    Yielded,
    exchange_sizes,
)
from megatron_sparse.collectives.link_density import LinkDensity, prunable_nnz, prunable_numel
from megatron_sparse.collectives.records import Cut, message_parts, shard_cuts
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_ring import (
    ring_gather_sums,
    ring_gather_sums_cost,
    ring_order,
    ring_reduce_scatter,
    ring_reduce_scatter_cost,
)
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import FORMAT_CODES, Message
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.transport import Transport
from megatron_sparse.wire import FORMAT_DENSE, wrong_field

NAME = "adaptive_ring"


def adaptive_ring(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards also for an all-reduce. On
    CUDA the CPU reads the records' headers. Below, a place is a rank's index in the ring.
    """
    transport, options = exchange.transport, exchange.options
    intra, inter, gather = options.ring_densities()  # the three thresholds
    scheme = f"{NAME} {intra}/{inter}/{gather}"
    identity = Identity.of_message(scheme, exchange, message)
    group = Subgroup(transport, ring_order(transport), identity.tag)
    n, place, ranks = group.world_size, group.rank, group.ranks
    cuts = shard_cuts(message.layout)
    density_of = yield from _initial_densities(identity, message, cuts, transport)
    initial = [density_of[rank] for rank in ranks]  # by place

    def link_from(sender: int) -> LinkDensity:
        """Tracks the density on the link from the place `sender` to the next place in the ring."""
        both_ends = ranks[sender % n], ranks[(sender + 1) % n]
        is_intra = len({transport.nodes[rank] for rank in both_ends}) == 1
        return LinkDensity(sender, initial, intra if is_intra else inter)

    outgoing, incoming = link_from(place), link_from(place - 1)
    form = FORMAT_CODES[options.format]
    sums = SparseSum(exchange, message, form=form)
    yield from ring_reduce_scatter(cuts, sums, group, (outgoing, incoming), last=exchange.scatters)
    if exchange.scatters:
        sums.write(cuts[transport.rank].elements)
        return group.sent_bytes
    # The last sum received lacks this rank's own values. With them it is complete, and denser.
    incoming.extrapolate()
    # Quantised sums (`scheme.sum_bits`) never go dense: they are shorter than dense ones, and the
    # peers decode no other dtype.
    is_quantised = sums.gather_dtype != sums.final_dtype
    if incoming.density >= gather and not is_quantised:
        # A new object with the same sum, in the same memory, that encodes it as dense records.
        sums = SparseSum(exchange, message, form=FORMAT_DENSE)
    yield from ring_gather_sums(identity, cuts, sums, group)
    return group.sent_bytes


def _initial_densities(
    identity: Identity, message: Message, cuts: Sequence[Cut], transport: Transport
) -> Generator[Yielded, None, list[float]]:
    """The agreement: every rank announces how many elements it selected. Returns the densities.

    Segments that are always sent whole do not count: only the prunable elements do.
    """
    parts = zip(message_parts(message, cuts), cuts, strict=True)
    nnz = sum(prunable_nnz(records, cut) for records, cut in parts)
    table = yield from exchange_sizes([nnz], identity, transport)
    numel = sum(map(prunable_numel, cuts))
    for rank, (announced,) in enumerate(table):
        if not 0 <= announced <= numel:
            raise wrong_field(rank, "announced elements", f"0 to {numel}", announced)
    # If nothing can be pruned, messages are dense.
    return [announced / numel if numel else 1.0 for (announced,) in table]


def cost(run: DryRun) -> None:
    """`sparse_ring.cost`, but a sum goes dense from its link's density threshold on.

    SpCCL's equations 3 to 6 as in `sparse_ring.cost`. The density on each link follows equation 7,
    calibrated by each record that crosses the link (`link_density`).
    """
    intra, inter, gather = run.options.ring_densities()  # the three thresholds
    own = run.messages(SCHEME.message_format(run.options))
    form = run.sum_format(run.options.format)
    density_n = ring_reduce_scatter_cost(run, own, form, (intra, inter))
    if not run.scatter:
        # Quantised sums never go dense, as in `adaptive_ring`.
        goes_dense_n = (density_n >= gather) & (run.options.given_sum_bits is None)
        ring_gather_sums_cost(run, goes_dense_n, run.gathered_sums(run.options.format))


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=adaptive_ring,
    place=160,
    cost=cost,
    needs_shards=True,
)
