"""Threads that wait for operations that cannot be polled.

Unlike the threads of a `ThreadPoolExecutor` they are daemons. If a rank is stopped, gloo blocks a
thread until the timeout; a daemon thread does not keep the process from ending meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Task = tuple[Callable[[], None], "Future[None]"]


class Waiters:
    """See the module's docstring. Tasks start in the order of `submit`.

    Args:
        most: the largest number of threads; they are started on demand.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def submit(self, wait: Callable[[], None]) -> Future[None]:
        """Queues `wait` for a thread to call. Submit from one thread at a time."""
        waiting: Future[None] = Future()
        self._tasks.put((wait, waiting))
        if not self._idle.acquire(blocking=False) and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._main, name="megatron_sparse_wait", daemon=True).start()
        return waiting

    def close(self) -> None:
        """Ends every thread after its current task. Does not wait for the tasks."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _main(self) -> None:
        while (task := self._tasks.get()) is not None:
            wait, waiting = task
            try:
                waiting.set_result(wait())
            except BaseException as error:  # raised by the future's `result`
                waiting.set_exception(error)
            # The task may hold large tensors: free them before the next one starts.
            del task, wait, waiting
            self._idle.release()
