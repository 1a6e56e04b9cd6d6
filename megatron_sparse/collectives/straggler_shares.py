"""Shared parts of the straggler-aware collectives: chunks, meetings and the handshake.

All but one of n ranks are early. They add up their contributions without waiting for the straggler:
early rank number i reduces chunk i of n - 1. When the straggler comes, it exchanges once with each
of them: it gives its contribution to chunk i and takes the early ranks' sum of the same chunk.

All-reduce only. In a reduce-scatter skipping the straggler gains nothing: n - 1 shards must leave
its port after its arrival in any scheme.

Agreement on CPU, and wherever sizes must be known: no early rank may wait for the straggler before
its own part is done. So an early rank and the straggler have a handshake when they meet: a row of
8 (n + 1) bytes each way with the collective's identity and the sizes of the messages that follow.
Rows have a tag of their own, so that rows of ranks that disagree do meet and raise an error.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron_sparse.collectives.base import Exchange, Identity
from megatron_sparse.straggler.generate import make_schedule
from megatron_sparse.straggler.schedule import check_ranks, early_ranks
from megatron_sparse.transport import Transport, Work

HANDSHAKE_TAG = 0x5742_4747
"""The same for all buckets: between two ranks handshakes meet in the order of the buckets."""


def straggler_of(exchange: Exchange) -> int | None:
    """The straggler to skip; None if none is known, or if the group has one rank.

    Raises:
        ConfigError: the straggler is not a rank of the group.
    """
    straggler, world_size = exchange.straggler, exchange.transport.world_size
    if straggler is None or world_size == 1:
        return None
    check_ranks(world_size, straggler)
    return straggler


class Meeting(NamedTuple):
    """One rank's exchange in a round: the peer, the chunks that it sends and receives (or None)."""

    peer: int
    sends: int | None
    receives: int | None


@lru_cache(maxsize=64)
def meetings_of(world_size: int, straggler: int) -> list[list[Meeting]]:
    """For each rank its meetings, round by round; rounds in which it has none are left out.

    Example:
        >>> meetings_of(2, straggler=1)[0]
        [Meeting(peer=1, sends=0, receives=0)]
    """
    meetings: list[list[Meeting]] = [[] for _ in range(world_size)]
    for transfers in make_schedule(world_size, straggler):
        chunk_of = {(t.sender, t.receiver): t.chunk for t in transfers}
        for sender, receiver in chunk_of:
            sent, back = chunk_of[sender, receiver], chunk_of.get((receiver, sender))
            meetings[sender].append(Meeting(receiver, sent, back))
            if back is None:  # else the loop adds the receiver's meeting at the transfer back
                meetings[receiver].append(Meeting(sender, None, sent))
    return meetings


def shake_hands(
    identity: Identity, sizes: Sequence[int], straggler: int, transport: Transport
) -> tuple[Work, Callable[[], list[list[int]]]]:
    """Posts the handshake: the straggler and each early rank exchange rows with identity and sizes.

    `sizes`, n - 1 at most, are those of this rank's coming messages.

    Returns:
        (work, read). `work` is done when the rows have arrived. `read()` then returns, for each
        peer, the sizes that it will send; the straggler's peers are the early ranks, in order. It
        copies the rows to the CPU. It raises `CommunicationError` if a peer takes part in another
        collective, and `WireFormatError` if a row is damaged.
    """
    early = early_ranks(transport.world_size, straggler)
    peers = early if transport.rank == straggler else [straggler]
    row = identity.row(sizes, len(early), transport.device)
    rows = [(peer, torch.empty_like(row)) for peer in peers]
    work = transport.exchange([(peer, row) for peer in peers], rows, HANDSHAKE_TAG)
    return work, lambda: [identity.read_row(words.tolist(), peer) for peer, words in rows]
