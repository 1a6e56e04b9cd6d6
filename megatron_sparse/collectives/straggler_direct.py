"""Straggler-aware sparse reduction: StragglAR's schedule on records, with `direct` before it.

No paper describes this scheme. All ranks know the straggler (`Exchange.straggler`). Messages are
cut at the borders of the n shards and of the n - 1 chunks. The cuts do not depend on the straggler,
so messages can be encoded before it is known.

Phase 1, without the straggler, `direct` among the n - 1 early ranks: they agree on sizes, and each
sends early rank i the records of chunk i (n - 2 rounds), which adds them in rank order and encodes
the sum once. The sums are all-gathered (n - 2 rounds), so that every early rank has the early sum.
Handshake, 1 round (`straggler_shares`): the straggler and each early rank exchange their identities
and the sizes of the records that follow.
Phase 2, at most the R rounds of `make_schedule`: the straggler gives early rank r part r of its
message and gets the sum of chunk r, and the others pass on parts of its message. Each rank adds
those to the early sum. The number of parts depends on the sizes (`parts_of`): the larger the sums,
the fewer the parts, and the sooner the other ranks have all of them.

The sum is early ranks' messages in rank order, then the straggler's: with the last rank late, the
bits of `direct`. The early sum travels as partial sums do (`records`), rounded once in the end.

Let m be the straggler's message, D the records of the early sum, D' those of the whole sum, and let
chunks be equal. If D is several times m, the busiest port carries D bytes in n rounds after the
straggler's arrival. The message is then everywhere before the last sums have come, and no scheme
needs less, because the straggler's own port must carry D. If D is m, the busiest port carries
m + (R - n + 1) m / (n - 1) in R + 1 rounds, R - n + 1 being log2 n - 1 for powers of two.
The alternative is to add the straggler's message to the sums at their owners, and to all-gather
only then. It would take m + (n - 2) / (n - 1) D' in 2 n - 2 rounds: more bytes, because D' is at
least D and m. Without delay it would be better by one D, but then `direct` is better than both.

An early rank sends in phase 1 (n - 2) / (n - 1) m bytes and (n - 2) D / (n - 1). With no straggler
known the scheme is `direct`. All-reduce only (`straggler_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise, zip_longest

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
    even_cuts,
    exchange_sizes,
    whole_group,
)
from megatron_sparse.collectives.direct import direct
from megatron_sparse.collectives.gather import pairwise_all_gather, pairwise_all_to_all
from megatron_sparse.collectives.records import Cut, check_announced, message_part
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.collectives.straggler_shares import (
    HANDSHAKE_TAG,
    chunk_cuts,
    chunks_of,
    copies_of,
    meetings_of,
    shake_hands,
    straggler_of,
)
from megatron_sparse.formats.message import Message
from megatron_sparse.straggler.schedule import early_ranks
from megatron_sparse.transport.base import SubsetTransport

NAME = "straggler_direct"


def straggler_cuts(bucket: Bucket) -> Cuts:
    """Where messages of a bucket are cut beside the shards' borders, for any straggler."""
    chunks = bucket.world_size - 1
    return tuple(sorted({*chunk_cuts(bucket.numel, chunks)})) if chunks else ()


