"""Collects the reports of encode and decode calls, to read many on the CPU at once.

A kernel leaves its report, int64 words such as an error code, on the device; to read it the CPU
waits. Where record sizes are fixed (`slots`), the caller can go on without it and adds the words to
`Reports`: one copy and one wait for all calls on a bucket. CPU tensors need no wait, but their
words are checked at the same point, so that errors do not depend on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

_Waiting = SimpleQueue[tuple[torch.device, torch.cuda.Event, Callable[[], None]]]
Check = Callable[[torch.Tensor], None]
"""Takes a call's words on the CPU and raises the error that they hold, if any."""
type Copies[T] = Generator[HostCopy, None, T]
"""Yields each copy that has to end before it goes on, so that a driver can do other work meanwhile.
"""


class Reports:
    """Reports of encode and decode calls that have not been checked yet, all on one device."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.Tensor, Check]] = []
        self._statuses: list[torch.Tensor] = []

    def add(self, words: torch.Tensor, check: Check, *, is_status: bool = True) -> None:
        """Adds the report of a call, int64 words; `read` checks them, in the order of the calls.

        `is_status`: the first word is an error code, 0 for none; else the words are results, such
        as counts.
        """
        self._calls.append((words, check))
        if is_status:
            self._statuses.append(words[:1])

    def spoil_(self, records: torch.Tensor) -> None:
        """Makes records invalid if any call so far has failed, so that receivers refuse them.

        Sets their first byte to 0, with which no valid record begins, without waiting on the CPU.
        They are uint8, on the calls' device.
        """
        if self._statuses and records.numel():
            # Times 1 if all error codes are 0, else times 0.
            records[:1].mul_(torch.cat(self._statuses).eq(0).all())

    def statuses(self, device: torch.device) -> torch.Tensor:
        """The first word of each status so far, as int64 on the calls' device: 0 means no error."""
        if not self._statuses:
            return torch.empty(0, dtype=torch.int64, device=device)
        return self._statuses[0] if len(self._statuses) == 1 else torch.cat(self._statuses)

    def words(self) -> list[torch.Tensor]:
        """The words of all calls so far that were not read yet, on the calls' device."""
        return [words for words, _ in self._calls]

    def begin_read(self) -> HostCopy:
        """Starts the one copy of all words to the CPU, without waiting for it."""
        calls, self._calls = self._calls, []
        return HostCopy(calls)

    def read(self) -> None:
        """Checks all calls; on CUDA this waits for the device, once.

        Raises:
            MegatronSparseError: the first error of a call.
        """
        self.begin_read().finish()


class HostCopy:
    """An asynchronous copy of reports to the CPU; a `Work`, which can be awaited."""

    def __init__(self, calls: list[tuple[torch.Tensor, Check]]) -> None:
        """Starts the copy of each call's words; on CUDA event `_copied` marks its end."""
        self._calls = calls
        self._copied: torch.cuda.Event | None = None
        self._words = torch.empty(0, dtype=torch.int64)
        if not calls:
            return
        words = torch.cat([words for words, _ in calls])
        if words.device.type == "cuda":
            self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, not spins
            self._copied.record()
        else:
            self._words = words.cpu()

    def ready(self) -> bool:
        """Whether `finish` would return at once."""
        return self._copied is None or self._copied.query()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when the copy is done: at once, or later from the thread of `_waiting`."""
        if self._copied is None:
            wake()
        else:
            _waiting().put((self._calls[0][0].device, self._copied, wake))

    def finish(self) -> None:
        """Waits for the copy, then checks the words of each call, once.

        Raises:
            MegatronSparseError: the first error of a call.
        """
        if not self._calls:
            return
        if self._copied is not None:
            self._copied.synchronize()
        calls, self._calls = self._calls, []  # first, so that an error is raised once
        sizes = [words.numel() for words, _ in calls]
        for (_, check), words in zip(calls, self._words.split(sizes), strict=True):
            check(words)


def on_cpu(words: torch.Tensor) -> Copies[torch.Tensor]:
    """Copies a 1-D tensor to the CPU; yields the copy on CUDA, and nothing on a CPU."""
    if words.device.type != "cuda":
        return words
    found: list[torch.Tensor] = []
    yield HostCopy([(words, found.append)])
    return found[0]


def waiting_for[T](steps: Generator[Any, None, T]) -> T:
    """Runs steps to their end; waits (`finish`) for each copy or operation that they yield.

    Returns their result.
    """
    while True:
        try:
            awaited = next(steps)
        except StopIteration as end:
            return end.value
        awaited.finish()


@cache
def _waiting() -> _Waiting:
    """The queue of (device, event, callback) for a thread that waits for copies; starts the thread.

    One thread for all copies is enough, as the copies of a device end in the order of its work.
    """
    waiting: _Waiting = SimpleQueue()

    def run() -> None:
        """Waits for one event after the other, and calls its callback."""
        while True:
            device, copied, wake = waiting.get()
            with suppress(RuntimeError):  # a CUDA error is raised again, to the caller, in `finish`
                torch.cuda.set_device(device)  # a new thread is on device 0
                copied.synchronize()
            wake()

    threading.Thread(target=run, name="megatron_sparse_report", daemon=True).start()
    return waiting
