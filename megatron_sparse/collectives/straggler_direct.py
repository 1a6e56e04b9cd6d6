"""Straggler-aware sparse reduction: StragglAR's schedule on records, with `direct` before it.

No paper describes this scheme. All ranks know the straggler (`Exchange.straggler`). Messages are
cut at the borders of the n shards and of the n - 1 chunks (reduce-scatter: of the n - 1 pieces of
every shard). The cuts do not depend on the straggler, so messages can be encoded before it is
known.

Phase 1, without the straggler, `direct` among the n - 1 early ranks: they agree on sizes, and each
sends early rank i the records of chunk i (n - 2 rounds), which adds them in rank order and encodes
the sum once. All-reduce: the sums are all-gathered (n - 2 rounds), so that every early rank has the
early sum. Reduce-scatter: early rank i adds up its own shard, and piece i of the straggler's.
Handshake, 1 round (`straggler_shares`): the straggler and each early rank exchange their identities
and the sizes of the records that follow.
Phase 2, at most the R rounds of `make_schedule`: the straggler gives early rank r part r of its
message and gets the sum of chunk r, and the others pass on parts of its message. Each rank adds
those to the early sum. The number of parts depends on the sizes (`parts_of`): the larger the sums,
the fewer the parts, and the sooner the other ranks have all of them.
Reduce-scatter, n - 1 rounds: the straggler gives each early rank the records of its shard and gets
the sum of a piece of its own.

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
A reduce-scatter's busiest port carries (n - 1) / n m after the arrival, which the straggler has to
send anyway.

An early rank sends in phase 1 (n - 2) / (n - 1) m bytes and (n - 2) D / (n - 1) (reduce-scatter:
only about the former). With no straggler known the scheme is `direct`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import batched, chain, pairwise, zip_longest

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts
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
from megatron_sparse.collectives.gather import in_rank_order, pairwise_all_gather, pairwise_rounds
from megatron_sparse.collectives.records import Cut, check_announced, message_part
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.collectives.straggler_shares import (
    chunk_cuts,
    copies_of,
    early_transport,
    meetings_of,
    shake_hands,
    shares_of,
    straggler_of,
)
from megatron_sparse.formats.message import Message

NAME = "straggler_direct"


def straggler_cuts(bucket: Bucket) -> Cuts:
    """Where messages of a bucket are cut beside the shards' borders, for any straggler."""
    pieces = bucket.world_size - 1
    if pieces == 0:
        return ()
    parts = [slice(0, bucket.numel)]
    if bucket.op is CollectiveOp.REDUCE_SCATTER:
        parts = [bucket.shard(rank) for rank in range(bucket.world_size)]
    return tuple(sorted({cut for part in parts for cut in chunk_cuts(part, pieces)}))


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
    bucket, sums = exchange.bucket, SparseSum(exchange, message)
    run = _Run(exchange, message, late, sums)
    sent_bytes = yield from run.as_straggler() if rank == late else run.as_early()
    sums.write(bucket.shard(rank) if exchange.scatters else slice(0, bucket.numel))
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
    numbers = [1 << power for power in range((chunks - 1).bit_length())] + [chunks]
    best, least = [0, chunks], math.inf
    for borders in (even_cuts(chunks, number) for number in numbers):
        parts = [sum(message_sizes[a:b]) for a, b in pairwise(borders)]
        parts += [0] * (chunks - len(parts))
        # In each round the straggler swaps a part for a sum, and other ranks pass on parts.
        swaps = zip(parts, early_sizes, strict=True)
        cost = 0
        for swapped, passed_on in zip_longest(swaps, copies, fillvalue=()):
            cost += max([*swapped, *(parts[part] for part in passed_on)], default=0)
        if cost < least:
            best, least = borders, cost
    return best


