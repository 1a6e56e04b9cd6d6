"""Straggler-aware sparse reduction: StragglAR's schedule on records, with `direct` before it.

No paper describes this scheme. All ranks know the straggler (`Exchange.straggler`). Messages are
cut at the borders of the n shards and of the n - 1 chunks. The cuts do not depend on the straggler,
so messages can be encoded before it is known.

Phase 1, without the straggler, `direct` among the n - 1 early ranks: they agree on sizes, and each
sends early rank i the records of chunk i (n - 2 rounds), which adds them in rank order and encodes
the sum once. The sums are all-gathered (n - 2 rounds), so that every early rank has the early sum.
Handshake, 1 round (`straggler_shares`): the straggler and each early rank exchange their identities
and the sizes of the records that follow.
Phase 2, the R rounds of `make_schedule`: the straggler gives early rank r chunk r of its message
and gets the sum of chunk r, and the others pass on chunks of its message. Each rank adds those to
the early sum.

The sum is early ranks' messages in rank order, then the straggler's: with the last rank late, the
bits of `direct`. The early sum travels as partial sums do (`records`), rounded once in the end.

Let m be the straggler's message, D the records of the early sum, D' those of the whole sum, and let
chunks be equal. After the straggler's arrival the busiest port carries at most
D + (R - n + 1) m / (n - 1) bytes in R + 1 rounds, R - n + 1 being log2 n - 1 for powers of two. No
scheme needs less than D, because the straggler's own port must carry it.
The alternative is to add the straggler's message to the sums at their owners, and to all-gather
only then. It would take m + (n - 2) / (n - 1) D' in 2 n - 2 rounds: more bytes, because D' is at
least D and m. Without delay it would be better by one D, but then `direct` is better than both.

An early rank sends in phase 1 (n - 2) / (n - 1) m bytes and (n - 2) D / (n - 1). With no straggler
known the scheme is `direct`. All-reduce only (`straggler_shares`).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import cast

import torch

from megatron_sparse.bucket import Bucket, Cuts
from megatron_sparse.collectives.base import (
    UNORDERED,
    Exchange,
    Identity,
    Phase,
    Round,
    Steps,
    Subgroup,
    Yielded,
    aligned_cuts,
    exchange_sizes,
    whole_group,
)
from megatron_sparse.collectives.direct import direct, split
from megatron_sparse.collectives.gather import pairwise_all_gather
from megatron_sparse.collectives.records import check_announced, cuts_at, message_parts
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.collectives.straggler_shares import (
    HANDSHAKE_TAG,
    meetings_of,
    shake_hands,
    straggler_of,
)
from megatron_sparse.formats.message import Message
from megatron_sparse.straggler.schedule import early_ranks
from megatron_sparse.transport import Transport
from megatron_sparse.transport.base import SubsetTransport

NAME = "straggler_direct"


def straggler_cuts(bucket: Bucket) -> Cuts:
    """The chunks' borders, at which messages are cut in addition to the shards' borders.

    They begin with 0 and end with the bucket's end; chunks of short buckets may be empty.
    """
    chunks = bucket.world_size - 1
    return tuple(aligned_cuts(bucket.numel, chunks)) if chunks else ()


def straggler_direct(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`. The message is cut into shards and at `straggler_cuts`.

    Raises:
        ConfigError: the straggler is no rank of the group.
    """
    late, rank = straggler_of(exchange), exchange.transport.rank
    if late is None:
        return (yield from direct(exchange, message))
    run = _Run(exchange, message, late)
    return (yield from run.as_straggler() if rank == late else run.as_early())


