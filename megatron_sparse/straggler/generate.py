"""Makes the schedule for a number of ranks and a straggler.

Schedules for powers of two are made here (StragglAR, algorithm 1), all others by `matching`. The
straggler is rank n - 1. In round r it meets early rank r; they exchange their partial sums of chunk
r, so that both hold it complete. Let k = log2 n. In `doubling_rounds` the number of ranks that hold
a chunk doubles in each later round, so k rounds later all ranks hold it. Until then the chunk is
*active*. The oldest active chunk is *due*: all ranks must hold it after this round.

In rounds before k, each rank that holds a chunk gives it to a rank that holds none
(`_first_copies`). From round k on every early rank holds exactly one active chunk: ranks with the
due chunk are paired with ranks without it, and each pair exchanges (`_exchanges`). When a rank
meets the straggler, its active chunk must be due. So the straggler's partners of the next k
rounds (the *critical window*) are paired first.

Deviation: the paper forbids to match two ranks of the critical window; here that is only avoided.
That is enough for the invariant.
"""

from collections.abc import Iterator
from functools import lru_cache

from megatron_sparse.straggler.matching import matching_rounds
from megatron_sparse.straggler.schedule import Round, Transfer, check_ranks, early_ranks


@lru_cache(maxsize=64)
def make_schedule(world_size: int, straggler: int | None = None) -> tuple[Round, ...]:
    """The rounds of exchanges that follow the straggler's arrival.

    Deterministic, so every rank computes the same schedule. Powers of two take milliseconds, other
    numbers about a second for 40 ranks, growing with the fourth power.

    By default the last rank is the straggler.

    Raises:
        ConfigError: the straggler is not a rank, or there are fewer than two ranks.

    Example:
        Of 2 ranks, with rank 1 late: one round, in which the two exchange the only chunk.
    """
    straggler = world_size - 1 if straggler is None else straggler
    check_ranks(world_size, straggler)
    # `_rounds` numbers the early ranks 0 to n - 2 and the straggler n - 1: renumber.
    rank_of = [*early_ranks(world_size, straggler), straggler]
    rounds: list[Round] = []
    for transfers in _rounds(world_size):
        renumbered = [Transfer(rank_of[t.sender], rank_of[t.receiver], t.chunk) for t in transfers]
        rounds.append(tuple(renumbered))
    return tuple(rounds)


@lru_cache(maxsize=64)
def _rounds(n: int) -> tuple[Round, ...]:
    is_power_of_two = n & (n - 1) == 0
    return tuple(doubling_rounds(n) if is_power_of_two else matching_rounds(n))


def doubling_rounds(n: int) -> Iterator[Round]:
    """Yields the transfers of each of the n + log2 n - 2 rounds, for n = 2, 4, 8, ..."""
    levels = n.bit_length() - 1  # k = log2 n
    straggler = n - 1
    holders: dict[int, set[int]] = {}  # for each active chunk, the early ranks that hold it
    for number in range(n + levels - 2):
        transfers: list[Transfer] = []
        if number < n - 1:  # the straggler meets early rank `number`
            transfers += [Transfer(number, straggler, number), Transfer(straggler, number, number)]
        if number < levels:
            spread = _first_copies(holders, number, levels, n)
        else:
            spread = _exchanges(holders, number, levels, n)
            del holders[number - levels]  # the due chunk: all ranks hold it after this round
        transfers += spread
        # Receivers can pass a chunk on from the next round on, unless it was due (deleted above).
        for _, receiver, chunk in spread:
            if chunk in holders:
                holders[chunk].add(receiver)
        if number < n - 1:
            holders[number] = {number}  # the chunk that the straggler's meeting completed
        yield tuple(transfers)


def _first_copies(holders: dict[int, set[int]], number: int, levels: int, n: int) -> list[Transfer]:
    """Round `number` < levels: every holder of a chunk gives it to a rank that holds none.

    Early rank j gives its own chunk j first to rank j + levels. That rank meets the straggler in
    the round in which chunk j is due, so it must not get a newer chunk.
    """
    taken = set().union(*holders.values())
    # Ranks below 2 levels - 1 meet the straggler in these rounds or get a first copy.
    free = (rank for rank in range(2 * levels - 1, n - 1) if rank not in taken)
    transfers = []
    for chunk, ranks in holders.items():
        for rank in sorted(ranks):
            is_first_copy = rank == number - 1  # it met the straggler in the round before
            receiver = rank + levels if is_first_copy else next(free)
            transfers.append(Transfer(rank, receiver, chunk))
    return transfers


def _exchanges(holders: dict[int, set[int]], number: int, levels: int, n: int) -> list[Transfer]:
    """Round `number` >= levels: ranks with the due chunk exchange with ranks without it."""
    due, straggler = number - levels, n - 1
    chunk_of: dict[int, int] = {}  # for each early rank, its active chunk
    for chunk, ranks in holders.items():
        chunk_of |= dict.fromkeys(ranks, chunk)
    # Rank `number` is left out: it meets the straggler in this round.
    with_due = sorted(holders[due] - {number})
    without_due = sorted(chunk_of.keys() - holders[due] - {number}, key=lambda rank: chunk_of[rank])
    if number >= n - 1:
        # The straggler has met every rank. It now helps to spread the last chunk, n - 2.
        chunk_of[straggler] = n - 2
        without_due.append(straggler)
    # A rank in the critical window only receives a chunk due by the time it meets the straggler.
    window = range(number + 1, min(number + levels, n - 2) + 1)
    pairs: list[tuple[int, int]] = []  # (rank with the due chunk, rank without it or straggler)
    for rank in window:
        if rank in holders[due]:
            fitting = (other for other in without_due if chunk_of[other] <= rank - levels)
            # Take the oldest chunk; of several ranks that hold it, prefer one outside the window.
            other = min(fitting, key=lambda other: (chunk_of[other], other in window))
            pairs.append((rank, other))
            with_due.remove(rank)
            without_due.remove(other)
    pairs += zip(with_due, without_due, strict=True)
    transfers = []
    for rank, other in pairs:
        if other != straggler:  # the straggler already holds the due chunk
            transfers.append(Transfer(rank, other, due))
        transfers.append(Transfer(other, rank, chunk_of[other]))
    return transfers