class _Run:
    """The collective on one rank; the arguments are those of the collective."""

    def __init__(self, exchange: Exchange, message: Message, late: int, sums: SparseSum) -> None:
        bucket, transport = exchange.bucket, exchange.transport
        self.bucket, self.message, self.late = bucket, message, late
        self.transport, self.sums = transport, sums
        self.shares = shares_of(bucket, late)
        layout = message.layout
        self.takes = [Cut(layout, elements=share.takes) for share in self.shares]
        self.gives = [Cut(layout, elements=share.gives) for share in self.shares]
        self.identity = Identity.of_message(f"{NAME} (rank {late})", exchange, message)
        self.group = whole_group(transport, self.identity.tag)
        n = transport.world_size
        self.meetings = meetings_of(bucket.op, n, late)[transport.rank]
        self.early_sizes: list[int] = []

    def as_early(self) -> Generator[Yielded, None, int]:
        """Returns the bytes that this rank has sent."""
        sums, gives = self.sums, self.gives
        early = Subgroup(self.transport, [share.rank for share in self.shares], self.group.tag)
        yield from self._reduce_early(early)
        capacity = gives[early.rank].capacity(sums.partial_dtype)
        own = sums.encode(gives[early.rank], sums.partial_dtype, sums.take("given", capacity))
        if self.bucket.op is CollectiveOp.ALL_REDUCE:
            yield from self._gather_early(own, early)
        (late_sizes,) = yield from self._shake_hands([own.numel()])
        late = [self.late] * len(self.takes)
        check_announced(late_sizes, self.takes, self.message.value_dtype, late)
        takes, part_sizes = self._message_parts(late_sizes)
        parts = sums.take("late", sum(part_sizes)).split(part_sizes)

        def records_for(peer: int, share: int) -> torch.Tensor:
            return own if peer == self.late else parts[share]

        def add(share: int) -> None:
            if share < len(takes):  # the other parts are empty
                sums.add_message(parts[share], takes[share], self.late)

        yield from self._meet(records_for, parts, add)
        return early.sent_bytes + self.group.sent_bytes

    def as_straggler(self) -> Generator[Yielded, None, int]:
        """Returns the bytes that this rank has sent."""
        sums, message = self.sums, self.message
        own_sizes = [message_part(message, cut).numel() for cut in self.takes]
        rows = yield from self._shake_hands(own_sizes)
        sizes = [size for (size,) in rows]
        check_announced(sizes, self.gives, sums.partial_dtype, [s.rank for s in self.shares])
        self.early_sizes = sizes
        takes, _ = self._message_parts(own_sizes)
        sent = [message_part(message, cut) for cut in takes]
        sent += [message.buffer[:0]] * (len(self.shares) - len(takes))
        parts = sums.take("given", sum(sizes)).split(sizes)

        def add(share: int) -> None:
            cut, rank = self.gives[share], self.shares[share].rank
            sums.add_sum(parts[share], cut, sums.partial_dtype, rank, fresh=True)
            sums.add_message(message_part(message, cut), cut, self.late)

        yield from self._meet(lambda peer, share: sent[share], parts, add)
        return self.group.sent_bytes

    def _reduce_early(self, early: Subgroup) -> Phase:
        """Phase 1's first half: the early ranks' sum of this rank's share."""
        message, sums = self.message, self.sums
        cuts = [
            [Cut(message.layout, elements=part) for part in share.reduces] for share in self.shares
        ]
        sent = [[message_part(message, cut) for cut in of_share] for of_share in cuts]
        table = yield from exchange_sizes(
            [records.numel() for records in chain(*sent)],
            self.identity,
            early_transport(self.transport, self.late),
            early.ranks,
        )
        own = cuts[early.rank]
        # A row has the sender's sizes for every share; this rank receives those of its own.
        first = early.rank * len(own)
        sizes = [row[first : first + len(own)] for row in table]
        for of_sender, rank in zip(sizes, early.ranks, strict=True):
            check_announced(of_sender, own, message.value_dtype, [rank] * len(own))
        all_sizes = [*chain(*sizes)]
        room = sums.take("received", sum(all_sizes)).split(all_sizes)
        received = list(batched(room, len(own)))

        def add(sender: int) -> None:
            came = sent[sender] if sender == early.rank else received[sender]
            for records, cut in zip(came, own, strict=True):
                sums.add_message(records, cut, early.ranks[sender], fresh=sender == 0)

        yield from early.in_rounds(
            pairwise_rounds(sent, received, early), in_rank_order(early, add), independent=True
        )

    def _gather_early(self, own: torch.Tensor, early: Subgroup) -> Phase:
        """Phase 1's second half: the early ranks' sum of everything."""
        sums, gives = self.sums, self.gives
        table = yield from exchange_sizes(
            [own.numel()], self.identity, early_transport(self.transport, self.late), early.ranks
        )
        sizes = [size for (size,) in table]
        check_announced(sizes, gives, sums.partial_dtype, early.ranks)
        self.early_sizes = sizes

        def place(sender: int, records: torch.Tensor) -> None:
            rank = early.ranks[sender]
            sums.add_sum(records, gives[sender], sums.partial_dtype, rank, fresh=True)

        room = sums.take("gathered", sum(sizes) - own.numel())
        yield from pairwise_all_gather(own, room, sizes, early, place, last=False)

    def _message_parts(self, sizes: list[int]) -> tuple[list[Cut], list[int]]:
        """The straggler's message as it is sent: the cuts of its parts, and one size a share.

        If there are fewer parts than shares, the other shares have size 0.
        """
        if self.bucket.op is CollectiveOp.REDUCE_SCATTER:
            return self.takes, sizes
        borders = parts_of(sizes, self.early_sizes, copies_of(self.transport.world_size, self.late))
        cuts = [
            Cut(
                self.message.layout,
                elements=slice(self.shares[a].takes.start, self.shares[b - 1].takes.stop),
            )
            for a, b in pairwise(borders)
        ]
        joined = [sum(sizes[a:b]) for a, b in pairwise(borders)]
        return cuts, joined + [0] * (len(sizes) - len(cuts))

    def _shake_hands(self, sizes: list[int]) -> Generator[Yielded, None, list[list[int]]]:
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
            part_for: takes a peer and a share; returns the records for that peer.
            received: room for each share.
            arrived: called with each share that has arrived.
        """
        rounds: list[Round] = []
        for peer, gives, takes in self.meetings:
            sends = [] if gives is None else [(peer, part_for(peer, gives))]
            rounds.append((sends, [] if takes is None else [(peer, received[takes])]))

        def before(number: int) -> None:
            takes = self.meetings[number - 1].receives if number else None
            if takes is not None:
                arrived(takes)

        yield from self.group.in_rounds(rounds, before, last=True)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=straggler_direct,
    place=190,
    needs_shards=True,
    extra_cuts=straggler_cuts,
    skips_straggler=True,
)
