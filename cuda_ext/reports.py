"""The reports of codec calls, read on the host once for many calls.

A kernel leaves its status in words on the device. Reading them waits for the device. In capacity
mode sizes are fixed and callers need not know the status before they go on, so they collect the
words here: one copy and one wait for all calls on a bucket. On the CPU nothing waits, and the words
are checked in the same place, so that errors do not depend on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

import torch

_Waiting = SimpleQueue[tuple[torch.device, torch.cuda.Event, Callable[[], None]]]
Look = Callable[[torch.Tensor], None]
"""Takes a call's words on the CPU and raises the error that they hold, if any."""


class Reports:
    """The words of codec calls that were not checked yet, all on one device."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.Tensor, Look]] = []
        self._statuses: list[torch.Tensor] = []

    def add(self, words: torch.Tensor, look: Look, *, is_status: bool = True) -> None:
        """Adds the report of a call.

        Args:
            words: int64; a status begins with 0 if there is no error.
            look: called by `read`, in the order of the calls.
            is_status: whether the words are a status; else they are results, such as counts.
        """
        self._calls.append((words, look))
        if is_status:
            self._statuses.append(words[:1])

    def spoil_(self, records: torch.Tensor) -> None:
        """Spoils records for their receivers if any call so far has failed.

        Their first byte becomes 0; no valid record begins with 0. Reads nothing on the host.

        Args:
            records: uint8, on the calls' device. Mutated.
        """
        if self._statuses and records.numel():
            # Times 1 if all statuses are 0, else times 0.
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
        """Starts the one copy of all words to the host, without waiting for it."""
        calls, self._calls = self._calls, []
        return HostCopy(calls)

    def read(self) -> None:
        """Checks all calls; on CUDA this waits for the device, once.

        Raises:
            MegatronSparseError: the first error of a call.
        """
        self.begin_read().finish()


class HostCopy:
    """Words on their way to the host; a `Work`.

    Args:
        calls: words, and the functions that check them.
    """

    def __init__(self, calls: list[tuple[torch.Tensor, Look]]) -> None:
        """Starts the copy; on CUDA an event says when it has arrived."""
        self._calls = calls
        self._copied: torch.cuda.Event | None = None
        self._words = torch.empty(0, dtype=torch.int64)
        if not calls:
            return
        words = torch.cat([words for words, _ in calls])
        if words.device.type == "cuda":
            self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        else:
            self._words = words.cpu()

    def ready(self) -> bool:
        """Whether `finish` would return at once."""
        return self._copied is None or self._copied.query()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when the words are there: at once, or later from another thread."""
        if self._copied is None:
            wake()
        else:
            _waiting().put((self._calls[0][0].device, self._copied, wake))

    def finish(self) -> None:
        """Checks the words, once; waits for them if they are not there.

        Raises:
            MegatronSparseError: the first error of a call.
        """
        if not self._calls:
            return
        if self._copied is not None:
            self._copied.synchronize()
        calls, self._calls = self._calls, []  # first, so that an error is raised once
        sizes = [words.numel() for words, _ in calls]
        for (_, look), words in zip(calls, self._words.split(sizes), strict=True):
            look(words)


@cache
def _waiting() -> _Waiting:
    """The queue of the one thread that waits for reports; the thread starts with the first one.

    Reports of a device end in the order of its work, so one thread is enough.
    """
    waiting: _Waiting = SimpleQueue()

    def run() -> None:
        """Wakes one caller after the other, each when its words have been copied."""
        while True:
            device, copied, wake = waiting.get()
            with suppress(RuntimeError):  # `finish` meets the device's error again, and raises it
                torch.cuda.set_device(device)  # a thread begins with the first one
                copied.synchronize()
            wake()

    threading.Thread(target=run, name="megatron_sparse_report", daemon=True).start()
    return waiting
