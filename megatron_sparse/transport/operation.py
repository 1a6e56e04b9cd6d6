"""A posted operation: its name, its deadline, the typed error of its failure, and its `Work`s."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron_sparse.errors import CommunicationError, first_line
from megatron_sparse.transport.liveness import PeerLiveness

POLL_S = 0.01
"""How often `finish` checks whether the operation cannot succeed any more."""

_Task = tuple[Callable[[], Any], "Future[Any]"]


class Operation:
    """A posted operation's name, its deadline, and how its failure becomes a typed error.

    Args:
        name: the operation and its peers, for errors.
        liveness: knows which of the group's ranks are gone; None if `scheme.watch_peers` is off.
        timeout_s: seconds that it may take.
    """

    def __init__(self, name: str, liveness: PeerLiveness | None, timeout_s: float) -> None:
        self.name = name
        self._liveness = liveness
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def is_hopeless(self) -> bool:
        """Whether the operation cannot succeed any more: a rank is gone, or its time is up."""
        return self.is_late() or (
            self._liveness is not None and self._liveness.trouble() is not None
        )

    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() >= self._deadline_s

    def error(self, cause: Exception | None = None) -> CommunicationError:
        """Makes the error to raise; may block briefly to learn which rank is at fault.

        Args:
            cause: the backend's exception; None if the backend still waits.
        """
        is_late = self.is_late() or "Timed out" in str(cause)  # gloo's text for its own timeout
        if cause is None or is_late:
            got = f"no answer within {self._timeout_s:g} s"
        else:
            got = first_line(cause)
        trouble = None
        if self._liveness is not None:
            # An early failure may come before the side channel's news of the lost rank: wait.
            trouble = self._liveness.trouble() if is_late else self._liveness.await_trouble()
        return CommunicationError(
            f"{self.name} failed" + (f": {trouble}" if trouble else ""),
            expected="every rank of the group takes part within scheme.timeout_s "
            f"({self._timeout_s:g} s)",
            got=trouble or got,
            remedy="look at that rank's log, and restart from the last checkpoint"
            if trouble
            else "look at the other ranks' logs for the one that stopped first or does something "
            "else; raise scheme.timeout_s if one is only slow",
        )


class WaitedWork:
    """All gloo works of one operation, as one `Work`; a thread (`Waiters`) waits for them.

    Args:
        operation: the operation's name and deadline.
        waiting: the thread's future: done when all works have finished or one has failed.
        check: checks the received bytes; called when all have finished.
    """

    def __init__(
        self, operation: Operation, waiting: Future[Any], check: Callable[[], None] | None = None
    ) -> None:
        self.operation = operation
        self._waiting = waiting
        self._check = check

    def ready(self) -> bool:
        """See `Work`; also true if the operation cannot succeed any more: `finish` raises then."""
        return self._waiting.done() or self.operation.is_hopeless()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        self._waiting.add_done_callback(lambda _: wake())

    def finish(self) -> None:
        """See `Work`."""
        while not self.ready():
            with suppress(TimeoutError):
                self._waiting.exception(POLL_S)  # waits at most `POLL_S`, and raises nothing else
        if not self._waiting.done():  # a rank is gone, or the time is up
            raise self.operation.error()
        try:
            self._waiting.result()
        except RuntimeError as error:
            raise self.operation.error(error) from error
        if self._check is not None:
            self._check()


class StreamWork:
    """Works of NCCL as one `Work`; `finish` lets the current stream wait for all of them."""

    def __init__(self, operation: Operation, works: Sequence[dist.Work | None]) -> None:
        self._operation = operation
        self._works = works

    def ready(self) -> bool:
        """See `Work`. Always true: `finish` only lets the stream wait."""
        return True

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        wake()

    def finish(self) -> None:
        """See `Work`."""
        try:
            wait_all(self._works)
        except RuntimeError as error:
            raise self._operation.error(error) from error


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Waits for all works of c10d."""
    for work in works:
        assert work is not None, "only members of the group take part"
        work.wait()


class Waiters:
    """Threads that wait for operations that cannot be polled; they are started on demand.

    Unlike the threads of a `ThreadPoolExecutor` they are daemons. If a rank is stopped, gloo blocks
    a thread until the timeout; a daemon thread does not keep the process from ending meanwhile.

    Every task has a thread at once. Operations of later buckets may wait for a rank that itself
    waits for an earlier bucket's: if those had taken all threads, nothing would end.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def submit[T](self, wait: Callable[[], T]) -> Future[T]:
        """Lets a thread call `wait`, and starts one if none is idle; returns the future result.

        Not thread-safe: submit from one thread at a time.
        """
        waiting: Future[T] = Future()
        self._tasks.put((wait, waiting))
        if not self._idle.acquire(blocking=False):  # a semaphore: it counts idle threads
            self._threads += 1
            threading.Thread(target=self._main, name="megatron_sparse_wait", daemon=True).start()
        return waiting

    def close(self) -> None:
        """Ends every thread after its current task. Does not wait for the tasks."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _main(self) -> None:
        """A thread: calls one task after another, until `close` queues None."""
        while (task := self._tasks.get()) is not None:
            wait, waiting = task
            try:
                waiting.set_result(wait())
            except BaseException as error:  # raised by the future's `result`
                waiting.set_exception(error)
            # The task may hold large tensors: free them before the next one starts.
            del task, wait, waiting
            self._idle.release()
