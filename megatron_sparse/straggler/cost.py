"""Alpha-beta costs of all-reduces with a straggler, and when skipping it pays.

StragglAR, table 1 and appendices B and F. s bytes, n ranks, alpha seconds a round, beta seconds a
byte. The best case is the time after the straggler's arrival when it came late enough for the early
ranks' part to be hidden; the worst case when it was not late at all. Algorithms that know of no
straggler have one time for both.

A straggler-aware collective does `early_s` seconds of work among the early ranks, which a delay may
hide, and takes `after_s` more after the straggler has arrived; the ordinary collective takes
`otherwise_s` from that moment. A straggler that is late by D then gains

    gain(D) = otherwise_s - after_s - max(0, early_s - D)

which is negative for D below the critical delay early_s + after_s - otherwise_s and does not grow
beyond the ideal delay, early_s. If another rank than the expected one is last, nothing is hidden: D
counts as 0, and the loss is that of table 1's worst case. So the rule is: the mean over past steps
of min(D, early_s), 0 in steps in which another rank was last, must exceed the critical delay. This
is the product of predicted delay and persistence, with delays cut off at the useful length.

Deviations: exact for every n, while the paper drops terms for large n; the ring to beat has the
measured links of the backend's own collective; sparse collectives are added. Times are those of the
alpha-beta model: codecs and the host count only as far as they are in the measured alpha and beta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_sparse.straggler.detector import Readiness, delay_s, last_rank
from megatron_sparse.straggler.generate import make_schedule
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


@dataclass(frozen=True)
class SplitTimes:
    """One bucket with and without straggler-awareness, in seconds; see the module's docstring.

    Attributes:
        early_s: the part that a delay can hide; also the ideal delay.
        after_s: from the arrival of a straggler that was at least that late to the end.
        otherwise_s: from the straggler's arrival to the end, if all ranks wait for it.
    """

    early_s: float
    after_s: float
    otherwise_s: float

    @property
    def critical_s(self) -> float:
        """The delay above which the straggler-aware collective wins; negative if it never loses.

        Of the dense one and the ring it is StragglAR's appendix B, exactly. The paper goes on to
        simplify it for large n, which is 1 % off for 64 ranks and 5 % for 8.
        """
        return self.early_s + self.after_s - self.otherwise_s

    @property
    def can_win(self) -> bool:
        """Whether any delay is long enough."""
        return self.after_s < self.otherwise_s


def expected_delay_s(steps: Sequence[Readiness], straggler: int, most_s: float = math.inf) -> float:
    """Mean over past steps of the delay of `straggler`: 0 where another rank was the last one.

    Args:
        steps: of one bucket, at least one.
        straggler: the rank that is expected to be last.
        most_s: longer delays count as this one.
    """
    delays_s = []
    for ready_s in steps:
        was_last = last_rank(ready_s) == straggler
        delays_s.append(min(delay_s(ready_s), most_s) if was_last else 0.0)
    return fmean(delays_s)


def dense_split(n: int, buffer_bytes: float, link: Link, dense: Link) -> SplitTimes:
    """The dense straggler-aware collective against the backend's own, which waits.

    Args:
        n: ranks.
        buffer_bytes: of the bucket.
        link: between any two ranks.
        dense: of the backend's own collective, modelled as a ring.
    """
    rounds = len(make_schedule(n))  # of a chunk each
    return SplitTimes(
        # The early ranks' reduce-scatter is priced as a ring's.
        early_s=Cost(n - 2, (n - 2) / (n - 1)).time_s(buffer_bytes, link),
        after_s=Cost(rounds, rounds / (n - 1)).time_s(buffer_bytes, link),
        otherwise_s=Cost(2 * (n - 1), 2 * (n - 1) / n).time_s(buffer_bytes, dense),
    )


def sparse_split(n: int, message_bytes: float, sum_bytes: float, link: Link) -> SplitTimes:
    """The sparse collective, `straggler_direct`, against `direct`; bytes of the busiest port.

    The early ranks exchange their messages' pieces and gather the sum of them all while they wait.
    After the arrival the straggler receives that sum and sends its message; then follow the rounds
    in which only chunks of the message spread. `direct` exchanges and gathers after all ranks have
    arrived. The sum of the early ranks is priced like the sum of all, its upper bound.

    Args:
        n: ranks.
        message_bytes: one rank's whole message.
        sum_bytes: the whole sum, encoded.
        link: between any two ranks.
    """
    both = message_bytes + sum_bytes
    rounds = len(make_schedule(n))
    # In all but n - 1 of the rounds, a chunk of the message is all that travels.
    spread_bytes = (rounds - (n - 1)) / (n - 1) * message_bytes
    # In the n - 1 others the straggler's port carries its message one way and the sum the other.
    after_bytes = max(message_bytes, sum_bytes) + spread_bytes
    return SplitTimes(
        early_s=Cost(2 * (n - 2), (n - 2) / (n - 1)).time_s(both, link),
        after_s=Cost(1 + rounds, 1).time_s(after_bytes, link),  # 1: the handshake
        otherwise_s=Cost(2 * n, (n - 1) / n).time_s(both, link),
    )
