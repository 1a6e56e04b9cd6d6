"""Schedules for any number of ranks: a maximum-weight matching each round (StragglAR, appendix E).

The straggler is rank n - 1. In each of the first n - 1 rounds, r, it meets early rank r: they
exchange partial sums of chunk r, and from then on both hold the complete chunk. All other ranks are
matched in pairs that pass on complete chunks. A pair in which both ranks can give the other a chunk
weighs more than a pair with one chunk. Which chunk a rank gives depends on n:

- **even n**: the oldest chunk that the other rank lacks; the newest after the straggler has met
  every rank. As in Algorithm 1, a rank that meets the straggler within log2 n rounds (the *critical
  window*) gets no chunk that all need only after that; in the first L = log2 n (rounded up) rounds
  pairs pass chunks only to ranks that hold none and have a number above 2 L - 2.
- **odd n**, which the paper leaves out: one early rank is idle in each round, and forbidding
  chunks in windows costs more than it gains. A chunk's urgency is how often its holders must still
  double, less the rounds until all ranks must hold it; it is lower for a rank in its window.
"""

import math
import random
from collections.abc import Iterator

import networkx as nx

from megatron_sparse.straggler.schedule import Round, Transfer

TRIES = 8
FIRST_SEED_OF_EVEN = 46
"""The first of the `TRIES` seeds for even n. Seven of the first 120 seeds make 27 rounds for 24
ranks, the others 28 or more; these tries reach the fewest rounds found for 24 and every smaller
even n. Odd n begin with seed 0, which keeps every odd n up to 64 within the bound of its test."""
MOST_RANKS_TRIED_AGAIN = 32
URGENCY = 10.0
"""Weight of each doubling that a chunk lacks beyond the rounds that it has left."""
WINDOW_PENALTY = 5.0
CHUNK_WEIGHT = 1000.0
"""Far above any urgency: the number of chunks decides first, then their urgency."""
JITTER = 2.0
"""Random weight that breaks ties."""
SCALE = 1000
"""Weights are scaled to integers, for which the matching is exact."""


Gift = tuple[float, int] | None
"""(urgency, chunk) that one rank can give another; None if there is no such chunk."""


def matching_rounds(n: int) -> list[Round]:
    """Makes schedules with several seeds, which break ties, and returns one of the fewest rounds.

    Deterministic, for n >= 2.
    """
    enough = n + (n - 1).bit_length() - 2  # as few rounds as powers of two take
    best: list[Round] = []
    first_seed = 0 if n % 2 else FIRST_SEED_OF_EVEN
    tries = TRIES if n <= MOST_RANKS_TRIED_AGAIN else 1  # large matchings take seconds
    for seed in range(first_seed, first_seed + tries):
        rounds = list(_rounds(n, random.Random(seed)))
        if not best or len(rounds) < len(best):
            best = rounds
        if len(best) <= enough:
            break
    return best


def _rounds(n: int, generator: random.Random) -> Iterator[Round]:
    """Yields the transfers of each round, until all ranks hold every chunk."""
    state = _Even(n) if n % 2 == 0 else _Odd(n)
    while not state.complete:
        transfers = state.choose_transfers(generator)
        state.apply(transfers)
        yield tuple(transfers)


class _State:
    """The chunks that each rank holds complete, round after round.

    Attributes:
        n: ranks.
        straggler: the last rank, n - 1.
        chunks: the number of chunks, n - 1.
        levels: rounds in which a chunk can reach all ranks: log2 n, rounded up.
        number: the current round's, from 0; in the first n - 1 it is also the straggler's partner.
        held: for each rank an integer, whose bit c says whether the rank holds chunk c complete.
        copies: for each chunk, how often it has been received.
    """

    def __init__(self, n: int) -> None:
        self.n, self.straggler, self.chunks = n, n - 1, n - 1
        self.levels = (n - 1).bit_length()
        self.number = 0
        self.held = [0] * n
        self.copies = [0] * self.chunks

    @property
    def complete(self) -> bool:
        everything = (1 << self.chunks) - 1
        return all(held == everything for held in self.held)

    @property
    def reducing(self) -> bool:
        """Whether the straggler has a fixed partner in this round."""
        return self.number < self.chunks

    def choose_transfers(self, generator: random.Random) -> list[Transfer]:
        """This round's transfers: the fixed ones, then those of a maximum-weight matching.

        `generator` breaks ties.
        """
        transfers = self.fixed()
        busy = {transfer.sender for transfer in transfers}
        busy |= {transfer.receiver for transfer in transfers}
        idle = [rank for rank in range(self.n) if rank not in busy]
        # An edge joins two ranks of which at least one has a chunk for the other.
        graph = nx.Graph()
        for index, one in enumerate(idle):
            for other in idle[index + 1 :]:
                gifts = self.gift(one, other), self.gift(other, one)
                urgencies = [gift[0] for gift in gifts if gift is not None]
                if urgencies:
                    weight = CHUNK_WEIGHT * len(urgencies) + sum(urgencies)
                    weight += JITTER * generator.random()
                    graph.add_edge(one, other, weight=round(SCALE * weight))
        # For even n as many pairs as possible, whatever they weigh.
        matching = nx.max_weight_matching(graph, maxcardinality=self.n % 2 == 0)
        for one, other in sorted(sorted(edge) for edge in matching):
            for sender, receiver in ((one, other), (other, one)):
                gift = self.gift(sender, receiver)
                if gift is not None:
                    transfers.append(Transfer(sender, receiver, chunk=gift[1]))
        return transfers

    def fixed(self) -> list[Transfer]:
        """The transfers that need no matching: the straggler and its partner swap partial sums."""
        if not self.reducing:  # the straggler has met every rank
            return []
        partner, straggler = self.number, self.straggler
        return [Transfer(partner, straggler, partner), Transfer(straggler, partner, partner)]

    def apply(self, transfers: list[Transfer]) -> None:
        """Updates the held chunks after these transfers, and goes on to the next round."""
        for _, receiver, chunk in transfers:
            self.held[receiver] |= 1 << chunk
            self.copies[chunk] += 1
        self.number += 1

    def missing(self, sender: int, receiver: int) -> int:
        """Chunks that `sender` has and `receiver` lacks."""
        return self.held[sender] & ~self.held[receiver]

    def gift(self, sender: int, receiver: int) -> Gift:
        """The chunk that `sender` would give `receiver`."""
        raise NotImplementedError


