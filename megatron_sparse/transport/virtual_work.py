"""Works of a `VirtualCluster`, and `arrival_counter` on it: the same waits, on modelled clocks.

A rank arrives at its modelled time, and counting takes no time. A MODEL, like the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future


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


Arrivals = list[tuple[float, Future[float]]]
"""Of a visit so far: each rank's modelled time of arrival, and how long it then waits."""


class VirtualArrivalCounter:
    """See `ArrivalCounter`; each rank has one.

    Args:
        rank: in the cluster.
        ranks: of the group, in order: the cluster's ranks that arrive.
        clock_s: the modelled clock of each rank of the cluster, in seconds.
        pending: the arrivals of every visit at which ranks are missing, shared by all ranks.
            Mutated.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        clock_s: list[float],
        pending: dict[Visit, Arrivals],
    ) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._clock_s = clock_s
        self._pending = pending
        self._visits: Counter[str] = Counter()

    def arrive(self, bucket: str) -> Future[float]:
        """See `ArrivalCounter`; modelled seconds, known once all ranks have arrived."""
        self._visits[bucket] += 1
        visit = self._ranks, bucket, self._visits[bucket]
        own_s, own_wait = self._clock_s[self._rank], Future[float]()
        arrived = self._pending.setdefault(visit, [])
        arrived.append((own_s, own_wait))
        if len(arrived) == len(self._ranks):
            del self._pending[visit]
            last_s = max(came_s for came_s, _ in arrived)
            for came_s, waited in arrived:
                waited.set_result(last_s - came_s)
        return own_wait

    def close(self) -> None:
        """See `ArrivalCounter`; nothing to close here."""
