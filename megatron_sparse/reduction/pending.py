"""A submitted job, as the thread sees it that launched the bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from megatron_sparse.recording import StageTimer


class Pending:
    """A submitted job, as the launching thread sees it.

    A job ends in two steps. When it is *queued*, all of its work on the device is on a stream, and
    the bucket can be used on every stream that waits for `finish_event`. When it has *ended*, its
    reports have been read, so the sum is known to be right. On a CPU both are one moment; on CUDA
    only a job in capacity mode has the first one to itself.

    Attributes:
        name: the bucket's name, for errors.
        timer: receives the time that operations take.
        error: the error that ended the job; None without one.
        start_event: on CUDA, marks the launching stream's work that the job must wait for.
        finish_event: on CUDA, marks the end of the job's work on its stream.
        finished_s: `time.perf_counter` when the host's part ended.
        host_cpu_s: processor seconds that the driving thread has spent in the job's steps.
        host_wall_s: clock seconds of the same steps; longer if the thread had to wait for a core,
            for the interpreter's lock, or for the device.
        drive_rest: runs what a queued job still has to do, where no thread of its own does that.
    """

    def __init__(
        self,
        name: str,
        timer: StageTimer,
        start: torch.cuda.Event | None,
        on_done: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self.timer = timer
        self.error: BaseException | None = None
        self.start_event = start
        self.finish_event: torch.cuda.Event | None = None
        self.finished_s = 0.0
        self.host_cpu_s = self.host_wall_s = 0.0
        self.drive_rest: Callable[[], None] | None = None
        self._on_done = on_done
        self._queued = threading.Event()
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether the host's part has ended, with or without an error."""
        return self._done.is_set()

    def queued(self) -> bool:
        """Whether all of its work on the device is on a stream, or it has ended."""
        return self._queued.is_set()

    def wait_until_queued(self) -> None:
        """Blocks the host until the job is queued; on CUDA the current stream waits for its work.

        The host does not wait for the device, unless the job needed a number from it.

        Raises:
            MegatronSparseError: the error that ended the job, if it is known by now.
        """
        self._queued.wait()
        if self.error is not None:
            raise self.error
        if self.finish_event is not None:
            torch.cuda.current_stream().wait_event(self.finish_event)

    def wait_until_ended(self) -> None:
        """Blocks the host until the job has ended: on CUDA, until its reports have been read.

        Raises:
            MegatronSparseError: the error that ended the job.
        """
        if self.drive_rest is not None and not self.done():
            self.drive_rest()
        self._done.wait()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """`wait_until_queued` and `wait_until_ended`."""
        self.wait_until_queued()
        self.wait_until_ended()

    def charge(self, cpu_s: float, wall_s: float) -> None:
        """Adds a step's time, given `thread_time` and `perf_counter` at the step's start."""
        self.host_cpu_s += time.thread_time() - cpu_s
        self.host_wall_s += time.perf_counter() - wall_s

    def queue(self, finish: torch.cuda.Event | None) -> None:
        """Called by the driving thread when all of the job's work is on a stream.

        Args:
            finish: on CUDA, recorded after that work.
        """
        self.finish_event = finish
        self._queued.set()

    def end(self, error: BaseException | None) -> None:
        """Called once by the driving thread."""
        self.error = error
        self.finished_s = time.perf_counter()
        self._done.set()
        self._queued.set()
        if self._on_done is not None:
            self._on_done()
