"""Counts the ranks that are ready for a bucket, in a store and off the training's path.

Each rank reports its arrival once for each bucket and step: it adds 2^32 + its rank to a counter in
the c10d store at which the ranks met. The counter's upper half is the number of ranks that have
arrived; its lower half is the sum of their numbers, which names the missing rank when only one is
missing. The second-to-last rank to arrive therefore knows the straggler. It may name it at once, or
give it some grace; a straggler that arrives in time reports that no rank is missing. Both report by
a compare-and-set on one key, which every rank reads: the first rank to set it decides for all. The
decision never waits for late ranks.

Each rank measures on its own clock how long it waited, from its own arrival to the last one; clocks
of different ranks are never compared. Cost for each rank, bucket and step:

- one `add`;
- while a rank is missing, a `check` at intervals of 1/`PATIENCE` of the time waited so far, so a
  measured wait is too long by at most that fraction;
- one `compare_set` if the caller asks for a decision.

One thread for each group does all of this, on its own connection.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from megatron_sparse.transport.base import Grace
from megatron_sparse.transport.operation import Operation, WaitedWork

ONE_ARRIVAL = 1 << 32
"""One arrival in the counter's upper half; the lower half adds up the ranks' numbers."""
PATIENCE = 20
SHORTEST_POLL_S, LONGEST_POLL_S = 2e-4, 5e-3
JOIN_S = 2.0
NOBODY = -1
"""The decision that no rank is missing."""


class StoreArrival(WaitedWork):
    """See `Arrival`. Made by `StoreArrivalCounter`; its thread writes the results."""

    def __init__(
        self,
        bucket: str,
        visit: int,
        grace: Grace | None,
        operation: Operation,
        event: torch.cuda.Event | None,
    ) -> None:
        self.decided: Future[int | None] = Future()
        super().__init__(operation, self.decided)
        self.bucket = bucket
        self.visit = visit
        self.key = f"{bucket}/{visit}"
        self.grace = grace
        self.straggler: int | None = None
        self.named_at_s: float | None = None
        self.missing = NOBODY
        self.counted_s = 0.0
        self.event = event
        self._waited: Future[float] = Future()
        if grace is None:
            self.decided.set_result(None)

    @property
    def is_settled(self) -> bool:
        """Whether both the decision and the waited time are known."""
        return self.decided.done() and self._waited.done()

    def finish(self) -> None:
        """See `Work`.

        Raises:
            CommunicationError: a rank is gone, several did not come in time, or the store is gone.
        """
        super().finish()
        self.straggler = self.decided.result()

    def waited(self) -> Future[float]:
        """See `Arrival`."""
        return self._waited


class StoreArrivalCounter:
    """See `ArrivalCounter`. Making one is not collective: the ranks find each other by `prefix`.

    Args:
        store: a connection for this counter alone.
        prefix: of its keys; the same on all ranks of the group, and unique to the group.
        rank: of this process in the group.
        world_size: ranks of the group.
        device: of the gradients.
        operation: name -> the operation that fails when ranks do not arrive.
    """

    def __init__(
        self,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        prefix: str,
        rank: int,
        world_size: int,
        device: torch.device,
        operation: Callable[[str], Operation],
    ) -> None:
        self._store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            prefix, store
        )
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._operation = operation
        self._incoming: deque[StoreArrival] = deque()
        self._open: list[StoreArrival] = []
        self._visits: Counter[str] = Counter()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._main, name="megatron_sparse_arrivals", daemon=True
        )
        self._thread.start()
        # A thread that is in the store's C++ code at interpreter shutdown would crash the process.
        atexit.register(self.close)

    def arrive(self, bucket: str, grace: Grace | None) -> StoreArrival:
        """See `ArrivalCounter`. On CUDA the rank is ready when the current stream gets this far."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._visits[bucket] += 1
        operation = self._operation(f"the arrival of all ranks but one at bucket {bucket}")
        arrival = StoreArrival(bucket, self._visits[bucket], grace, operation, event)
        with self._wake:
            self._incoming.append(arrival)
            self._wake.notify()
        return arrival

    def close(self) -> None:
        """See `ArrivalCounter`. Waits at most for the thread's current call to the store."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(JOIN_S)
        atexit.unregister(self.close)

    def _main(self) -> None:
        while True:
            with self._wake:
                if self._closing:
                    return
                if not self._incoming:
                    self._wake.wait(self._interval_s())
                fresh = list(self._incoming)
                self._incoming.clear()
            for arrival in [*self._open, *fresh]:
                self._serve(arrival, fresh=arrival in fresh)
            self._open = self._still_open([*self._open, *fresh])

    def _still_open(self, arrivals: list[StoreArrival]) -> list[StoreArrival]:
        """The arrivals at which a rank is missing.

        Arrivals are in order: when all ranks have arrived at one, they have arrived at every
        earlier one. This settles arrivals whose keys were deleted before this thread read them,
        which happens if the thread was delayed for several steps.
        """
        done = [number for number, arrival in enumerate(arrivals) if arrival.waited().done()]
        for arrival in arrivals[: max(done, default=0)]:
            if not arrival.waited().done():
                arrival.waited().set_result(time.perf_counter() - arrival.counted_s)
        return [arrival for arrival in arrivals if not arrival.is_settled]

    def _interval_s(self) -> float | None:
        """Seconds until the next check; None when no arrival is open."""
        if not self._open:
            return None
        now_s = time.perf_counter()
        waits = [now_s - arrival.counted_s for arrival in self._open]
        interval_s = min(max(min(waits) / PATIENCE, SHORTEST_POLL_S), LONGEST_POLL_S)
        named = [a.named_at_s - now_s for a in self._open if a.named_at_s is not None]
        return max(0.0, min([interval_s, *named]))

    def _serve(self, arrival: StoreArrival, *, fresh: bool) -> None:
        try:
            if fresh:
                self._count(arrival)
            if not arrival.is_settled:
                self._check(arrival)
        except RuntimeError as error:  # the store is gone
            failure = arrival.operation.error(error)
            for answer in (arrival.decided, arrival.waited()):
                if not answer.done():
                    answer.set_exception(failure)

    def _count(self, arrival: StoreArrival) -> None:
        if arrival.event is not None:  # until the device has computed the gradients
            arrival.event.synchronize()
        n = self._world_size
        counter = self._store.add(arrival.key, ONE_ARRIVAL + self._rank)
        arrival.counted_s = time.perf_counter()
        count, rank_sum = divmod(counter, ONE_ARRIVAL)
        if count == n:
            if arrival.grace is not None:
                self._decide(arrival, NOBODY)
            self._store.set(f"{arrival.key}/all", "1")
            arrival.waited().set_result(0.0)
            self._forget_before_last(arrival)
        elif count == n - 1 and arrival.grace is not None:
            arrival.missing = n * (n - 1) // 2 - rank_sum
            arrival.named_at_s = arrival.counted_s + arrival.grace(arrival.missing)

    def _check(self, arrival: StoreArrival) -> None:
        """Asks the store whether the last rank has arrived, and what was decided."""
        now_s = time.perf_counter()
        if not arrival.waited().done() and self._store.check([f"{arrival.key}/all"]):
            arrival.waited().set_result(now_s - arrival.counted_s)
        if arrival.decided.done():
            return
        if self._store.check([f"{arrival.key}/without"]):
            self._decide(arrival, NOBODY)
        elif arrival.named_at_s is not None and now_s >= arrival.named_at_s:
            self._decide(arrival, arrival.missing)

    def _decide(self, arrival: StoreArrival, proposal: int) -> None:
        """Proposes a decision, and takes the first one that any rank proposed."""
        arrival.named_at_s = None
        held = int(self._store.compare_set(f"{arrival.key}/without", "", str(proposal)))
        arrival.decided.set_result(None if held == NOBODY else held)

    def _forget_before_last(self, arrival: StoreArrival) -> None:
        """Deletes the keys of two visits ago: every rank has since arrived twice and read them."""
        if arrival.visit > 2:
            for end in ("", "/all", "/without"):
                self._store.delete_key(f"{arrival.bucket}/{arrival.visit - 2}{end}")
