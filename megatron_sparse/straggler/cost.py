"""Alpha-beta costs of all-reduces with a straggler, and when skipping it pays.

StragglAR, table 1 and appendices B and F. s bytes, n ranks, alpha seconds a round, beta seconds a
byte. Early ranks are all ranks but the straggler. The best case is the time after the straggler's
arrival when it was so late that the early ranks had finished their own work; the worst case when it
was not late at all. Algorithms without a straggler have one time for both.

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
alpha-beta model: codecs and the CPU count only as far as they are in the measured alpha and beta.
"""

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
        """The delay above which the straggler-aware collective is faster; negative if it always is.

        For the dense collective against the ring this is StragglAR's appendix B, exactly. The paper
        then simplifies it for large n, which is 1 % off for 64 ranks and 5 % for 8.
        """
        return self.early_s + self.after_s - self.otherwise_s

    @property
    def can_win(self) -> bool:
        """Whether any delay is long enough."""
        return self.after_s < self.otherwise_s


def expected_delay_s(steps: Sequence[Readiness], straggler: int, most_s: float = math.inf) -> float:
    """Mean delay of `straggler` over past steps; a step in which another rank was last counts as 0.

    `steps`: for each past step, at least one, when each rank was ready for one bucket. Delays
    longer than `most_s` count as `most_s`.
    """
    delays_s = []
    for ready_s in steps:
        was_last = last_rank(ready_s) == straggler
        delays_s.append(min(delay_s(ready_s), most_s) if was_last else 0.0)
    return fmean(delays_s)


def dense_split(n: int, buffer_bytes: float, link: Link, dense: Link) -> SplitTimes:
    """Compares the dense straggler-aware collective with the backend's own, which waits for all.

    `link` joins any two of n ranks; `dense` is the link of the backend's collective, a ring.
    """
    rounds = len(make_schedule(n))  # each moves a chunk, 1 / (n - 1) of the buffer
    return SplitTimes(
        # The early ranks' reduce-scatter is priced as a ring's.
        early_s=Cost(n - 2, (n - 2) / (n - 1)).time_s(buffer_bytes, link),
        after_s=Cost(rounds, rounds / (n - 1)).time_s(buffer_bytes, link),
        otherwise_s=Cost(2 * (n - 1), 2 * (n - 1) / n).time_s(buffer_bytes, dense),
    )


def sparse_split(n: int, message_bytes: float, sum_bytes: float, link: Link) -> SplitTimes:
    """Compares `straggler_direct` with `direct`, by the bytes of the busiest port.

    While they wait, the early ranks exchange their messages and gather the sum of these (priced as
    the sum of all ranks, its upper bound). After its arrival the straggler receives that sum and
    sends its message in n - 1 rounds. The other rounds only spread chunks of its message. `direct`
    exchanges and gathers after all ranks have arrived.

    `message_bytes` are one rank's message, `sum_bytes` the encoded sum; `link` joins any two ranks.
    """
    both_bytes = message_bytes + sum_bytes  # of the exchange and the gather
    rounds = len(make_schedule(n))
    spread_bytes = (rounds - (n - 1)) / (n - 1) * message_bytes
    # The straggler's port carries its message one way and the sum the other way at the same time.
    after_bytes = max(message_bytes, sum_bytes) + spread_bytes
    return SplitTimes(
        # Rounds of an exchange, a gather and two agreements: among n - 1 ranks, then among all.
        early_s=Cost(2 * (n - 1), (n - 2) / (n - 1)).time_s(both_bytes, link),
        after_s=Cost(1 + rounds, 1).time_s(after_bytes, link),  # 1: the handshake
        otherwise_s=Cost(2 * n, (n - 1) / n).time_s(both_bytes, link),
    )
