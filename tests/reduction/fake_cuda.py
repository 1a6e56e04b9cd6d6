"""A CUDA device that only writes down which stream waits for which event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from megatron_sparse.reduction.progress import InOrderProgress, ProgressThread

DEVICE = torch.device("cuda:0")
type Driver = type[InOrderProgress] | type[ProgressThread]
drivers = pytest.mark.parametrize("driver", [InOrderProgress, ProgressThread])


class StreamWork:
    """A work of NCCL: always ready; `finish` lets the stream wait."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def ready(self) -> bool:
        return True

    def when_ready(self, wake: Callable[[], None]) -> None:
        wake()


class Event:
    """An event; named after the stream and the number of its record there."""

    cuda: FakeCuda
    has_ended = True

    def query(self) -> bool:
        return self.has_ended

    def __init__(self, **options: bool) -> None:
        self.name = "unrecorded"

    def record(self) -> None:
        stream = self.cuda.current
        stream.records += 1
        self.name = f"{stream.name}{stream.records}"
        self.cuda.log.append(f"{stream.name}: record {self.name}")


class Stream:
    """A stream; the first three that are made are those of `BucketStreams`."""

    cuda: FakeCuda

    def __init__(self, device: torch.device | None = None, name: str = "") -> None:
        self.name = name or ("inside", "codec", "network")[self.cuda.made]
        self.cuda.made += not name
        self.records = 0

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name}: wait {event.name}")


class FakeCuda:
    """Replaces what the plugin uses of `torch.cuda`.

    Attributes:
        log: `STREAM: record EVENT`, `STREAM: wait EVENT`, and what tests add with `note`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.made = 0
        Event.cuda = Stream.cuda = self
        self.launching = Stream(name="launching")
        self._of_thread = threading.local()
        for name, fake in {
            "Event": Event,
            "Stream": Stream,
            "stream": self._stream,
            "current_stream": lambda: self.current,
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def current(self) -> Stream:
        """The current stream of the calling thread, as in torch each thread has one."""
        return getattr(self._of_thread, "stream", self.launching)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def note(self, what: str) -> None:
        """Work that is queued on the current stream."""
        self.log.append(f"{self.current.name}: {what}")

    def precedes(self, first: str, second: str) -> bool:
        """Whether the device must end entry `first` of the log before it begins `second`."""
        reached = {self.log.index(first)}
        for number, line in enumerate(self.log):
            stream, what = line.split(": ")
            events = {self.log[at].split("record ")[-1] for at in reached}
            same_stream = any(self.log[at].split(": ")[0] == stream for at in reached)
            waits = what.startswith("wait ") and what.removeprefix("wait ") in events
            if number > min(reached) and (same_stream or waits):
                reached.add(number)
        return self.log.index(second) in reached

    def assert_order(self, entries: Sequence[str]) -> None:
        """Each entry of the log precedes the next."""
        for before, after in pairwise(entries):
            assert self.precedes(before, after), (before, after)
