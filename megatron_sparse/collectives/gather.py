"""All-gathers of pieces of different size, which every rank knows: three orders of the same bytes.

Every rank receives all pieces but its own. Each piece is handed over when it has arrived, this
rank's own first, while the next ones are on their way. This file also has the paced all-to-all that
precedes an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from megatron_sparse.collectives.base import Phase, Round, Subgroup
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.records import Density

Arrived = Callable[[int, torch.Tensor], None]
"""Called with a rank and its piece, once for each rank."""


def pairwise_all_to_all(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: Subgroup, *, last: bool
) -> Phase:
    """Every rank sends a piece of its own to every other, one peer at a time: n - 1 rounds.

    In round i rank r sends to r - i and receives from r + i, so no port is ever shared.

    Args:
        sent: the piece for each rank; this rank's own entry is not used.
        received: room for the piece of each rank, exactly as long as the piece.
        group: the ranks.
        last: this rank will post nothing more.
    """
    rounds = pairwise_rounds([[piece] for piece in sent], [[piece] for piece in received], group)
    yield from group.in_rounds(rounds, independent=True, last=last)


def pairwise_rounds(
    sent: Sequence[Sequence[torch.Tensor]],
    received: Sequence[Sequence[torch.Tensor]],
    group: Subgroup,
) -> list[Round]:
    """The rounds of an all-to-all of several pieces for each peer; see `pairwise_all_to_all`."""
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
    """Every rank sends its piece to every other, one peer at a time: n - 1 rounds.

    In round i rank r sends to r - i and receives from r + i, so no port is ever shared. Sends
    (n - 1) times its own piece.

    Args:
        own: this rank's piece.
        room: as long as the pieces of all others.
        sizes: of each rank's piece.
        group: the ranks.
        arrived: called with each piece.
        last: this rank will post nothing more.
    """
    n, rank = group.world_size, group.rank
    senders = [(rank + step) % n for step in range(n)]
    pieces = [own, *room.split([sizes[sender] for sender in senders[1:]])]
    rounds: list[Round] = [
        ([((rank - step) % n, own)], [(senders[step], pieces[step])]) for step in range(1, n)
    ]
    yield from group.in_rounds(
        rounds, lambda number: arrived(senders[number], pieces[number]), independent=True, last=last
    )


def ring_all_gather(
    buffer: torch.Tensor, sizes: list[int], group: Subgroup, arrived: Arrived
) -> Phase:
    """Pieces travel round the ring: n - 1 rounds, only between neighbours.

    Rank r sends every piece but that of its successor. `buffer` begins with this rank's own piece;
    the pieces of the next ranks follow in order.
    """
    n, rank = group.world_size, group.rank
    # Piece i is that of the i-th rank after this one; behind the last, the buffer may be longer.
    pieces = buffer.split([*sizes[rank:], *sizes[:rank], buffer.numel() - sum(sizes)])[:n]

    def hand_over(number: int) -> None:
        """Hands over the piece that the last round brought; 0: this rank's own."""
        arrived((rank - number) % n, pieces[-number % n])

    # In each round a rank passes on what the round before brought: first its own piece.
    after, before = (rank + 1) % n, (rank - 1) % n
    rounds: list[Round] = [
        ([(after, pieces[-step % n])], [(before, pieces[n - 1 - step])]) for step in range(n - 1)
    ]
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

    held = [0, 1]  # pieces before and after each round; its own piece comes first

    def span(first: int, last: int) -> torch.Tensor:
        """The pieces of `first` to `last` ranks after this one, the latter not included."""
        return buffer[starts[first] : starts[last]]

    def hand_over(number: int) -> None:
        """Hands over the pieces that the last round brought; 0: this rank's own."""
        for place in range(held[number], held[number + 1]):
            arrived((rank + place) % n, span(place, place + 1))

    rounds: list[Round] = []
    while held[-1] < n:
        have = held[-1]
        more = min(have, n - have)
        target, source = (rank - have) % n, (rank + have) % n
        rounds.append(([(target, span(0, more))], [(source, span(have, have + more))]))
        held.append(have + more)
    # last: this rank posts nothing more in the collective.
    yield from group.in_rounds(rounds, hand_over, last=True)


def doubling_all_gather_cost(run: DryRun, nbytes: Density, decoding: Density) -> None:
    """Bruck's order (`gather.doubling_all_gather`): pieces are decoded a round after they came.

    Args:
        run: its clocks are moved on to the end of the all-gather.
        nbytes: of a rank's piece; one number for all ranks, or one for each.
        decoding: seconds of decoding that piece, likewise.
    """
    n, ranks = run.n, np.arange(run.n)
    nbytes_n, decoding_n = (np.broadcast_to(values, n) for values in (nbytes, decoding))

    def of_next(values_n: np.ndarray, first: int, last: int) -> np.ndarray:
        """For each rank, the sum of the values of the ranks `first` to `last` after it."""
        return sum((values_n[(ranks + place) % n] for place in range(first, last)), np.zeros(n))

    decoded, held = 0, 1
    rounds = []  # distance, bytes, and seconds of decoding what came the round before
    while held < n:
        more = min(held, n - held)
        rounds.append((held, of_next(nbytes_n, 0, more), of_next(decoding_n, decoded, held)))
        decoded, held = held, held + more
    run.shifts(rounds)
    run.work(of_next(decoding_n, decoded, n))
