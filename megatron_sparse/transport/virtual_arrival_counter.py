"""`arrivals` on the VirtualCluster: the same decisions, from the modelled clocks.

A ticket is drawn at the rank's modelled time and takes none itself. A MODEL, like the cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING

from megatron_sparse.transport.arrival_counter import Grace
from megatron_sparse.transport.virtual_rank import VirtualWork

if TYPE_CHECKING:
    from megatron_sparse.transport.virtual import VirtualCluster


class VirtualArrival(VirtualWork):
    """See `Arrival`. Known, like everything here, when all ranks have come to it."""

    def __init__(self, rank: int, cluster: VirtualCluster, grace: Grace | None) -> None:
        super().__init__(rank, cluster, "arrival")
        self.came_s = cluster.clock_s[rank]
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
        """Called once all have come."""
        self.straggler = straggler
        self.done_s, self.undelivered = done_s, 0
        self._waited.set_result(last_s - self.came_s)


class VirtualArrivals:
    """See `Arrivals`; one rank's.

    Args:
        cluster: keeps who has come.
        rank: in it.
    """

    def __init__(self, cluster: VirtualCluster, rank: int) -> None:
        self._cluster = cluster
        self._rank = rank
        self._visits: Counter[str] = Counter()

    def arrive(self, bucket: str, grace: Grace | None) -> VirtualArrival:
        """See `Arrivals`."""
        cluster = self._cluster
        self._visits[bucket] += 1
        visit = bucket, self._visits[bucket]
        own = VirtualArrival(self._rank, cluster, grace)
        came = cluster.arrived[visit]
        came.append(own)
        if len(came) == cluster.topology.world_size:
            del cluster.arrived[visit]
            _decide(came)
            cluster.resume(came)
        return own

    def close(self) -> None:
        """See `Arrivals`: there is nothing to end."""


def _decide(came: list[VirtualArrival]) -> None:
    """By the tickets' order in modelled time; of two at the same time the higher rank is first."""
    came = sorted(came, key=lambda arrival: (arrival.came_s, -arrival.rank))
    last, second = came[-1], came[-2:][0]
    grace_s = math.inf if second.grace is None else second.grace(last.rank)
    named_s = second.came_s + grace_s
    is_named = len(came) > 1 and last.came_s > named_s
    for arrival in came:
        straggler, done_s = (last.rank, named_s) if is_named else (None, last.came_s)
        arrival.decide(straggler, done_s, last.came_s)
