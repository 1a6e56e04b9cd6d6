"""Works of a `VirtualCluster`, and its counter of arrivals at buckets, on modelled clocks.

A rank arrives at the time of its modelled clock; counting takes no time. A MODEL, like the cluster.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from megatron_sparse.transport.base import Arrive


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
        self.undelivered = 0  # messages of this work; 0: it is ready
        self.done_s = clock_s[rank]  # the modelled end
        self.waits_for: Counter[str] = Counter()  # a peer's missing action -> its messages
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

Arrivals = dict[Visit, list[tuple[float, Future[float]]]]
"""Of every visit at which ranks are missing: each rank's modelled time, and how long it waits."""


def arrival_counter(
    rank: int, ranks: tuple[int, ...], clock_s: list[float], pending: Arrivals
) -> Arrive:
    """Makes the function by which one rank reports its arrivals (`Transport.open_arrival_counter`).

    Args:
        rank: in the cluster.
        ranks: the ranks of the group, numbered in the cluster.
        clock_s: the modelled clock of each rank of the cluster, in seconds.
        pending: arrivals at buckets at which ranks are still missing; shared by all ranks. Mutated.
    """
    visits: Counter[str] = Counter()  # bucket -> this rank's arrivals at it

    def arrive(bucket: str) -> Future[float]:
        """See `Arrive`; modelled seconds, known once all ranks have arrived."""
        visits[bucket] += 1
        visit = ranks, bucket, visits[bucket]
        own_wait = Future[float]()
        arrived = pending.setdefault(visit, [])
        arrived.append((clock_s[rank], own_wait))
        if len(arrived) == len(ranks):
            del pending[visit]
            last_s = max(arrived_s for arrived_s, _ in arrived)
            for arrived_s, wait in arrived:
                wait.set_result(last_s - arrived_s)
        return own_wait

    return arrive
