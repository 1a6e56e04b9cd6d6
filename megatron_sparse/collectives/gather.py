"""All-gathers of pieces of different size, which every rank knows: three orders of the same bytes.

Pieces lie in one buffer, this rank's own first and those of the ranks after it behind it, so that
what an order sends in one message is contiguous. Every rank ends up with sum(sizes) bytes and has
received all but its own. They are generators of `Phase`, returning the pieces in rank order.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate

import torch

from megatron_sparse.collectives.base import Subgroup, Yielded


class Pieces:
    """Where the pieces of all ranks lie in a buffer that begins with this rank's own.

    Attributes:
        starts: offset of the piece of each rank from this one on, and the end.
    """

    def __init__(self, buffer: torch.Tensor, sizes: list[int], rank: int) -> None:
        n = len(sizes)
        rotated = [sizes[(rank + i) % n] for i in range(n)]
        self._buffer, self._rank, self._n = buffer, rank, n
        self.starts = [0, *accumulate(rotated)]

    def span(self, first: int, last: int) -> torch.Tensor:
        """The pieces of `first` to `last` ranks after this one, the latter not included."""
        return self._buffer[self.starts[first] : self.starts[last]]

    def in_rank_order(self) -> list[torch.Tensor]:
        """The piece of each rank."""
        places = [(rank - self._rank) % self._n for rank in range(self._n)]
        return [self.span(place, place + 1) for place in places]


Gathered = Generator[Yielded, None, list[torch.Tensor]]


def pairwise_all_gather(buffer: torch.Tensor, sizes: list[int], group: Subgroup) -> Gathered:
    """Every rank sends its piece to every other, one peer at a time: n - 1 rounds.

    In round i rank r sends to r + i and receives from r - i, so no port is ever shared. Sends
    (n - 1) times its own piece.
    """
    n, rank = group.world_size, group.rank
    pieces = Pieces(buffer, sizes, rank)
    for step in range(1, n):
        place = n - step
        yield from group.exchange(
            [((rank + step) % n, pieces.span(0, 1))],
            [((rank - step) % n, pieces.span(place, place + 1))],
            last=step == n - 1,
        )
    return pieces.in_rank_order()


def ring_all_gather(buffer: torch.Tensor, sizes: list[int], group: Subgroup) -> Gathered:
    """Pieces travel round the ring: n - 1 rounds, only between neighbours.

    Rank r sends every piece but that of its successor.
    """
    n, rank = group.world_size, group.rank
    pieces = Pieces(buffer, sizes, rank)
    for step in range(n - 1):
        give, take = (n - step) % n, n - 1 - step
        yield from group.exchange(
            [((rank + 1) % n, pieces.span(give, give + 1))],
            [((rank - 1) % n, pieces.span(take, take + 1))],
            last=step == n - 2,
        )
    return pieces.in_rank_order()


def doubling_all_gather(buffer: torch.Tensor, sizes: list[int], group: Subgroup) -> Gathered:
    """Recursive doubling for any number of ranks (Bruck et al. 1997): ceil(log2 n) rounds.

    In a round each rank, holding the pieces of the d ranks from itself on, sends them to rank
    r - d and gets those of the next d from rank r + d; in the last round only what is missing.
    """
    n, rank = group.world_size, group.rank
    pieces = Pieces(buffer, sizes, rank)
    held = 1
    while held < n:
        more = min(held, n - held)
        yield from group.exchange(
            [((rank - held) % n, pieces.span(0, more))],
            [((rank + held) % n, pieces.span(held, held + more))],
            last=held + more == n,
        )
        held += more
    return pieces.in_rank_order()
