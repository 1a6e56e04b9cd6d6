"""Schedules for any number of ranks: a maximum-weight matching a round (StragglAR, appendix E).

The straggler is rank n - 1 and has its fixed partner in each of the first n - 1 rounds. Of the
other ranks those are matched that have most to give each other: an edge weighs as much as the one
or two chunks that its ends would exchange, and above all their number.

Beyond the paper: odd n, for which one early rank is idle in each round; and the weight of a chunk.
Where the paper counts chunks only (weight 1 or 2), here a chunk is the more urgent the more
doublings it lacks for the rounds that are left until it should be everywhere, and the less wanted
by a rank that will soon exchange with the straggler and could not pass it on. For 24 ranks that
makes 28 rounds, where the count alone made 30 to 40.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import networkx as nx

from megatron_sparse.straggler.schedule import Round, Transfer

TRIES = 8
MOST_RANKS_TRIED_AGAIN = 32
URGENCY = 10.0
WINDOW_PENALTY = 5.0
CHUNK_WEIGHT = 1000.0
"""Far above any urgency: two chunks first, then which two."""
JITTER = 2.0
SCALE = 1000
"""Weights are integers, for which the matching is exact."""


def matching_rounds(n: int) -> list[Round]:
    """The fewest rounds of several ways to break ties; deterministic, for n >= 2."""
    fewest = n + (n - 1).bit_length() - 2
    best: list[Round] = []
    for seed in range(TRIES if n <= MOST_RANKS_TRIED_AGAIN else 1):
        rounds = list(_rounds(n, random.Random(seed)))
        if not best or len(rounds) < len(best):
            best = rounds
        if len(best) <= fewest:
            break
    return best


def _rounds(n: int, generator: random.Random) -> Iterator[Round]:
    state = _State(n)
    while not state.complete:
        transfers = state.matched(generator)
        state.apply(transfers)
        yield tuple(transfers)


class _State:
    """Who holds which complete chunk: bit c of `held[rank]`."""

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

    def matched(self, generator: random.Random) -> list[Transfer]:
        """This round's transfers, the straggler's first."""
        transfers: list[Transfer] = []
        ranks = list(range(self.n))
        if self.reducing:
            partner, straggler = self.number, self.straggler
            transfers += [
                Transfer(partner, straggler, partner),
                Transfer(straggler, partner, partner),
            ]
            ranks = [rank for rank in ranks if rank not in (partner, straggler)]
        graph = nx.Graph()
        for index, one in enumerate(ranks):
            for other in ranks[index + 1 :]:
                gifts = [self._best(one, other), self._best(other, one)]
                values = [gift[0] for gift in gifts if gift is not None]
                if values:
                    weight = CHUNK_WEIGHT * len(values) + sum(values)
                    weight += JITTER * generator.random()
                    graph.add_edge(one, other, weight=round(SCALE * weight))
        for pair in sorted(sorted(edge) for edge in nx.max_weight_matching(graph)):
            for sender, receiver in (pair, pair[::-1]):
                gift = self._best(sender, receiver)
                if gift is not None:
                    transfers.append(Transfer(sender, receiver, gift[1]))
        return transfers

    def apply(self, transfers: list[Transfer]) -> None:
        """Ends the round."""
        for _, receiver, chunk in transfers:
            self.held[receiver] |= 1 << chunk
            self.copies[chunk] += 1
        self.number += 1

    def _best(self, sender: int, receiver: int) -> tuple[float, int] | None:
        """The most urgent chunk that `sender` has and `receiver` lacks, and its value."""
        missing = self.held[sender] & ~self.held[receiver]
        values = []
        while missing:
            lowest = missing & -missing
            missing ^= lowest
            chunk = lowest.bit_length() - 1
            values.append((self._value(chunk, receiver), -chunk))
        if not values:
            return None
        value, negative_chunk = max(values)
        return value, -negative_chunk

    def _value(self, chunk: int, receiver: int) -> float:
        # The straggler's copy spreads only when it has no fixed partner any more.
        copies = self.copies[chunk] - (1 if self.reducing else 0)
        doublings = math.log2((self.n - 1) / copies)
        rounds_left = chunk + self.levels - self.number + 1
        value = URGENCY * (doublings - rounds_left)
        soon = self.number < receiver <= self.number + self.levels and receiver < self.chunks
        if soon and chunk > receiver - self.levels:
            value -= WINDOW_PENALTY
        return value
