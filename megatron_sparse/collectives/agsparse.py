"""AGsparse: every rank sends its sparse message to every other, and each adds them all up.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
Only the ranks' own messages travel, never partial sums, which have more non-zero elements (fill-in)
than each message. But each rank sends its message n - 1 times, so the scheme suits few ranks.

All-reduce:
1. Agreement: one all-gather of a fingerprint of the collective (bucket, scheme, dtype, step) and of
   every rank's message size, 8 (2 + n) bytes a rank.
2. n - 1 rounds: every rank sends its message to every other, one peer at a time. It adds them in
   rank order, so that all ranks get the same bits, in one pass over its sum. On the CPU long
   messages go in 2 or 4 parts, each to all peers at once: a part is added while the next one is on
   its way. A layout is cut at all borders that parts may have; how many parts there are is chosen
   when the ranks know the sizes of all messages.

Reduce-scatter: as `direct`. Each peer gets only the records of the shard that it owns.

In capacity mode (`scheme.capacity`) messages have slots of fixed size. Sizes need no agreement
then; the fingerprint is in the tag of the messages, and step and dtype in the records' headers.

Rank r sends (n - 1) |message_r| bytes, in a reduce-scatter |message_r| - |shard_r of it|.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import batched, chain, pairwise

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts, Layout
from megatron_sparse.collectives.base import (
    SMALL_BYTES,
    Exchange,
    Identity,
    Phase,
    Round,
    Steps,
    Subgroup,
    exchange_sizes,
)
from megatron_sparse.collectives.direct import reduce_shards, split_cost
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    CUTS,
    Cut,
    check_announced,
    group_of,
    reads_reports,
    whole_cut,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun

NAME = "agsparse"
MOST_PARTS = 4
PART_NUMEL = 1 << 20
"""Elements of a part, at least."""
PART_BYTES = 1 << 18
"""Bytes of a part of the longest message, at least: a round takes milliseconds beside its bytes."""
ALIGNMENT = 4096
"""Elements, of borders: a tile of the sparse formats, and whole pages of memory."""


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
        by_owners, communicator = exchange.scatters, transport.communicator
        return (yield from sum_in_one_call(NAME, sums, communicator, by_owners=by_owners))
    if exchange.scatters:
        return (yield from reduce_shards(NAME, exchange, message, sums))
    identity = Identity.of_message(NAME, exchange, message)
    group = group_of(identity, message, transport)
    n, rank = group.world_size, group.rank
    borders = part_borders(exchange.bucket)
    parts = parts_at(message.layout, borders)
    sizes = [[sum(message.segment_bytes[part.segments]) for part in parts]] * n
    if message.slots is None:
        small = message.nbytes <= SMALL_BYTES
        sizes = yield from exchange_sizes(sizes[rank], identity, transport, unordered=small)
        for number, part in enumerate(parts):
            check_announced([row[number] for row in sizes], [part] * n, message.value_dtype)
    # Parts travel together where they would be too short alone.
    in_one = len(parts) // parts_for(len(parts), max(map(sum, sizes)))
    joined = parts_at(message.layout, borders[in_one - 1 :: in_one])
    joined_sizes = [[*map(sum, batched(row, in_one))] for row in sizes]
    yield from _exchange_parts(joined, joined_sizes, sums, group)
    sums.write(slice(0, exchange.bucket.numel))
    return group.sent_bytes


def _exchange_parts(
    parts: Sequence[Cut], sizes: Sequence[Sequence[int]], sums: SparseSum, group: Subgroup
) -> Phase:
    """Sends this rank's parts to all, and adds each part when those of all ranks have come.

    Args:
        parts: of all messages.
        sizes: for each rank, the bytes of its message's parts.
        sums: becomes the sum.
        group: the ranks.
    """
    n, rank, message = group.world_size, group.rank, sums.message
    own = message.buffer[: message.nbytes].split(sizes[rank])
    # For each part, by rank; own records stay in the message.
    sizes_in = [[*of_part] for of_part in zip(*sizes, strict=True)]
    for of_part in sizes_in:
        of_part[rank] = 0
    room = sums.take("received", sum(map(sum, sizes_in))).split([*chain(*sizes_in)])
    received = [list(of_part) for of_part in batched(room, n)]
    for records, mine in zip(received, own, strict=True):
        records[rank] = mine
    if len(parts) == 1:
        yield from pairwise_all_to_all(own * n, received[0], group, last=True)
        sums.add_messages(received[0], parts[0], range(n))
        return
    peers = [(rank + step) % n for step in range(1, n)]
    rounds: list[Round] = []
    for records, mine in zip(received, own, strict=True):
        rounds.append(([(peer, mine) for peer in peers], [(peer, records[peer]) for peer in peers]))

    def add_last(arrived: int) -> None:
        if arrived > 0:
            sums.add_messages(received[arrived - 1], parts[arrived - 1], range(n))

    yield from group.in_rounds(rounds, add_last, last=True)


def part_borders(bucket: Bucket) -> Cuts:
    """Where parts of a bucket's messages may begin: a power of two of them, at most n.

    On CUDA there is one: all messages come in one call, and are added in one. So it is in a
    reduce-scatter, where a rank's shard is a small part already.
    """
    if bucket.grad_N.is_cuda or bucket.op is CollectiveOp.REDUCE_SCATTER:
        return ()
    parts = most_parts(bucket.numel, bucket.world_size)
    return tuple(bucket.numel * k // parts // ALIGNMENT * ALIGNMENT for k in range(1, parts))


def most_parts(numel: int, ranks: int) -> int:
    """How many parts a bucket's messages may have on a CPU."""
    return _power_of_two(min(MOST_PARTS, ranks, numel // PART_NUMEL))


@lru_cache(CUTS)
def parts_at(layout: Layout, borders: Cuts) -> tuple[Cut, ...]:
    """The parts that begin at the borders; all of it, if no segments begin there.

    Example:
        >>> import torch
        >>> from megatron_sparse.bucket import ParameterSlice
        >>> p = [ParameterSlice("w", 0, 8)]
        >>> b = Bucket("0", torch.zeros(8), p, CollectiveOp.ALL_REDUCE, 2)
        >>> [part.elements for part in parts_at(b.layout(False, (4,)), (4,))]
        [slice(0, 4, None), slice(4, 8, None)]
    """
    if not borders or not set(borders) <= set(layout.segment_offsets.tolist()):
        return (whole_cut(layout),)
    ends = (0, *borders, int(layout.segment_offsets[-1]))
    return tuple(Cut(layout, elements=slice(*each)) for each in pairwise(ends))


def parts_for(most: int, longest: int) -> int:
    """How many of `most` parts, a power of two, the ranks send if the longest message is so long.

    Example:
        >>> parts_for(4, 600_000)
        2
    """
    return min(most, _power_of_two(longest // PART_BYTES))


def _power_of_two(most: int) -> int:
    """The largest one that is not above a number; at least 1."""
    return 1 << (max(most, 1).bit_length() - 1)


def cost(run: DryRun) -> None:
    """The predicted time: runs the same rounds on the modelled clocks of `run`.

    With messages of m bytes: (n - 1) (alpha + m beta) (SparCML, section 5). Added: the agreement,
    and the additions. Each message is priced as an addition of its own, which is too much for those
    that find the sum in a cache. In parts, the additions of one are hidden behind the exchange of
    the next. A reduce-scatter is `split_cost`.
    """
    record_format = run.messages(SCHEME.message_format(run.options))
    if run.scatter:
        split_cost(run, record_format)
        return
    if not run.has_slots:
        run.agree()
    density = float(run.densities.whole(1))
    nbytes = float(record_format.nbytes(run.piece(), run.message_density()[0], run.b))
    parts = 1
    if run.cluster.device == "cpu":
        parts = parts_for(most_parts(run.shape.numel, run.n), int(nbytes))
    part = run.piece(parts)
    first_s = record_format.seconds(CodecOp.DECODE, part, density, run.b)
    addition_s = record_format.seconds(CodecOp.DECODE_ADD, part, density, run.b)
    adding_s = float(first_s + (run.n - 1) * addition_s)
    if parts == 1:
        run.shifts([(step, nbytes, 0.0) for step in range(1, run.n)])
    else:
        nbytes = float(record_format.nbytes(part, run.message_density()[0], run.b))
        for number in range(parts):
            run.clocks.everybody_at_once(nbytes, run.host_s, adding_s if number else 0.0)
    run.work(adding_s)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=agsparse,
    place=70,
    extra_cuts=part_borders,
    cost=cost,
    takes_slots=True,
    has_engine=True,
)
