"""Costs of all-reduces that StragglAR compares (table 1), without its broadcast."""

from megatron_sparse.straggler.cost import Cost


def ring_cost(n: int) -> Cost:
    """Reduce-scatter and all-gather."""
    return Cost(2 * (n - 1), 2 * (n - 1) / n)


def straggler_aware_cost(n: int, rounds: int, *, worst: bool = False) -> Cost:
    """A schedule of so many rounds of a chunk each; in the worst case after the reduce-scatter."""
    one_after_another = rounds + (n - 2 if worst else 0)
    return Cost(one_after_another, one_after_another / (n - 1))


def rhd_cost(n: int) -> Cost:
    """Recursive halving and doubling; where n is no power of two two ranks fold, a buffer each."""
    levels = n.bit_length() - 1
    active = 1 << levels
    folds = 2 if n > active else 0
    return Cost(2 * levels + folds, 2 * (active - 1) / active + folds)


def all_reduce_costs(n: int, rounds: int) -> dict[str, tuple[Cost, Cost]]:
    """Best and worst case of the all-reduces, by scheme; `rounds`: straggler-aware ones."""
    return {
        "straggler": (straggler_aware_cost(n, rounds), straggler_aware_cost(n, rounds, worst=True)),
        "dense_ring": (ring_cost(n), ring_cost(n)),
        "dense_rhd": (rhd_cost(n), rhd_cost(n)),
        "dense_allpairs": (Cost(2, ring_cost(n).buffers),) * 2,
    }
