"""All-gathers of pieces of different sizes that every rank knows: pairwise, ring and doubling.

Every rank receives the pieces of all other ranks. For each piece, this rank's own first, the
callback `arrived` runs (for instance to decode it) while the next pieces are in flight. This file
also has the all-to-all, one peer at a time, that precedes an all-gather.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from megatron_sparse.collectives.base import Phase, Round, Subgroup
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.records import PerRank

Arrived = Callable[[int, torch.Tensor], None]
"""Called with a rank and its piece, once for each rank."""


def pairwise_all_to_all(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: Subgroup, *, last: bool
) -> Phase:
    """Every rank sends one piece to each other rank, one peer at a time: n - 1 rounds.

    In round i rank r sends to r - i and receives from r + i, so no port serves two peers at once.

    `sent`: the piece for each rank. `received`: room for each rank's piece, exactly as long. This
    rank's own entries are not used. `last`: this rank will post nothing more.
    """
    rounds = pairwise_rounds([[piece] for piece in sent], [[piece] for piece in received], group)
    yield from group.in_rounds(rounds, independent=True, last=last)


def pairwise_rounds(
    sent: Sequence[Sequence[torch.Tensor]],
    received: Sequence[Sequence[torch.Tensor]],
    group: Subgroup,
) -> list[Round]:
    """The rounds of `pairwise_all_to_all`, with any number of pieces for and from each rank."""
    n, rank = group.world_size, group.rank
    rounds: list[Round] = []
    for step in range(1, n):
        target, source = (rank - step) % n, (rank + step) % n
        sends = [(target, piece) for piece in sent[target]]
        rounds.append((sends, [(source, piece) for piece in received[source]]))
    return rounds


def pairwise_all_gather(
    own: torch.Tensor,
    room: torch.Tensor,
    sizes: list[int],
    group: Subgroup,
    arrived: Arrived,
    *,
    last: bool = True,
) -> Phase:
    """Every rank sends its piece to each other rank, one peer at a time: n - 1 rounds.

    In round i rank r sends to r - i and receives from r + i, so no port serves two peers at once.

    `own`: this rank's piece; `room`: as long as the pieces of all other ranks; `sizes`: bytes of
    each rank's piece. `last`: this rank will post nothing more.
    """
    n, rank = group.world_size, group.rank
    senders = [(rank + step) % n for step in range(n)]  # by round, from 1 on; 0: this rank
    pieces = [own, *room.split([sizes[sender] for sender in senders[1:]])]
    rounds: list[Round] = [
        ([((rank - step) % n, own)], [(senders[step], pieces[step])]) for step in range(1, n)
    ]

    def hand_over(number: int) -> None:
        """Hands over the piece that arrived in round `number`, from 1 on; 0: this rank's own."""
        arrived(senders[number], pieces[number])

    yield from group.in_rounds(rounds, hand_over, independent=True, last=last)


def ring_all_gather(
    buffer: torch.Tensor, sizes: list[int], group: Subgroup, arrived: Arrived
) -> Phase:
    """Pieces travel round the ring: n - 1 rounds, only between neighbours.

    Rank r sends every piece but that of its successor. `buffer` begins with this rank's own piece;
    the pieces of the next ranks follow in order.
    """
    n, rank = group.world_size, group.rank
    # pieces[i] is that of rank + i. The buffer may be longer than all pieces: [:n] drops the rest.
    pieces = buffer.split([*sizes[rank:], *sizes[:rank], buffer.numel() - sum(sizes)])[:n]

    def piece_of_round(number: int) -> torch.Tensor:
        """The piece of rank - number, which arrives in round `number`; 0: this rank's own."""
        return pieces[-number % n]

    # A rank passes on the piece that arrived in the round before, at first its own.
    after, before = (rank + 1) % n, (rank - 1) % n
    rounds: list[Round] = [
        ([(after, piece_of_round(number))], [(before, piece_of_round(number + 1))])
        for number in range(n - 1)
    ]

    def hand_over(number: int) -> None:
        """Hands over the piece that arrived in round `number`, from 1 on; 0: this rank's own."""
        arrived((rank - number) % n, piece_of_round(number))

    yield from group.in_rounds(rounds, hand_over, last=True)


def doubling_all_gather(
    buffer: torch.Tensor, sizes: list[int], group: Subgroup, arrived: Arrived
) -> Phase:
    """Recursive doubling for any number of ranks (Bruck et al. 1997): ceil(log2 n) rounds.

    At the start of a round rank r holds the pieces of the d ranks from itself on. It sends them to
    rank r - d and gets those of the next d from rank r + d. The last round carries only the missing
    pieces. `buffer` is as in `ring_all_gather`, so the pieces of one message are contiguous.
    """
    n, rank = group.world_size, group.rank
    starts = [0, *accumulate([*sizes[rank:], *sizes[:rank]])]  # of the pieces in the buffer

    def span(first: int, stop: int) -> torch.Tensor:
        """The pieces of the ranks rank + first, ..., rank + stop - 1."""
        return buffer[starts[first] : starts[stop]]

    counts = [0, 1]  # counts[i + 1]: pieces that a rank has after i rounds
    rounds: list[Round] = []
    while counts[-1] < n:
        d = counts[-1]
        more = min(d, n - d)
        target, source = (rank - d) % n, (rank + d) % n
        rounds.append(([(target, span(0, more))], [(source, span(d, d + more))]))
        counts.append(d + more)

    def hand_over(number: int) -> None:
        """Hands over the pieces that arrived in round `number`, from 1 on; 0: this rank's own."""
        for i in range(counts[number], counts[number + 1]):
            arrived((rank + i) % n, span(i, i + 1))

    yield from group.in_rounds(rounds, hand_over, last=True)


def doubling_all_gather_cost(run: DryRun, nbytes: PerRank, decoding: PerRank) -> None:
    """Predicts the time of `doubling_all_gather`: pieces are decoded one round after they arrive.

    `nbytes`: of each rank's piece; `decoding`: seconds to decode it. One number holds for all.
    """
    n, ranks = run.n, np.arange(run.n)
    nbytes_n, decoding_n = (np.broadcast_to(values, n) for values in (nbytes, decoding))

    def sum_of_next(values_n: np.ndarray, first: int, stop: int) -> np.ndarray:
        """For each rank r, the sum of the values of the ranks r + first, ..., r + stop - 1."""
        return sum((values_n[(ranks + i) % n] for i in range(first, stop)), np.zeros(n))

    decoded, d = 0, 1  # pieces that a rank has decoded, and pieces that it has
    rounds = []  # distance, bytes, and seconds to decode the pieces of the round before
    while d < n:
        more = min(d, n - d)
        rounds.append((d, sum_of_next(nbytes_n, 0, more), sum_of_next(decoding_n, decoded, d)))
        decoded, d = d, d + more
    run.shifts(rounds)
    run.work(sum_of_next(decoding_n, decoded, n))  # the pieces of the last round
