"""Shared parts of the straggler-aware collectives: shares, meetings and the handshake.

All but one of n ranks are early. They add up their contributions without waiting for the straggler:
early rank number i reduces share i. When the straggler comes, it exchanges once with each of them.
In an all-reduce it gives its contribution to chunk i of n - 1 and takes the early ranks' sum of the
same chunk. In a reduce-scatter it gives its contribution to rank i's shard and takes the early
ranks' sum of a piece of its own shard.

Agreement on CPU, and wherever sizes must be known: no early rank may wait for the straggler before
its own part is done. So an early rank and the straggler have a handshake when they meet: a row of
8 (n + 1) bytes each way with the collective's identity and the sizes of the messages that follow.
Rows have a tag of their own, so that rows of ranks that disagree do meet and raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.base import Exchange, Identity
from megatron_sparse.straggler.generate import make_schedule
from megatron_sparse.straggler.schedule import Meetings, check_ranks, scatter_meetings
from megatron_sparse.transport import Transport, Work
from megatron_sparse.transport.base import SubsetTransport

HANDSHAKE_TAG = 0x5742_4747
"""The same for all buckets: between two ranks handshakes meet in the order of the buckets."""
ALIGNMENT = 4096
"""Elements: a tile of the sparse formats, and whole pages of memory."""
MIN_UNITS = 256
"""Least number of alignment units in a chunk; keeps the sizes of chunks within 1 %."""


@dataclass(frozen=True)
class Share:
    """The work of one early rank.

    Attributes:
        rank: of the group.
        takes: elements of the straggler's contribution that come to this rank.
        gives: elements of the early ranks' sum that go from it to the straggler.
    """

    rank: int
    takes: slice
    gives: slice

    @property
    def reduces(self) -> tuple[slice, ...]:
        """Elements that this rank adds up for all early ranks."""
        return (self.takes,) if self.takes == self.gives else (self.takes, self.gives)


def straggler_of(exchange: Exchange) -> int | None:
    """The straggler that all ranks know of; a rank alone has none.

    Raises:
        ConfigError: there is no such rank.
    """
    straggler, world_size = exchange.straggler, exchange.transport.world_size
    if straggler is None or world_size == 1:
        return None
    check_ranks(world_size, straggler)
    return straggler


def shares_of(bucket: Bucket, straggler: int) -> list[Share]:
    """Each early rank's share, in rank order."""
    early = [rank for rank in range(bucket.world_size) if rank != straggler]
    scatters = bucket.op is CollectiveOp.REDUCE_SCATTER
    given = bucket.shard(straggler) if scatters else slice(0, bucket.numel)
    gives = [slice(*ends) for ends in pairwise(chunk_cuts(given, len(early)))]
    takes = [bucket.shard(rank) for rank in early] if scatters else gives
    return [Share(*each) for each in zip(early, takes, gives, strict=True)]


def chunk_cuts(elements: slice, pieces: int) -> list[int]:
    """Offsets that cut some elements into nearly even pieces, aligned where they are long enough.

    Example:
        >>> chunk_cuts(slice(0, 10), 3), chunk_cuts(slice(0, 3_000_000), 2)
        ([0, 3, 6, 10], [0, 1499136, 3000000])
    """
    numel = elements.stop - elements.start
    unit = ALIGNMENT
    while unit > 1 and unit * MIN_UNITS * pieces > numel:
        unit //= 2
    inner = [numel * piece // pieces // unit * unit for piece in range(pieces)]
    return [elements.start + offset for offset in (*inner, numel)]


@lru_cache(maxsize=64)
def meetings_of(op: CollectiveOp, world_size: int, straggler: int) -> Meetings:
    """Each rank's meetings after the straggler's arrival: peers, and the shares they exchange."""
    if op is CollectiveOp.REDUCE_SCATTER:
        return scatter_meetings(world_size, straggler)
    return make_schedule(world_size, straggler).meetings()


@lru_cache(maxsize=64)
def copies_of(world_size: int, straggler: int) -> tuple[tuple[int, ...], ...]:
    """For each round, the chunks that other ranks pass on beside the straggler's exchange."""
    schedule = make_schedule(world_size, straggler)
    passed_on = []
    for number, transfers in enumerate(schedule.rounds):
        partner = schedule.early_ranks[number] if number < schedule.chunks else None
        pair = {partner, straggler}
        passed_on.append({t.chunk for t in transfers if {t.sender, t.receiver} != pair})
    return tuple(tuple(sorted(chunks)) for chunks in passed_on)


def shake_hands(
    identity: Identity, sizes: Sequence[int], straggler: int, transport: Transport
) -> tuple[Work, Callable[[], list[list[int]]]]:
    """Posts the rows by which the straggler and the early ranks meet; see the module's docstring.

    Args:
        identity: of the collective, as this rank has it.
        sizes: of this rank's coming messages; n - 1 at most.
        straggler: its rank.
        transport: of the whole group.

    Returns:
        A work that is done when the rows have come; and a function that then reads them, on the
        host: the sizes that each peer will send. The straggler's peers are the early ranks, in
        order. It raises `CommunicationError` if a peer takes part in another collective, and
        `WireFormatError` if a row is damaged.
    """
    early = [rank for rank in range(transport.world_size) if rank != straggler]
    peers = early if transport.rank == straggler else [straggler]
    row = identity.row(sizes, len(early), transport.device)
    rows = [(peer, torch.empty_like(row)) for peer in peers]
    work = transport.exchange([(peer, row) for peer in peers], rows, HANDSHAKE_TAG)
    return work, lambda: [identity.read_row(words.tolist(), peer) for peer, words in rows]


def early_transport(transport: Transport, straggler: int) -> SubsetTransport:
    """The early ranks as a transport of their own, for their agreement."""
    early = [rank for rank in range(transport.world_size) if rank != straggler]
    return SubsetTransport(transport, early, HANDSHAKE_TAG)
