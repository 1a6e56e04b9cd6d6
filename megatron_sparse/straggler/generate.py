"""Makes the schedule for a number of ranks and a straggler.

Those for powers of two are made here (StragglAR, algorithm 1), the others by `matching`. In
`doubling_rounds` every chunk doubles in every round. There the straggler is rank n - 1, early rank
r begins with chunk r, and k = log2 n. A chunk is *active* from the round after its reduction until
all ranks have it, k rounds later. From round k on every early rank holds exactly one active chunk:
the ranks P with the oldest one, which is due in this round, are matched with the others, Q, and
each pair exchanges. When a rank meets the straggler, all its chunks must have expired, so the
straggler's partners of the next k rounds (the critical window) choose their partners first.

Deviation: the paper forbids to match two ranks of the critical window; here that is only avoided.
That is enough for the invariant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megatron_sparse.straggler.matching import matching_rounds
from megatron_sparse.straggler.schedule import Round, Transfer, check_ranks, early_ranks


@lru_cache(maxsize=64)
def make_schedule(world_size: int, straggler: int | None = None) -> tuple[Round, ...]:
    """The rounds of exchanges after the straggler's arrival, which the early ranks wait for.

    Deterministic, so that every rank can make its own. Powers of two take milliseconds, others as
    long as their matchings: about a second for 40 ranks, and growing with the fourth power.

    Args:
        world_size: at least 2.
        straggler: a rank; the last one by default.

    Raises:
        ConfigError: there is no such rank.

    Example:
        Of 2 ranks, with rank 1 late: one round, in which the two exchange the only chunk.
    """
    straggler = world_size - 1 if straggler is None else straggler
    check_ranks(world_size, straggler)
    # The generators make rank n - 1 the straggler; renumber, with the others in order.
    names = [*early_ranks(world_size, straggler), straggler]
    rounds: list[Round] = []
    for transfers in _rounds(world_size):
        renumbered = [Transfer(names[t.sender], names[t.receiver], t.chunk) for t in transfers]
        rounds.append(tuple(renumbered))
    return tuple(rounds)


@lru_cache(maxsize=64)
def _rounds(n: int) -> tuple[Round, ...]:
    is_power_of_two = n & (n - 1) == 0
    return tuple(doubling_rounds(n) if is_power_of_two else matching_rounds(n))


def doubling_rounds(n: int) -> Iterator[Round]:
    """The transfers of each of the n + log2 n - 2 rounds for n = 2, 4, 8, ..."""
    levels = n.bit_length() - 1  # log2 n: the rounds in which a chunk reaches all ranks
    straggler = n - 1
    holders: dict[int, set[int]] = {}  # of each active chunk, the early ranks
    for number in range(n + levels - 2):
        transfers: list[Transfer] = []
        if number < n - 1:  # the straggler meets early rank `number`, and both add their chunk
            transfers += [Transfer(number, straggler, number), Transfer(straggler, number, number)]
        if number < levels:
            spread = _first_copies(holders, number, levels, n)
        else:
            spread = _exchanges(holders, number, levels, n)
            del holders[number - levels]  # now on every rank
        transfers += spread
        # Receivers pass chunks on from the next round on, but not the one that all ranks have.
        for _, receiver, chunk in spread:
            if chunk in holders:
                holders[chunk].add(receiver)
        if number < n - 1:
            holders[number] = {number}
        yield tuple(transfers)


def _first_copies(holders: dict[int, set[int]], number: int, levels: int, n: int) -> list[Transfer]:
    """Phase 1: every holder of a chunk gives it to a rank that has none.

    Early rank j gives its own chunk first to rank j + log2 n, which needs it, and no newer one, in
    its round with the straggler.
    """
    taken = set().union(*holders.values())
    # Lower ranks meet the straggler in these rounds, or get the first copy of a new chunk.
    free = (rank for rank in range(2 * levels - 1, n - 1) if rank not in taken)
    transfers = []
    for chunk, ranks in holders.items():
        for rank in sorted(ranks):
            receiver = number - 1 + levels if rank == number - 1 else next(free)
            transfers.append(Transfer(rank, receiver, chunk))
    return transfers


def _exchanges(holders: dict[int, set[int]], number: int, levels: int, n: int) -> list[Transfer]:
    """Phase 2: ranks with the due chunk exchange with ranks without it."""
    due, straggler = number - levels, n - 1
    chunk_of: dict[int, int] = {}  # of each early rank, its active chunk
    for chunk, ranks in holders.items():
        chunk_of |= dict.fromkeys(ranks, chunk)
    # Rank `number` has no time: it meets the straggler in this round.
    with_due = sorted(holders[due] - {number})
    others = sorted(chunk_of.keys() - holders[due] - {number}, key=lambda rank: chunk_of[rank])
    if number >= n - 1:
        # The straggler has no fixed partner any more and helps to spread the last one's chunk.
        chunk_of[straggler] = n - 2
        others.append(straggler)
    # The critical window: ranks that soon meet the straggler only get chunks that expire before.
    window = range(number + 1, min(number + levels, n - 2) + 1)
    pairs: list[tuple[int, int]] = []
    for rank in window:
        if rank in holders[due]:
            fitting = (other for other in others if chunk_of[other] <= rank - levels)
            # The oldest chunk; of several ranks with it, one outside the window.
            other = min(fitting, key=lambda other: (chunk_of[other], other in window))
            pairs.append((rank, other))
            with_due.remove(rank)
            others.remove(other)
    pairs += zip(with_due, others, strict=True)
    transfers = []
    for rank, other in pairs:
        if other != straggler:
            transfers.append(Transfer(rank, other, due))
        transfers.append(Transfer(other, rank, chunk_of[other]))
    return transfers
