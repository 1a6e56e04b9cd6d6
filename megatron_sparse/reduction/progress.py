"""One thread for each process drives the phases of all pending buckets.

A job is a generator: local work up to `GATE`, then posts and waits, then `POSTED`, then local work
again. One rule keeps every rank posting in the same order, whichever job finishes first: a job
passes its gate only when all jobs launched before it have yielded `POSTED` or `UNORDERED`. (After
`UNORDERED` a job posts only messages that tags tell apart, so their order does not matter.) The
next bucket is selected, and the last one decoded, while a bucket is on the wire.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from enum import Enum
from typing import cast

import torch

from megatron_sparse.collectives import POSTED, UNORDERED
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.profiler_ranges import marked
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Work
from megatron_sparse.transport.liveness import announce_failure, posting_for


class Gate(Enum):
    """The point up to which a job works locally, without posting anything."""

    GATE = "gate"


GATE = Gate.GATE

type Stage[T] = Generator[object, None, T]
"""What the progress thread drives: yields markers and works, returns T."""

Job = Callable[[], Stage[None]]

POLL_S = 20e-3
"""Seconds between two looks at a waiting job, for its deadline and for ranks that are gone."""
DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 5.0


class Pending:
    """A job under way.

    Attributes:
        name: of the bucket, for errors.
        host_cpu_s: processor seconds that the progress thread has spent in its steps.
        host_wall_s: clock seconds of the same steps; longer if the thread had to wait for a core,
            for the interpreter's lock, or for the device.
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
        self._on_done = on_done
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether the host's part has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Blocks the host until the job has posted and decoded everything.

        On CUDA the current stream then waits for the job's stream; the host does not.

        Raises:
            MegatronSparseError: the error that ended the job.
        """
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.finish_event is not None:
            torch.cuda.current_stream().wait_event(self.finish_event)

    def charge(self, cpu_s: float, wall_s: float) -> None:
        """Adds a step's time; the arguments are `thread_time` and `perf_counter` at its begin."""
        self.host_cpu_s += time.thread_time() - cpu_s
        self.host_wall_s += time.perf_counter() - wall_s

    def end(self, error: BaseException | None) -> None:
        """Called once by the progress thread."""
        self.error = error
        self.finished_s = time.perf_counter()
        self._done.set()
        if self._on_done is not None:
            self._on_done()


class _Running:
    """A job, its generator, and the work that it waits for."""

    def __init__(self, pending: Pending, job: Job) -> None:
        self.pending = pending
        self.steps = job()
        self.work: Work | None = None
        self.since_s = 0.0
        self.at_gate = False
        self.posted = False


