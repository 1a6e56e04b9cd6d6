"""Finds the rank that is ready last, its delay, and whether it will be last again.

Pure functions of times of readiness: for one bucket in one step, the seconds at which each rank was
ready to exchange it, counted from any origin that the ranks share. The straggler is the rank that
was ready last (of several the lowest); its delay is the time from the last but one rank to it
(StragglAR, appendix C, where it is a difference of waiting times).

A straggler is *persistent* if it was last in most steps: the lower end of Wilson's one-sided 95 %
interval for its share of the past steps, at least `MIN_HISTORY`, is above one half.
*Persistence* is the probability that the last rank of a step is last in the next step too.
"""

import math
from collections import Counter
from collections.abc import Sequence

Readiness = Sequence[float]
"""Seconds, one for each rank, of one bucket in one step."""

HISTORY, MIN_HISTORY = 20, 5
"""Past steps that count, and how many it takes to say who will be last."""
Z_95 = 1.6448536269514722
"""Standard deviations that a normal variable exceeds with a probability of 5 %."""
MAJORITY = 0.5


def last_rank(ready_s: Readiness) -> int:
    """The rank that was ready last; of several, the lowest."""
    return max(range(len(ready_s)), key=lambda rank: (ready_s[rank], -rank))


def delay_s(ready_s: Readiness) -> float:
    """The straggler's delay: seconds between the last rank and the last but one; 0 for one rank.

    Example:
        >>> delay_s([1.0, 4.5, 2.0])
        2.5
    """
    if len(ready_s) == 1:
        return 0.0
    *_, second, last = sorted(ready_s)
    return last - second


def share_bound(hits: int, count: int) -> float:
    """Lower end of Wilson's one-sided 95 % interval for a probability: `hits` of `count` events.

    Example:
        Five of five give 0.65, fifteen of twenty 0.57, six of ten 0.35.
    """
    share, z2 = hits / count, Z_95**2
    middle = share + z2 / (2 * count)
    spread = Z_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (middle - spread) / (1 + z2 / count)


def persistent_straggler(steps: Sequence[Readiness]) -> int | None:
    """The rank that was last in most of at least `MIN_HISTORY` steps (Wilson's bound), or None."""
    if len(steps) < MIN_HISTORY:
        return None
    counts = Counter(map(last_rank, steps))  # rank -> steps in which it was last
    # Of ranks that were last equally often, the lowest.
    rank, hits = max(counts.items(), key=lambda item: (item[1], -item[0]))
    return rank if share_bound(hits, len(steps)) > MAJORITY else None
