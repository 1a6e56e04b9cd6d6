"""Who is there: ranks draw tickets as they become ready, in a store and off the training's path.

One ticket for each rank, bucket and step, drawn from a counter in the c10d store that the ranks met
at. A ticket adds 2^32 and its rank: so the counter says how many have come and, when one is
missing, which. Whoever draws the last ticket but one thereby knows the straggler. It may name it at
once, or give it some grace; the straggler, should it come in time, says that nobody is missing.
Both say so by a compare-and-set on one key, which everybody reads: whoever was first has decided,
for all of them. Nobody who has not come yet is waited for.

How long before the last one a rank was ready is what it sees on its own clock between its own
ticket and the last one; no clocks are compared. Cost for each rank, bucket and step: one `add`, and
a `check` now and then while a rank is missing, at intervals of 1/`PATIENCE` of the time waited so
far, so that waits are too long by that part at most; where a decision is asked for also one
`compare_set` or `get`. All by one thread for each group, on a connection of its own.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_sparse.transport.process_group import Operation

TICKET = 1 << 32
PATIENCE = 20
SHORTEST_POLL_S, LONGEST_POLL_S = 2e-4, 5e-3
JOIN_S = 2.0
NOBODY = -1
"""As a decision: nobody is missing."""

Grace = Callable[[int], float]
"""Seconds that a missing rank is waited for before it is named; infinity for ever."""


class Arrival(Protocol):
    """A rank's readiness for one bucket in one step; a `Work` that ends with the decision.

    Attributes:
        straggler: once finished, the rank that the others go on without; None for nobody.
    """

    straggler: int | None

    def ready(self) -> bool:
        """See `Work`."""
        ...

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        ...

    def finish(self) -> None:
        """See `Work`."""
        ...

    def waited(self) -> Future[float]:
        """Seconds from this rank's readiness to the last one's; 0 for the last. Not in a hurry."""
        ...


class Arrivals(Protocol):
    """Where the ranks of one group draw their tickets."""

    def arrive(self, bucket: str, grace: Grace | None) -> Arrival:
        """Draws this rank's ticket. Does not block. In the same order on all ranks.

        Args:
            bucket: its name; the n-th call of each rank for a bucket is the n-th of all.
            grace: asks for a decision; on every rank or on none. Called on the rank that draws the
                last ticket but one, perhaps by another thread.
        """
        ...

    def close(self) -> None:
        """Ends it; arrivals under way stay without answer."""
        ...


class StoreArrival:
    """See `Arrival`. Made by `StoreArrivals`, whose thread writes to it."""

    def __init__(
        self,
        bucket: str,
        visit: int,
        grace: Grace | None,
        operation: Operation,
        event: torch.cuda.Event | None,
    ) -> None:
        self.bucket = bucket
        self.visit = visit
        self.key = f"{bucket}/{visit}"
        self.grace = grace
        self.operation = operation
        self.straggler: int | None = None
        self.decided: Future[int | None] = Future()
        self.named_at_s: float | None = None
        self.missing = NOBODY
        self.drawn_s = 0.0
        self._event = event
        self._waited: Future[float] = Future()
        if grace is None:
            self.decided.set_result(None)

    def await_device(self) -> None:
        """Blocks until the device has made the gradients; at once on a CPU."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_settled(self) -> bool:
        """Whether all that can be asked of it is known."""
        return self.decided.done() and self._waited.done()

    def ready(self) -> bool:
        """See `Work`; also true when there is nothing left to wait for."""
        return self.decided.done() or self.operation.is_hopeless()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        self.decided.add_done_callback(lambda _: wake())

    def finish(self) -> None:
        """See `Work`.

        Raises:
            CommunicationError: a rank is gone, several did not come in time, or the store is gone.
        """
        while not self.ready():
            time.sleep(SHORTEST_POLL_S)
        if not self.decided.done():
            raise self.operation.error()
        self.straggler = self.decided.result()

    def waited(self) -> Future[float]:
        """See `Arrival`."""
        return self._waited


