"""Measures how long each rank waits until all ranks are ready for a bucket, by c10d's store.

Each rank reports its arrival once for each bucket and step (a visit): it adds 1 to the visit's
counter in the c10d store of the default process group. The rank that brings it to the number of
ranks is the last one. It adds 1 to a second counter, of the bucket's complete visits, which the
other ranks poll.

Each rank measures on its own clock how long it waited, from its own arrival to the last one; clocks
of different ranks are never compared. Cost for each rank, bucket and step:

- one `add`;
- while a rank is missing, a read at intervals of 1/`PATIENCE` of the time waited so far, so a
  measured wait is too long by at most that fraction.

One thread for each group does all of this, on a separate connection to the store, so that the
training does not wait.
"""

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_sparse.transport.operation import Operation

PATIENCE = 20
SHORTEST_POLL_S, LONGEST_POLL_S = 2e-4, 5e-3
JOIN_S = 2.0


@dataclass(eq=False)
class _Arrival:
    """This rank's arrival at a bucket.

    Attributes:
        bucket: its name.
        visit: how many times this rank has arrived at the bucket, this time included.
        event: on CUDA, recorded after the work that computes the gradients.
        counted_s: when the arrival was counted, on this rank's clock; 0 before.
        waited: the seconds from then to the last rank's arrival; set by the thread.
    """

    bucket: str
    visit: int
    event: torch.cuda.Event | None
    counted_s: float = 0.0
    waited: Future[float] = field(default_factory=Future)

    @property
    def key(self) -> str:
        """The store's key of the visit's counter of ranks."""
        return f"{self.bucket}/{self.visit}"

    @property
    def complete_key(self) -> str:
        """The store's key of the bucket's counter of complete visits."""
        return f"{self.bucket}/complete"


class StoreArrivalCounter:
    """Counts in a store. Making one is not collective: the ranks share `prefix`.

    Args:
        store: a connection for this counter alone.
        prefix: of the keys; the same on all ranks of the group, and unique to the group.
        world_size: ranks of the group.
        device: of the gradients.
        operation: name -> an `Operation`, which makes the error if the store is gone.
    """

    def __init__(
        self,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        prefix: str,
        world_size: int,
        device: torch.device,
        operation: Callable[[str], Operation],
    ) -> None:
        self._store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            prefix, store
        )
        self._world_size = world_size
        self._device = device
        self._operation = operation
        self._incoming: list[_Arrival] = []  # reported, and not yet seen by the thread
        self._open: list[_Arrival] = []  # visits to which a rank has not come yet; the thread's
        self._visits: Counter[str] = Counter()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._main, name="megatron_sparse_arrivals", daemon=True
        )
        self._thread.start()
        # A thread that is in the store's C++ code at interpreter shutdown would crash the process.
        atexit.register(self.close)

    def arrive(self, bucket: str) -> Future[float]:
        """See `Arrive`. On CUDA the rank arrives when the current stream's queued work is done."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._visits[bucket] += 1
        arrival = _Arrival(bucket, self._visits[bucket], event)
        with self._wake:
            self._incoming.append(arrival)
            self._wake.notify()
        return arrival.waited

    def close(self) -> None:
        """Ends the thread. Waits for its current call to the store, at most `JOIN_S`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(JOIN_S)
        atexit.unregister(self.close)

    def _main(self) -> None:
        """The thread: counts new arrivals, and polls whether open visits are complete."""
        while True:
            with self._wake:
                if self._closing:
                    return
                if not self._incoming:
                    self._wake.wait(self._interval_s())
                self._open += self._incoming
                self._incoming.clear()
            for arrival in self._open:
                self._serve(arrival)
            self._open = [arrival for arrival in self._open if not arrival.waited.done()]

    def _interval_s(self) -> float | None:
        """Seconds until the next poll of open visits; None, for ever, if there are none."""
        if not self._open:
            return None
        now_s = time.perf_counter()
        waits = [now_s - arrival.counted_s for arrival in self._open]
        return min(max(min(waits) / PATIENCE, SHORTEST_POLL_S), LONGEST_POLL_S)

    def _serve(self, arrival: _Arrival) -> None:
        """Counts an arrival, if it is new; sets its wait, if all ranks have arrived.

        If the store is gone, the wait ends with an error.
        """
        try:
            if not arrival.counted_s:
                self._count(arrival)
            now_s = time.perf_counter()
            if not arrival.waited.done() and self._completed(arrival):
                arrival.waited.set_result(now_s - arrival.counted_s)
        except RuntimeError as error:  # the store is gone
            operation = self._operation(f"the arrival of all ranks at bucket {arrival.bucket}")
            if not arrival.waited.done():  # done: only `delete_key` has failed, which does no harm
                arrival.waited.set_exception(operation.error(error))

    def _count(self, arrival: _Arrival) -> None:
        """Adds 1 to the visit's counter; if this rank is the last, marks the visit as complete."""
        if arrival.event is not None:
            arrival.event.synchronize()
        count = self._store.add(arrival.key, 1)
        arrival.counted_s = time.perf_counter()
        if count == self._world_size:
            # Visits complete in order, since later ones still lack this rank: a count suffices.
            self._store.add(arrival.complete_key, 1)
            arrival.waited.set_result(0.0)
            self._store.delete_key(arrival.key)

    def _completed(self, arrival: _Arrival) -> bool:
        """Whether all ranks have arrived at this visit."""
        # `get` alone would block while the key is missing; `add` of 0 would write to a file store.
        key = arrival.complete_key
        return self._store.check([key]) and int(self._store.get(key)) >= arrival.visit
