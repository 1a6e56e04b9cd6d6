"""Works of a `VirtualCluster`, and `arrival_counter` on it: the same decisions, on modelled clocks.

A rank arrives at its modelled time, and counting takes no time. A MODEL, like the cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from megatron_sparse.transport.base import Grace


class VirtualWork:
    """See `Work`. Done when the cluster has delivered everything that belongs to it.

    Args:
        rank: in the cluster.
        clock_s: the modelled clock of each rank of the cluster, in seconds.
        what: the operation, for errors.
    """

    def __init__(self, rank: int, clock_s: list[float], what: str) -> None:
        self.rank = rank
        self.what = what
        self.undelivered = 0
        self.done_s = clock_s[rank]
        self.waits_for: Counter[str] = Counter()
        self._clock_s = clock_s

    def ready(self) -> bool:
        """See `Work`."""
        return self.undelivered == 0

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`; the cluster resumes the rank by itself."""

    def finish(self) -> None:
        """Advances the rank's modelled clock to the work's end."""
        assert self.ready(), "the cluster resumes a rank only when its work is done"
        self._clock_s[self.rank] = max(self._clock_s[self.rank], self.done_s)


Visit = tuple[tuple[int, ...], str, int]
"""The ranks of a group, a bucket's name, and how many times a rank has arrived at it."""


class VirtualArrival(VirtualWork):
    """See `Arrival`. Everything in it is known once all ranks have arrived."""

    def __init__(self, rank: int, clock_s: list[float], grace: Grace | None) -> None:
        super().__init__(rank, clock_s, "arrival")
        self.came_s = clock_s[rank]
        self.grace = grace
        self.straggler: int | None = None
        self._waited: Future[float] = Future()
        if grace is not None:
            self.undelivered = 1
            self.waits_for["the other ranks"] = 1

    def waited(self) -> Future[float]:
        """See `Arrival`; modelled seconds."""
        return self._waited

    def decide(self, straggler: int | None, done_s: float, last_s: float) -> None:
        """Sets the outcome, once all ranks have arrived."""
        self.straggler = straggler
        self.done_s, self.undelivered = done_s, 0
        self._waited.set_result(last_s - self.came_s)


class VirtualArrivalCounter:
    """See `ArrivalCounter`; each rank has one.

    Args:
        rank: in the cluster.
        ranks: of the group, in order: the cluster's ranks that arrive.
        clock_s: the modelled clock of each rank of the cluster, in seconds.
        pending: the arrivals of every visit at which ranks are missing, shared by all ranks.
            Mutated.
        resume: called with the arrivals of each visit that has been decided.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        clock_s: list[float],
        pending: dict[Visit, list[VirtualArrival]],
        resume: Callable[[list[VirtualArrival]], None],
    ) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._clock_s = clock_s
        self._pending = pending
        self._resume = resume
        self._visits: Counter[str] = Counter()

    def arrive(self, bucket: str, grace: Grace | None) -> VirtualArrival:
        """See `ArrivalCounter`."""
        self._visits[bucket] += 1
        visit = self._ranks, bucket, self._visits[bucket]
        own = VirtualArrival(self._rank, self._clock_s, grace)
        arrived = self._pending.setdefault(visit, [])
        arrived.append(own)
        if len(arrived) == len(self._ranks):
            del self._pending[visit]
            _decide(arrived, self._ranks)
            self._resume(arrived)
        return own

    def close(self) -> None:
        """See `ArrivalCounter`; nothing to close here."""


def _decide(arrived: list[VirtualArrival], ranks: Sequence[int]) -> None:
    """Decides in the order of modelled time; at equal times the higher rank is first."""
    arrived = sorted(arrived, key=lambda arrival: (arrival.came_s, -arrival.rank))
    last, second = arrived[-1], arrived[-2:][0]
    straggler = ranks.index(last.rank)
    grace_s = math.inf if second.grace is None else second.grace(straggler)
    named_s = second.came_s + grace_s
    is_named = len(arrived) > 1 and last.came_s > named_s
    for arrival in arrived:
        named, done_s = (straggler, named_s) if is_named else (None, last.came_s)
        arrival.decide(named, done_s, last.came_s)