class ProgressThread:
    """See the module's docstring.

    Args:
        device: on CUDA, jobs run on a stream of their own, after what the launching stream had
            queued.
        timeout_s: seconds that one operation may take. The backend's own timeout comes first;
            this one is for backends that have none.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._deadline_s = timeout_s * DEADLINE_FACTOR + DEADLINE_SLACK_S
        self._incoming: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._wake = threading.Condition()
        self._is_awake = False
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="megatron_sparse", daemon=True)
        self._thread.start()

    def submit(
        self, name: str, job: Job, timer: StageTimer, on_done: Callable[[], None] | None = None
    ) -> Pending:
        """Launches a job after all those launched before it. Returns at once.

        Args:
            name: of the bucket, for errors.
            job: makes the generator.
            timer: receives the time that operations take.
            on_done: called once when the job has ended, with or without an error: by the progress
                thread (on CUDA with its stream current), or by the caller if the job is refused.
                Must neither block nor raise.
        """
        start = None
        if self._stream is not None:
            start = torch.cuda.Event()
            start.record()
        pending = Pending(name, timer, start, on_done)
        with self._wake:
            if self._broken is not None or self._closing:
                pending.end(self._refusal(name))
                return pending
            self._incoming.append(_Running(pending, job))
            self._wake_up()
        return pending

    @property
    def broken(self) -> bool:
        """Whether an operation has failed; every later job is refused then."""
        return self._broken is not None

    def close(self) -> None:
        """Ends the thread after the jobs that are under way."""
        with self._wake:
            self._closing = True
            self._wake_up()
        self._thread.join(self._deadline_s)

    def _refusal(self, name: str) -> MegatronSparseError:
        return CommunicationError(
            f"bucket {name} was not synchronised",
            expected="a working process group",
            got=f"an earlier failure: {self._broken}" if self._broken else "a closed reducer",
            remedy="restart from the last checkpoint",
        )

    def _main(self) -> None:
        with torch.no_grad():
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(self._stream):
                    self._loop()
            else:
                self._loop()

    def _loop(self) -> None:
        while True:
            with self._wake:
                # Wake-ups from here on are handled in the next turn.
                self._is_awake = False
                self._running.extend(self._incoming)
                self._incoming.clear()
                if self._closing and not self._running:
                    return
            if self._advance_one():
                continue
            with self._wake:
                if not self._is_awake:
                    self._wake.wait(POLL_S if self._running else None)

    def _wake_up(self) -> None:
        """Called by any thread when there may be something to do."""
        with self._wake:
            self._is_awake = True
            self._wake.notify()

    def _advance_one(self) -> bool:
        """Advances the first job that can move; False when all of them wait."""
        may_post = True
        for running in self._running:
            if self._can_move(running, may_post):
                self._step(running)
                return True
            may_post = may_post and running.posted
        return False

    def _can_move(self, running: _Running, may_post: bool) -> bool:
        if running.at_gate:
            return may_post
        if running.work is None:
            return True
        waited_s = time.perf_counter() - running.since_s
        return running.work.ready() or waited_s > self._deadline_s

    def _step(self, running: _Running) -> None:
        pending = running.pending
        begun = time.thread_time(), time.perf_counter()
        try:
            if pending.start_event is not None:
                torch.cuda.current_stream().wait_event(pending.start_event)
                pending.start_event = None
            if running.work is not None:
                self._finish(running, running.work)
            running.at_gate = False
            posting_for.set(pending.name)
            outcome = next(running.steps)
            if outcome is GATE:
                running.at_gate = True
            elif outcome is POSTED or outcome is UNORDERED:
                running.posted = True
            else:
                running.since_s = time.perf_counter()
                running.work = work = cast(Work, outcome)
                work.when_ready(self._wake_up)
            pending.charge(*begun)
        except StopIteration:
            if self._stream is not None:
                pending.finish_event = torch.cuda.Event()
                pending.finish_event.record()
            self._running.remove(running)
            pending.charge(*begun)
            pending.end(None)
        except BaseException as error:  # handed to the thread that waits
            self._fail(running, error)

    def _finish(self, running: _Running, work: Work) -> None:
        if not work.ready():
            raise CommunicationError(
                "an operation ran out of time",
                expected=f"an answer within {self._deadline_s:.0f} s",
                got="none",
                remedy="look at the other ranks' logs; raise scheme.timeout_s if they are slow",
            )
        running.work = None
        if self._stream is not None:
            with running.pending.timer.stage("network"):
                work.finish()
        else:
            with marked("network"):
                work.finish()
            running.pending.timer.add_span("network", running.since_s, time.perf_counter())

    def _fail(self, failed: _Running, error: BaseException) -> None:
        """Ends every job: after a failure the group's state is unknown, and no sum can be right.

        The failure is announced to the other ranks, so that they need not wait for their timeout.
        """
        if isinstance(error, CommunicationError | WireFormatError):
            error.args = (f"bucket {failed.pending.name}: {error}",)
        announce_failure(error)
        with self._wake:
            self._broken = error
            others = [*self._running, *self._incoming]
            self._running.clear()
            self._incoming.clear()
        for running in others:
            pending = running.pending
            pending.end(error if running is failed else self._refusal(pending.name))
