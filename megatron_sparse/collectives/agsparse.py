"""AGsparse: every rank sends its sparse message to every other rank, and adds up all n messages.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
Only the ranks' own messages travel, never partial sums, which have more non-zero elements (fill-in)
than each message. But each rank sends its message n - 1 times, so the scheme suits few ranks.

All-reduce:
1. Agreement: one all-gather of a fingerprint of the collective (bucket, scheme, dtype, step) and of
   every rank's message size (of each part), 8 (2 + n) bytes a rank.
2. n - 1 rounds: every rank sends its message to every other, one peer at a time. It adds them in
   rank order, so that all ranks get the same bits, in one pass over its sum.
   On a CPU the messages of a large bucket have min(n, 4) parts. All parts are posted to all peers
   at once; between each pair of ranks they arrive in order. A part is added while the next one
   arrives.

Reduce-scatter: as `direct`. Each peer gets only the records of the shard that it owns.

In capacity mode (`scheme.capacity`) messages have slots of fixed size. Sizes need no agreement
then; the fingerprint is in the tag of the messages, and step and dtype in the records' headers.

Rank r sends (n - 1) |message_r| bytes, in a reduce-scatter |message_r| - |shard_r of it|.
"""

from collections.abc import Sequence
from itertools import batched, chain

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts
from megatron_sparse.collectives.base import (
    POSTED,
    SMALL_BYTES,
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    aligned_cuts,
    exchange_sizes,
)
from megatron_sparse.collectives.direct import reduce_shards, split_cost
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    Cut,
    check_announced,
    cuts_at,
    group_of,
    message_parts,
    reads_reports,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun

NAME = "agsparse"
MOST_PARTS = 4
PARTS_NUMEL = 1 << 22
"""Elements of the smallest bucket whose messages have parts."""


@reads_reports
def agsparse(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Sums are fp32 and rounded once, to nearest even, where the gradient is narrower.

    Args:
        exchange: the bucket, and the means to synchronise it.
        message: this rank's contribution, cut into shards for a reduce-scatter.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's message is not what was announced.
    """
    transport, sums = exchange.transport, SparseSum(exchange, message)
    if message.slots is not None and transport.communicator is not None:
        # `scheme.nccl_engine`: the same rounds and the same bits, in one call of C++.
        engine, by_owners = transport.communicator, exchange.scatters
        return (yield from sum_in_one_call(NAME, sums, engine, by_owners=by_owners))
    if exchange.scatters:
        return (yield from reduce_shards(NAME, sums))
    identity = Identity.of_message(NAME, exchange, message)
    group = group_of(identity, message, transport)
    n, rank, bucket = group.world_size, group.rank, exchange.bucket
    parts = cuts_at(message.layout, (0, *part_borders(bucket), bucket.numel))
    own = message_parts(message, parts)
    # By rank and part; in capacity mode they are the same on every rank.
    sizes = [[records.numel() for records in own]] * n
    if message.slots is None:  # not in capacity mode
        small = message.nbytes * (n - 1) <= SMALL_BYTES  # then the next bucket may post meanwhile
        sizes = yield from exchange_sizes(sizes[rank], identity, transport, unordered=small)
        for part, sizes_of_part in zip(parts, zip(*sizes, strict=True), strict=True):
            check_announced(sizes_of_part, [part] * n, message.value_dtype)
    sizes[rank] = [0] * len(parts)  # this rank's own message is added from its own buffer
    room = sums.take("received", sum(map(sum, sizes)))
    received: list[Sequence[torch.Tensor]] = [*batched(room.split([*chain(*sizes)]), len(parts))]
    received[rank] = own
    yield from _exchange_and_add(parts, own, [*zip(*received, strict=True)], sums, group)
    sums.write(slice(None))
    return group.sent_bytes


def _exchange_and_add(
    parts: Sequence[Cut],
    own: Sequence[torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    sums: SparseSum,
    group: Subgroup,
) -> Phase:
    """Sends this rank's message to every other rank, and adds up all messages, part by part.

    `own`: this rank's records, by part. `received`: the room for each part, by part and rank; this
    rank's entries are its own records.
    """
    n, rank = group.world_size, group.rank
    if len(parts) == 1:
        yield from pairwise_all_to_all([*own] * n, received[0], group, last=True)
        sums.add_messages(received[0], parts[0], range(n))
        return
    peers = [(rank + step) % n for step in range(1, n)]
    works = [
        group.post([(peer, mine) for peer in peers], [(peer, records[peer]) for peer in peers])
        for mine, records in zip(own, received, strict=True)
    ]
    yield POSTED
    for work, part, records in zip(works, parts, received, strict=True):
        yield work
        sums.add_messages(records, part, range(n))


def part_borders(bucket: Bucket) -> Cuts:
    """Where the parts of a bucket's messages begin, but for the first part.

    A reduce-scatter has none: a rank's shard is a small part already. CUDA has none: NCCL moves all
    messages in one call, and one kernel adds them.
    """
    if bucket.grad_N.is_cuda or bucket.op is CollectiveOp.REDUCE_SCATTER:
        return ()
    parts = part_count(bucket.numel, bucket.world_size)
    return tuple(aligned_cuts(bucket.numel, parts)[1:-1])


def part_count(numel: int, ranks: int) -> int:
    """The number of parts of an all-reduce's messages on a CPU."""
    return min(ranks, MOST_PARTS) if numel >= PARTS_NUMEL else 1


def cost(run: DryRun) -> None:
    """Predicts the time of `agsparse`: runs its rounds on the modelled clocks of `run`.

    With n ranks and messages of m bytes: (n - 1) (alpha + m beta) (SparCML, section 5). Added: the
    agreement and the additions. Each message is priced as an addition of its own; one that finds
    the sum in a cache takes less. Of p parts, the additions of p - 1 run beside the exchange. A
    reduce-scatter is `split_cost`.
    """
    record_format = run.messages(SCHEME.message_format(run.options))
    if run.scatter:
        split_cost(run, record_format)
        return
    if not run.has_slots:
        run.agree()
    whole, density = run.piece(), float(run.densities.whole(1))  # the density of one message
    (sent_density,) = run.message_density()  # the same, or in capacity mode that of full slots
    nbytes = float(record_format.nbytes(whole, sent_density, run.b))
    begun_s = run.clocks.now_n.max()
    run.shifts([(step, nbytes, 0.0) for step in range(1, run.n)])  # step, bytes, local work
    network_s = run.clocks.now_n.max() - begun_s
    # The first of the n messages is written, the others are added to it.
    first_s = record_format.seconds(CodecOp.DECODE, whole, density, run.b)
    addition_s = record_format.seconds(CodecOp.DECODE_ADD, whole, density, run.b)
    adding_s = float(first_s + (run.n - 1) * addition_s)
    parts = part_count(run.shape.numel, run.n) if run.cluster.device == "cpu" else 1
    run.work(adding_s - min(adding_s, network_s) * (parts - 1) / parts)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=agsparse,
    place=70,
    sends_by_shard=True,
    extra_cuts=part_borders,
    cost=cost,
    takes_slots=True,
    has_engine=True,
)