class _Run:
    """The collective on one rank, with the arguments of `straggler_direct` and the straggler."""

    def __init__(self, exchange: Exchange, message: Message, late: int) -> None:
        self.exchange, self.message, self.late = exchange, message, late
        self.transport = exchange.transport
        n = self.transport.world_size
        self.early_ranks = early_ranks(n, late)
        # The chunk of each early rank.
        self.chunks = cuts_at(message.layout, straggler_cuts(exchange.bucket))
        self.identity = Identity.of_message(f"{NAME} (rank {late})", exchange, message)
        self.group = whole_group(self.transport, self.identity.tag)
        self.meetings = meetings_of(n, late)[self.transport.rank]

    def as_early(self) -> Generator[Yielded, None, int]:
        """Runs all phases on an early rank; returns the bytes that it sent."""
        subset = SubsetTransport(self.transport, self.early_ranks, HANDSHAKE_TAG)
        # The cast is safe: sparse schemes use only methods that a subset transport has.
        exchange = replace(self.exchange, transport=cast("Transport", subset))
        early = Subgroup(self.transport, self.early_ranks, self.group.tag)
        sums = SparseSum(exchange, self.message)
        sums.gather_dtype = sums.partial_dtype  # the gathered early sums are not complete
        yield from split(self.identity, self.chunks, sums, early, last=False)
        # Not `encode_own_shard`: its buffer has the capacity of all chunks, too much here, where
        # every bucket has buffers of its own (`Exchange.take`).
        chunk, dtype = self.chunks[early.rank], sums.gather_dtype
        own = sums.encode(chunk, dtype, sums.take("given", chunk.capacity(dtype)))
        table = yield from exchange_sizes([own.numel()], self.identity, subset)
        early_sizes = [size for (size,) in table]
        check_announced(early_sizes, self.chunks, dtype, self.early_ranks)
        room = sums.take("gathered", sum(early_sizes) - own.numel())
        write_sum = sums.sum_writer(self.chunks)
        yield from pairwise_all_gather(own, room, early_sizes, early, write_sum, last=False)
        # Now `sums` has the early sum of every chunk.
        (late_sizes,) = yield from self._shake_hands([own.numel()])
        senders = [self.late] * len(self.chunks)
        check_announced(late_sizes, self.chunks, self.message.value_dtype, senders)
        late_records = sums.take("late", sum(late_sizes)).split(late_sizes)  # by chunk

        def records_for(peer: int, number: int) -> torch.Tensor:
            """This rank's early sum for the straggler, the straggler's records for early ranks."""
            return own if peer == self.late else late_records[number]

        def add(number: int) -> None:
            """Adds a chunk of the straggler's message that has arrived."""
            sums.add_message(late_records[number], self.chunks[number], self.late)

        yield from self._meet(records_for, late_records, add)
        sums.write(slice(None))
        return early.sent_bytes + self.group.sent_bytes

    def as_straggler(self) -> Generator[Yielded, None, int]:
        """Runs the handshake and phase 2 on the straggler; returns the bytes that it sent."""
        sums = SparseSum(self.exchange, self.message)
        own = message_parts(self.message, self.chunks)
        rows = yield from self._shake_hands([records.numel() for records in own])
        sizes = [size for (size,) in rows]  # of each early rank's sum
        check_announced(sizes, self.chunks, sums.partial_dtype, self.early_ranks)
        received = sums.take("given", sum(sizes)).split(sizes)

        def add(number: int) -> None:
            """Decodes the early sum of a chunk that has arrived, then adds this rank's message."""
            chunk, rank = self.chunks[number], self.early_ranks[number]
            sums.add_sum(received[number], chunk, sums.partial_dtype, rank, fresh=True)
            sums.add_message(own[number], chunk, self.late)

        yield from self._meet(lambda peer, number: own[number], received, add)
        sums.write(slice(None))
        return self.group.sent_bytes

    def _shake_hands(self, sizes: list[int]) -> Generator[Yielded, None, list[list[int]]]:
        """The handshake between the straggler and each early rank: exchanges identities and sizes.

        Returns the sizes of each peer, by peer: the straggler, or on it the early ranks.
        """
        work, read_rows = shake_hands(self.identity, sizes, self.late, self.transport)
        if self.transport.rank != self.late and self.transport.device.type == "cpu":
            # The next bucket's phase 1 need not wait for the straggler of this bucket.
            yield UNORDERED
        yield work
        return read_rows()

    def _meet(
        self,
        part_for: Callable[[int, int], torch.Tensor],
        received: Sequence[torch.Tensor],
        arrived: Callable[[int], None],
    ) -> Phase:
        """Phase 2: runs this rank's meetings; adds one round's records while the next is in flight.

        `part_for` takes a peer and a chunk's number, and returns the records to send to that peer.
        `received`: room for each chunk's records. `arrived` is called with each chunk's number.
        """
        rounds: list[Round] = []
        for peer, sent_chunk, received_chunk in self.meetings:
            sends = [] if sent_chunk is None else [(peer, part_for(peer, sent_chunk))]
            receives = [] if received_chunk is None else [(peer, received[received_chunk])]
            rounds.append((sends, receives))

        def hand_over(number: int) -> None:
            """Hands over the chunk that arrived in meeting `number` - 1; for 0 there is none."""
            chunk = self.meetings[number - 1].receives if number else None
            if chunk is not None:
                arrived(chunk)

        yield from self.group.in_rounds(rounds, hand_over, last=True)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=straggler_direct,
    place=190,
    ops=ALL_REDUCE_ONLY,
    needs_shards=True,
    extra_cuts=straggler_cuts,
    skips_straggler=True,
)
