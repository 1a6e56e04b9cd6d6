"""Alpha-beta costs of all-reduces with a straggler (StragglAR, table 1 and appendices B and F).

s bytes, n ranks, alpha seconds a round, beta seconds a byte. The best case is the time after the
straggler's arrival when it came late enough for the early ranks' part to be hidden; the worst case
when it was not late at all. Algorithms that know of no straggler have one time for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.transport import Link


@dataclass(frozen=True)
class Cost:
    """Rounds, and buffers' worth of bytes that follow one another.

    Attributes:
        rounds: how many alphas.
        buffers: how many times s beta.
    """

    rounds: float
    buffers: float

    def time_s(self, buffer_bytes: float, link: Link) -> float:
        """Seconds for a buffer on such links."""
        return self.rounds * link.alpha_s + self.buffers * buffer_bytes * link.beta_s


def ring_cost(n: int) -> Cost:
    """Ring."""
    return Cost(2 * (n - 1), 2 * (n - 1) / n)


def rhd_cost(n: int) -> Cost:
    """Recursive halving and doubling; where n is no power of two two ranks fold, a buffer each."""
    levels = n.bit_length() - 1
    active = 1 << levels
    folds = 2 if n > active else 0
    return Cost(2 * levels + folds, 2 * (active - 1) / active + folds)


def allpairs_cost(n: int) -> Cost:
    """All-pairs (MSCCL)."""
    return Cost(2, 2 * (n - 1) / n)


def broadcast_cost(n: int, *, worst: bool = False) -> Cost:
    """The early ranks all-reduce; the straggler and one exchange everything; that is broadcast."""
    levels = (n - 1).bit_length()
    early = Cost(2 * (n - 2), 2 * (n - 2) / (n - 1)) if worst else Cost(0, 0)
    return Cost(early.rounds + levels, early.buffers + levels)


def reduce_scatter_cost(n: int) -> Cost:
    """A ring reduce-scatter of the n - 1 early ranks: what the delay may hide."""
    return Cost(n - 2, (n - 2) / (n - 1))


def straggler_aware_cost(n: int, rounds: int, *, worst: bool = False) -> Cost:
    """A schedule of so many rounds of a chunk each; in the worst case after the reduce-scatter."""
    early = reduce_scatter_cost(n) if worst else Cost(0, 0)
    return Cost(early.rounds + rounds, early.buffers + rounds / (n - 1))


def all_reduce_costs(n: int, rounds: int) -> dict[str, tuple[Cost, Cost]]:
    """Best and worst case of the all-reduces that the paper compares, by the scheme's name.

    Args:
        n: ranks.
        rounds: of the straggler-aware schedule.
    """
    return {
        "straggler": (straggler_aware_cost(n, rounds), straggler_aware_cost(n, rounds, worst=True)),
        "dense_ring": (ring_cost(n), ring_cost(n)),
        "dense_rhd": (rhd_cost(n), rhd_cost(n)),
        "dense_allpairs": (allpairs_cost(n), allpairs_cost(n)),
        "dense_broadcast": (broadcast_cost(n), broadcast_cost(n, worst=True)),
    }


def critical_delay_s(n: int, rounds: int, buffer_bytes: float, link: Link) -> float:
    """The delay from which on the straggler-aware form beats the ring (appendix B, exactly).

    The paper goes on to simplify it for large n, which is 1 % off for 64 ranks and 5 % for 8.
    Not negative: where it would be, the straggler-aware form never loses.
    """
    aware = straggler_aware_cost(n, rounds, worst=True).time_s(buffer_bytes, link)
    return max(0.0, aware - ring_cost(n).time_s(buffer_bytes, link))