class _Even(_State):
    """For even n: a rank gives the oldest chunk first, none too new for a critical window."""

    def fixed(self) -> list[Transfer]:
        """Adds, in the first rounds, the first copy of the newest chunk, as in Algorithm 1."""
        transfers = super().fixed()
        newest = self.number - 1  # the chunk, and the rank that met the straggler before
        receiver = newest + self.levels  # < n - 1: meets the straggler when all must hold newest
        if 0 < self.number < self.levels and receiver < self.chunks:
            transfers.append(Transfer(newest, receiver, newest))
        return transfers

    def gift(self, sender: int, receiver: int) -> Gift:
        """The oldest missing chunk, or the newest after the straggler has met every rank.

        None if no chunk is missing, if the newest chunk of one is too new for the other's window,
        and in the first rounds if the receiver already holds a chunk or is reserved.
        """
        missing = self.missing(sender, receiver)
        # The two ranks exchange chunks, so both directions must be allowed.
        if not missing or self._is_too_new(receiver, sender) or self._is_too_new(sender, receiver):
            return None
        if self.number < self.levels:
            # Reserved ranks meet the straggler in the first rounds, or `fixed` gives them a chunk.
            is_reserved = receiver <= 2 * (self.levels - 1)
            if self.held[receiver] or is_reserved:
                return None
        # The lowest and the highest bit that is set.
        oldest, newest = (missing & -missing).bit_length() - 1, missing.bit_length() - 1
        return 0.0, (oldest if self.reducing else newest)  # 0.0: all chunks are equally urgent

    def _is_too_new(self, receiver: int, sender: int) -> bool:
        """Whether the receiver meets the straggler before the sender's newest chunk is due."""
        has_windows = self.levels <= self.number < self.chunks
        in_window = self.number < receiver < self.number + self.levels
        if not (has_windows and in_window):
            return False
        newest = self.held[sender].bit_length() - 1  # the highest bit that is set
        return receiver != self.straggler and newest > receiver - self.levels


class _Odd(_State):
    """For odd n: a rank gives the most urgent chunk first."""

    def gift(self, sender: int, receiver: int) -> Gift:
        """The most urgent missing chunk; of several, the oldest. None if none is missing."""
        missing = self.missing(sender, receiver)
        candidates = []  # (urgency, -chunk), so that of equal urgencies `max` takes the oldest
        while missing:
            lowest_bit = missing & -missing
            missing ^= lowest_bit
            chunk = lowest_bit.bit_length() - 1
            candidates.append((self._urgency(chunk, receiver), -chunk))
        if not candidates:
            return None
        urgency, negative_chunk = max(candidates)
        return urgency, -negative_chunk

    def _urgency(self, chunk: int, receiver: int) -> float:
        """How urgent a chunk is: how often its holders must still double, less the rounds left.

        A penalty lowers it if the receiver meets the straggler before all ranks hold the chunk.
        """
        # The straggler's copy does not count while a fixed partner keeps the straggler busy.
        copies = self.copies[chunk] - (1 if self.reducing else 0)
        doublings = math.log2((self.n - 1) / copies)
        rounds_left = chunk + self.levels - self.number + 1  # it is due in round chunk + levels
        urgency = URGENCY * (doublings - rounds_left)
        in_window = self.number < receiver <= self.number + self.levels
        meets_straggler = receiver != self.straggler
        if in_window and meets_straggler and chunk > receiver - self.levels:
            urgency -= WINDOW_PENALTY
        return urgency
