"""What codec calls report, read on the host once for many of them.

A kernel leaves its status in words on the device. Reading them waits for the device, so whoever
does not need to know before it goes on (capacity mode, whose sizes are fixed) collects them here:
one copy and one wait for all calls on a bucket. On the CPU nothing is waited for, and the calls are
looked at in the same place, so that errors do not depend on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Look = Callable[[torch.Tensor], None]
"""Is given a call's words on the CPU; raises what they complain about."""


class Reports:
    """The words of codec calls that nobody has looked at yet, all on one device."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.Tensor, Look]] = []
        self._statuses: list[torch.Tensor] = []

    def add(self, words: torch.Tensor, look: Look, *, is_status: bool = True) -> None:
        """Takes what a call reports.

        Args:
            words: int64; a status begins with 0 where all is well.
            look: called by `read`, in the order of the calls.
            is_status: whether they are a status; else numbers that somebody wants to know.
        """
        self._calls.append((words, look))
        if is_status:
            self._statuses.append(words[:1])

    def spoil_(self, records: torch.Tensor) -> None:
        """Where a call so far has failed, makes records useless to who receives them.

        Their first byte becomes 0, which is no record's. Nothing is read on the host.

        Args:
            records: uint8, on the calls' device. Mutated.
        """
        if self._statuses and records.numel():
            records[:1].mul_(torch.cat(self._statuses).eq(0).all())

    def statuses(self, device: torch.device) -> torch.Tensor:
        """The first word of each status so far, as int64 on the calls' device: 0 is well."""
        if not self._statuses:
            return torch.empty(0, dtype=torch.int64, device=device)
        return self._statuses[0] if len(self._statuses) == 1 else torch.cat(self._statuses)

    def begin_read(self) -> HostCopy:
        """Starts the one copy of all words to the host, without waiting for it."""
        calls, self._calls = self._calls, []
        return HostCopy(calls)

    def read(self) -> None:
        """Looks at all calls; on CUDA this waits for the device, once.

        Raises:
            MegatronSparseError: the first that a call complains about.
        """
        self.begin_read().finish()


class HostCopy:
    """Words on their way to the host; a `Work`.

    Args:
        calls: words, and who looks at them.
    """

    def __init__(self, calls: list[tuple[torch.Tensor, Look]]) -> None:
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
        """Has a thread call `wake` when the words are there."""
        copied = self._copied
        if copied is None:
            wake()
            return

        def wait() -> None:
            copied.synchronize()
            wake()

        threading.Thread(target=wait, name="megatron_sparse_report", daemon=True).start()

    def finish(self) -> None:
        """Looks at the words; waits for them if they are not there.

        Raises:
            MegatronSparseError: the first that a call complains about.
        """
        if self._copied is not None:
            self._copied.synchronize()
        calls, self._calls = self._calls, []
        sizes = [words.numel() for words, _ in calls]
        for (_, look), words in zip(calls, self._words.split(sizes), strict=True):
            look(words)
