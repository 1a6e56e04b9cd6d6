"""Makes the schedule for a number of ranks and a straggler."""

from __future__ import annotations

from functools import lru_cache

from megatron_sparse.straggler.doubling import doubling_rounds
from megatron_sparse.straggler.matching import matching_rounds
from megatron_sparse.straggler.schedule import Round, Schedule, Transfer, check_ranks


def make_schedule(world_size: int, straggler: int | None = None) -> Schedule:
    """The exchanges after the straggler's arrival.

    Deterministic, so that every rank can make its own. Powers of two take milliseconds, others as
    long as their matchings: about a second for 40 ranks, and growing with the fourth power.

    Args:
        world_size: at least 2.
        straggler: a rank; the last one by default.

    Raises:
        ConfigError: there is no such rank.
    """
    straggler = world_size - 1 if straggler is None else straggler
    check_ranks(world_size, straggler)
    # The generators make rank n - 1 the straggler; renumber, with the others in order.
    names = [rank for rank in range(world_size) if rank != straggler] + [straggler]
    rounds = tuple(
        tuple(Transfer(names[t.sender], names[t.receiver], t.chunk) for t in transfers)
        for transfers in _rounds(world_size)
    )
    return Schedule(world_size, straggler, rounds)


@lru_cache(maxsize=64)
def _rounds(n: int) -> tuple[Round, ...]:
    is_power_of_two = n & (n - 1) == 0
    return tuple(doubling_rounds(n) if is_power_of_two else matching_rounds(n))