class StoreArrivals:
    """See `Arrivals`. Making one is not collective; the ranks meet under `prefix`.

    Args:
        store: a connection that nobody else uses; `prefix` is put before its keys.
        prefix: the same on all ranks of the group and in no other group.
        rank: of this process in the group.
        world_size: ranks of the group.
        device: of the gradients.
        operation: names what may fail, with its deadline and its watch over the group.
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
        # A thread that is in the store when the interpreter goes would end the process badly.
        atexit.register(self.close)

    def arrive(self, bucket: str, grace: Grace | None) -> StoreArrival:
        """See `Arrivals`. On CUDA the rank counts as ready when the current stream gets there."""
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
        """See `Arrivals`. Waits for the thread, which at most is in one call of the store."""
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
        """Those that a rank is missing at.

        Whoever has come somewhere has come wherever it had to come before. That ends those whose
        keys were deleted before they were read, which needs a thread that was held up for steps.
        """
        done = [number for number, arrival in enumerate(arrivals) if arrival.waited().done()]
        for arrival in arrivals[: max(done, default=0)]:
            if not arrival.waited().done():
                arrival.waited().set_result(time.perf_counter() - arrival.drawn_s)
        return [arrival for arrival in arrivals if not arrival.is_settled]

    def _interval_s(self) -> float | None:
        """Until the next look; None where there is nothing to look for."""
        if not self._open:
            return None
        now_s = time.perf_counter()
        waits = [now_s - arrival.drawn_s for arrival in self._open]
        interval_s = min(max(min(waits) / PATIENCE, SHORTEST_POLL_S), LONGEST_POLL_S)
        named = [a.named_at_s - now_s for a in self._open if a.named_at_s is not None]
        return max(0.0, min([interval_s, *named]))

    def _serve(self, arrival: StoreArrival, *, fresh: bool) -> None:
        try:
            if fresh:
                self._draw(arrival)
            if not arrival.is_settled:
                self._look(arrival)
        except RuntimeError as error:  # the store is gone
            failure = arrival.operation.error(error)
            for answer in (arrival.decided, arrival.waited()):
                if not answer.done():
                    answer.set_exception(failure)

    def _draw(self, arrival: StoreArrival) -> None:
        arrival.await_device()
        n = self._world_size
        counter = self._store.add(arrival.key, TICKET + self._rank)
        arrival.drawn_s = time.perf_counter()
        count, rank_sum = divmod(counter, TICKET)
        if count == n:
            if arrival.grace is not None:
                self._decide(arrival, NOBODY)
            self._store.set(f"{arrival.key}/all", "1")
            arrival.waited().set_result(0.0)
            self._forget_before_last(arrival)
        elif count == n - 1 and arrival.grace is not None:
            arrival.missing = n * (n - 1) // 2 - rank_sum
            arrival.named_at_s = arrival.drawn_s + arrival.grace(arrival.missing)

    def _look(self, arrival: StoreArrival) -> None:
        """Whether the last one has come, and whether it is known how to go on."""
        now_s = time.perf_counter()
        if not arrival.waited().done() and self._store.check([f"{arrival.key}/all"]):
            arrival.waited().set_result(now_s - arrival.drawn_s)
        if arrival.decided.done():
            return
        if self._store.check([f"{arrival.key}/without"]):
            self._decide(arrival, NOBODY)
        elif arrival.named_at_s is not None and now_s >= arrival.named_at_s:
            self._decide(arrival, arrival.missing)

    def _decide(self, arrival: StoreArrival, proposal: int) -> None:
        """Proposes, and takes what holds: the first proposal of all ranks."""
        arrival.named_at_s = None
        held = int(self._store.compare_set(f"{arrival.key}/without", "", str(proposal)))
        arrival.decided.set_result(None if held == NOBODY else held)

    def _forget_before_last(self, arrival: StoreArrival) -> None:
        """Deletes the keys of two visits ago: everybody has come twice since, and has read them."""
        if arrival.visit > 2:
            for end in ("", "/all", "/without"):
                self._store.delete_key(f"{arrival.bucket}/{arrival.visit - 2}{end}")
