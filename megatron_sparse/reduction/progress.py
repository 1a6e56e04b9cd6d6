"""One thread for each process runs the pipelines of all pending buckets in turns.

A bucket's pipeline is a job: a generator that yields

- a `Work`, an operation that it has posted (handed to gloo or NCCL): resume when it is complete;
- `GATE`: the job has worked locally until now and will post operations from here on;
- `POSTED`: the job will post nothing more;
- `UNORDERED`: the job will post only messages with tags of their own, whose order does not matter.

Between two yields it works locally. All ranks must post operations in the same order, because the
backend matches them by order, but jobs become ready in any order. One rule ensures this: a job
passes its gate only when all jobs launched before it have yielded `POSTED` or `UNORDERED`. So while
one bucket is on the wire, the next one is selected and the previous one is decoded.
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
    """Yielded by a job before it posts its first operation; it has worked locally until then."""

    GATE = "gate"


GATE = Gate.GATE

type Stage[T] = Generator[object, None, T]
"""A job or a part of one: yields works and markers (see the module's docstring), returns T."""

Job = Callable[[], Stage[None]]
"""Makes the generator."""

POLL_S = 20e-3
"""The thread polls waiting jobs this often, for deadlines and for ranks that are gone: neither
wakes it."""
DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 5.0
"""The thread's deadline is this factor times the timeout, plus this slack: it must come after the
backend's own timeout, whose error says more."""
CLOSING_S = 1.0
"""When the thread is closed, jobs that are under way have so many seconds to end."""
CLOSING_SLACK_S = 4.0
"""Further seconds that `close` waits for a slow step of a job."""


class Pending:
    """A submitted job, as the launching thread sees it.

    Attributes:
        name: the bucket's name, for errors.
        timer: receives the time that operations take.
        error: the error that ended the job; None without one.
        start_event: on CUDA, marks the launching stream's work that the job must wait for.
        finish_event: on CUDA, marks the end of the job on its stream.
        finished_s: `time.perf_counter` when the host's part ended.
        host_cpu_s: processor seconds that the progress thread has spent in the job's steps.
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
        """Adds a step's time, given `thread_time` and `perf_counter` at the step's start."""
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
    """A submitted job, as the progress thread sees it.

    Attributes:
        pending: the launching thread's view.
        steps: the job's generator.
        work: the operation that it waits for, if any.
        since_s: `time.perf_counter` when it began to wait.
        at_gate: it has yielded `GATE` and was not resumed yet.
        posted: later jobs need not wait for its operations: it has yielded `POSTED` or `UNORDERED`.
    """

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
        self._closes_s: float | None = None
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="megatron_sparse", daemon=True)
        self._thread.start()

    def submit(
        self, name: str, job: Job, timer: StageTimer, on_done: Callable[[], None] | None = None
    ) -> Pending:
        """Queues a job behind all those submitted before. Returns at once.

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
            if self._broken is not None or self._closes_s is not None:
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
        """Ends the thread. Jobs that are still under way get `CLOSING_S`, then end with an error.

        No caller waits for them any more, and their peers may never take part: for example if this
        rank leaves a step because of an error. The other ranks are notified.
        """
        with self._wake:
            self._closes_s = time.perf_counter() + CLOSING_S
            self._wake_up()
        self._thread.join(CLOSING_S + CLOSING_SLACK_S)
        if self._thread.is_alive() and self._broken is None:
            self._broken = self._unfinished()

    def _unfinished(self) -> CommunicationError:
        return CommunicationError(
            "the reducer was closed while a bucket was under way",
            expected="a sum before the end of the training loop",
            got=f"an operation that has not ended {CLOSING_S:.0f} s after it",
            remedy="look for an earlier error on this rank; detach between two steps",
        )

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
                closes_s = self._closes_s
                if closes_s is not None and not self._running:
                    return
            if self._advance_one():
                continue
            if closes_s is not None and time.perf_counter() > closes_s:
                self._fail(self._running[0], self._unfinished())
                continue
            with self._wake:
                if not self._is_awake:
                    self._wake.wait(POLL_S if self._running else None)

    def _wake_up(self) -> None:
        """Called by any thread when a job may have become able to move."""
        with self._wake:
            self._is_awake = True
            self._wake.notify()

    def _advance_one(self) -> bool:
        """Runs one step of the oldest job that can move; False if all of them wait.

        Jobs are in the order of their launch. A job may pass its gate if all before it have posted.
        """
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
        # After the deadline the job is resumed too, and `_finish` raises.
        waited_s = time.perf_counter() - running.since_s
        return running.work.ready() or waited_s > self._deadline_s

    def _step(self, running: _Running) -> None:
        """Resumes a job until its next yield."""
        pending = running.pending
        begun = time.thread_time(), time.perf_counter()
        try:
            if pending.start_event is not None:
                torch.cuda.current_stream().wait_event(pending.start_event)
                pending.start_event = None
            if running.work is not None:
                self._finish(running, running.work)
            running.at_gate = False
            # Other ranks' errors name the bucket for which this rank posts.
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
        """Takes the result of the work that the job waited for; raises after the deadline."""
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