def straggler_direct(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`. The message is cut into shards and at `straggler_cuts`,
    in both forms.

    Raises:
        ConfigError: the straggler is no rank of the group.
    """
    late, rank = straggler_of(exchange), exchange.transport.rank
    if late is None:
        return (yield from direct(exchange, message))
    sums = SparseSum(exchange, message)
    run = _Run(exchange, message, late, sums)
    sent_bytes = yield from run.as_straggler() if rank == late else run.as_early()
    sums.write(slice(0, exchange.bucket.numel))
    return sent_bytes


def parts_of(
    message_sizes: Sequence[int], early_sizes: Sequence[int], copies: Sequence[Sequence[int]]
) -> list[int]:
    """Where the straggler's message is divided into parts: the cheapest choice of the candidates.

    Candidates are 1, 2, 4, ... parts, or one for each chunk. The cost is the sum over all rounds of
    the longest message in each. Of candidates with equal cost the one with the fewest parts wins.

    Args:
        message_sizes: bytes of the straggler's message in each chunk.
        early_sizes: bytes of the early ranks' sum of each chunk.
        copies: for each round, the parts that other ranks pass on (`copies_of`).

    Returns:
        Borders among the chunks, from 0 to their number.

    Example:
        >>> copies = [(), (0,), (0, 1), (1, 2)]
        >>> parts_of([4, 4, 4], [4, 4, 4], copies), parts_of([4, 4, 4], [12, 12, 12], copies)
        ([0, 1, 2, 3], [0, 3])
    """
    chunks = len(message_sizes)
    part_counts = [1 << power for power in range((chunks - 1).bit_length())] + [chunks]
    best, least = [0, chunks], math.inf
    for borders in (even_cuts(chunks, count) for count in part_counts):
        parts = [sum(message_sizes[first:end]) for first, end in pairwise(borders)]
        parts += [0] * (chunks - len(parts))
        # In each round the straggler swaps a part for a sum, and other ranks pass on parts.
        swaps = zip(parts, early_sizes, strict=True)
        cost = 0
        for swapped, passed_on in zip_longest(swaps, copies, fillvalue=()):
            passed_sizes = [parts[part] for part in passed_on]
            cost += max([*swapped, *passed_sizes], default=0)
        if cost < least:
            best, least = borders, cost
    return best


class _Run:
    """The collective on one rank; the arguments are those of the collective."""

    def __init__(self, exchange: Exchange, message: Message, late: int, sums: SparseSum) -> None:
        self.message, self.late, self.sums = message, late, sums
        self.transport = exchange.transport
        n = self.transport.world_size
        self.early_ranks = early_ranks(n, late)
        chunks = chunks_of(exchange.bucket.numel, n)
        self.chunks = [Cut(message.layout, elements=chunk) for chunk in chunks]
        self.identity = Identity.of_message(f"{NAME} (rank {late})", exchange, message)
        self.group = whole_group(self.transport, self.identity.tag)
        self.meetings = meetings_of(n, late)[self.transport.rank]

    def as_early(self) -> Generator[Yielded, None, int]:
        """An early rank's part: phase 1, the handshake, its meetings; returns the bytes it sent."""
        sums, dtype = self.sums, self.sums.partial_dtype
        early = Subgroup(self.transport, self.early_ranks, self.group.tag)
        yield from self._reduce_early(early)
        own_chunk = self.chunks[early.rank]
        own = sums.encode(own_chunk, dtype, sums.take("given", own_chunk.capacity(dtype)))
        early_sizes = yield from self._gather_early(own, early)
        (late_sizes,) = yield from self._shake_hands([own.numel()])
        senders = [self.late] * len(self.chunks)
        check_announced(late_sizes, self.chunks, self.message.value_dtype, senders)
        cuts, part_sizes = self._message_parts(late_sizes, early_sizes)
        parts = sums.take("late", sum(part_sizes)).split(part_sizes)

        def records_for(peer: int, chunk: int) -> torch.Tensor:
            """For the straggler the early sum of this rank's chunk, for others a message's part."""
            return own if peer == self.late else parts[chunk]

        def add(chunk: int) -> None:
            """Adds a part of the straggler's message that has arrived."""
            if chunk < len(cuts):  # the other parts are empty
                sums.add_message(parts[chunk], cuts[chunk], self.late)

        yield from self._meet(records_for, parts, add)
        return early.sent_bytes + self.group.sent_bytes

    def as_straggler(self) -> Generator[Yielded, None, int]:
        """The straggler's part: the handshake and its meetings; returns the bytes it sent."""
        sums, message, dtype = self.sums, self.message, self.sums.partial_dtype
        own_sizes = [message_part(message, chunk).numel() for chunk in self.chunks]
        rows = yield from self._shake_hands(own_sizes)
        sizes = [size for (size,) in rows]
        check_announced(sizes, self.chunks, dtype, self.early_ranks)
        cuts, _ = self._message_parts(own_sizes, sizes)
        sent = [message_part(message, cut) for cut in cuts]
        sent += [message.buffer[:0]] * (len(self.chunks) - len(cuts))
        received = sums.take("given", sum(sizes)).split(sizes)

        def add(number: int) -> None:
            """Takes the early sum of a chunk that has arrived, and adds this rank's own part."""
            chunk, rank = self.chunks[number], self.early_ranks[number]
            sums.add_sum(received[number], chunk, dtype, rank, fresh=True)
            sums.add_message(message_part(message, chunk), chunk, self.late)

        yield from self._meet(lambda peer, number: sent[number], received, add)
        return self.group.sent_bytes

    def _reduce_early(self, early: Subgroup) -> Phase:
        """Phase 1's first half: the early ranks' sum of this rank's chunk."""
        message, sums, own = self.message, self.sums, self.chunks[early.rank]
        sent = [message_part(message, chunk) for chunk in self.chunks]
        table = yield from self._exchange_early_sizes([records.numel() for records in sent])
        # A row has the sender's sizes for every chunk; this rank receives those of its own.
        sizes = [row[early.rank] for row in table]
        check_announced(sizes, [own] * len(sizes), message.value_dtype, self.early_ranks)
        received = [*sums.take("received", sum(sizes)).split(sizes)]
        received[early.rank] = sent[early.rank]

        def add(sender: int) -> None:
            """Adds the records of early rank number `sender`; the first ones begin the sum."""
            rank = self.early_ranks[sender]
            sums.add_message(received[sender], own, rank, fresh=sender == 0)

        yield from pairwise_all_to_all(sent, received, early, last=False, add=add)

    def _gather_early(
        self, own: torch.Tensor, early: Subgroup
    ) -> Generator[Yielded, None, list[int]]:
        """Phase 1's second half: the early ranks' sum of everything.

        Returns:
            The bytes of that sum in each chunk.
        """
        sums, dtype = self.sums, self.sums.partial_dtype
        table = yield from self._exchange_early_sizes([own.numel()])
        sizes = [size for (size,) in table]
        check_announced(sizes, self.chunks, dtype, self.early_ranks)

        def place(sender: int, records: torch.Tensor) -> None:
            """Decodes the sum of a chunk, which early rank number `sender` has made."""
            rank = self.early_ranks[sender]
            sums.add_sum(records, self.chunks[sender], dtype, rank, fresh=True)

        room = sums.take("gathered", sum(sizes) - own.numel())
        yield from pairwise_all_gather(own, room, sizes, early, place, last=False)
        return sizes

    def _exchange_early_sizes(self, sizes: list[int]) -> Generator[Yielded, None, list[list[int]]]:
        """Sends every early rank these sizes; returns the sizes of each early rank."""
        early = SubsetTransport(self.transport, self.early_ranks, HANDSHAKE_TAG)
        return (yield from exchange_sizes(sizes, self.identity, early))

    def _message_parts(
        self, sizes: list[int], early_sizes: list[int]
    ) -> tuple[list[Cut], list[int]]:
        """The straggler's message as it is sent: the cuts of its parts, and one size a chunk.

        If there are fewer parts than chunks, the other chunks have size 0.

        Args:
            sizes: bytes of the message in each chunk.
            early_sizes: bytes of the early ranks' sum in each.
        """
        borders = parts_of(sizes, early_sizes, copies_of(self.transport.world_size, self.late))
        cuts = []
        for first, end in pairwise(borders):
            chunks = self.chunks[first:end]
            elements = slice(chunks[0].elements.start, chunks[-1].elements.stop)
            cuts.append(Cut(self.message.layout, elements=elements))
        joined = [sum(sizes[first:end]) for first, end in pairwise(borders)]
        return cuts, joined + [0] * (len(sizes) - len(cuts))

    def _shake_hands(self, sizes: list[int]) -> Generator[Yielded, None, list[list[int]]]:
        """Sends these sizes to this rank's peers; returns for each peer the sizes that it sent."""
        work, read = shake_hands(self.identity, sizes, self.late, self.transport)
        if self.transport.rank != self.late and self.transport.device.type == "cpu":
            # The next bucket's early part need not wait for the straggler of this one.
            yield UNORDERED
        yield work
        return read()

    def _meet(
        self,
        part_for: Callable[[int, int], torch.Tensor],
        received: Sequence[torch.Tensor],
        arrived: Callable[[int], None],
    ) -> Phase:
        """Phase 2; the records of one round are added while the next round is on its way.

        Args:
            part_for: takes a peer and a chunk; returns the records for that peer.
            received: room for each chunk.
            arrived: called with each chunk that has arrived.
        """
        rounds: list[Round] = []
        for peer, gives, takes in self.meetings:
            sends = [] if gives is None else [(peer, part_for(peer, gives))]
            rounds.append((sends, [] if takes is None else [(peer, received[takes])]))

        def before(number: int) -> None:
            """Hands over the chunk of the round before `number`, which may be on its way.

            After the last round, `number` is the number of rounds.
            """
            takes = self.meetings[number - 1].receives if number else None
            if takes is not None:
                arrived(takes)

        # `last`: this rank posts nothing after these rounds.
        yield from self.group.in_rounds(rounds, before, last=True)


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
