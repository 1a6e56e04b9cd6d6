"""A bucket's pipeline as a job: a generator, and its steps.

The generator yields

- a `Work`, an operation that it has posted (handed to gloo or NCCL): resume when it is complete;
- `GATE`: the job has worked locally until now and will post operations from here on; other `Gate`s
  keep the operations of several groups in order, each for itself;
- `POSTED`: the job will post nothing more;
- `UNORDERED`: the job will post only messages with tags of their own, whose order does not matter;
- `QUEUED`: all of its work is on a stream (CUDA only); what follows reads reports on the host.

Between two yields it works locally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from enum import IntEnum
from typing import Protocol, cast

import torch

from megatron_sparse.collectives import POSTED, QUEUED, UNORDERED
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.profiler_ranges import marked
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.pending import Pending
from megatron_sparse.reduction.streams import BucketStreams, JobStream
from megatron_sparse.transport import Work
from megatron_sparse.transport.liveness import announce_failure, posting_for


class Gate(IntEnum):
    """Yielded by a job before it posts operations.

    Jobs pass each gate in the order of their launch, and no job passes one behind which an earlier
    job may still post. Most jobs have one gate, `GATE`. A job that posts to several groups, and
    waits in between, may have three; it yields them in ascending order. So a later job may reduce
    inside its node while an earlier one exchanges across nodes.
    """

    INSIDE = 1
    """Of a level above `rank`: sums inside the node."""
    ACROSS = 2
    """`GATE`: all else."""
    PAST_ACROSS = 3
    """No gate to wait at: the job posts nothing more behind `ACROSS`."""
    GATHER = 4
    """Of a level above `rank`: gathers inside the node, in a group of their own."""
    END = 5
    """Never yielded: the job posts nothing more at all."""


GATE = Gate.ACROSS

type Stage[T] = Generator[object, None, T]
"""A job or a part of one: yields works and markers (see the module's docstring), returns T."""

Job = Callable[[], Stage[None]]
"""Makes the generator."""


def without_gates[T](steps: Stage[T]) -> Stage[T]:
    """The steps of a job without its gates: where another job's gates, or none, keep the order."""
    while True:
        try:
            outcome = next(steps)
        except StopIteration as end:
            return end.value
        if not isinstance(outcome, Gate):
            yield outcome


POLL_S = 20e-3
"""Waiting jobs are polled this often, for deadlines and for ranks that are gone: neither wakes the
thread that drives them."""
DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 5.0
"""The deadline of an operation is this factor times the timeout, plus this slack: it must come
after the backend's own timeout, whose error says more."""


class Progress(Protocol):
    """Drives jobs: on a thread of its own (`progress`), or in the launching one (`in_order`)."""

    @property
    def broken(self) -> bool:
        """Whether an operation has failed; every later job is refused then."""
        ...

    def submit(
        self,
        name: str,
        job: Job,
        timer: StageTimer,
        on_done: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Takes over a job. Jobs are submitted in the same order on every rank.

        Args:
            name: of the bucket, for errors.
            job: makes the generator.
            timer: receives the time that operations take.
            on_done: called once when the job has ended, with or without an error: by the thread
                that drives it (on CUDA with its stream current), or by the caller if the job is
                refused. Must neither block nor raise.
            after: a job submitted before, whose memory this one takes over: it begins on the
                device when that one's work there has ended.
        """
        ...

    def close(self) -> None:
        """Ends all jobs; those under way end with an error."""
        ...


class RunningJob:
    """A submitted job, as the thread sees it that drives it.

    Attributes:
        pending: the launching thread's view.
        work: the operation that it waits for, if any.
        at_gate: the gate that it has yielded, if it was not resumed yet.
        reached: it posts nothing more behind lower gates that later jobs would have to wait for:
            it has yielded this gate, or `POSTED` or `UNORDERED`.
        queued: it has yielded `QUEUED`.

    Args:
        pending: the launching thread's view.
        job: makes the generator.
        streams: of the process; None on a CPU.
        timeout_s: seconds that one operation may take.
        after: see `Progress.submit`.
    """

    def __init__(
        self,
        pending: Pending,
        job: Job,
        streams: BucketStreams | None,
        timeout_s: float,
        after: Pending | None,
    ) -> None:
        self.pending = pending
        self.work: Work | None = None
        self.at_gate: Gate | None = None
        self.reached = Gate.INSIDE
        self.queued = False
        self._steps = job()
        self._after = after
        self._since_s = 0.0
        self._stream = JobStream(streams)
        self._deadline_s = timeout_s * DEADLINE_FACTOR + DEADLINE_SLACK_S

    def can_move(self, reached: Gate) -> bool:
        """Whether `step` would return at once; `reached`: what all jobs before it have reached."""
        if self._after is not None:
            return self._after.queued()
        if self.at_gate is not None:
            return self.at_gate < reached
        if self.work is None:
            return True
        # After the deadline the job is resumed too, and `_finish` raises.
        waited_s = time.perf_counter() - self._since_s
        return self.work.ready() or waited_s > self._deadline_s

    def step(self, wake: Callable[[], None]) -> bool:
        """Resumes the job until its next yield; False when it has ended.

        Args:
            wake: called by some thread as soon as the job may have become able to move.

        Raises:
            BaseException: the error that ends the job; the driver ends all others, see `end_all`.
        """
        pending, begun = self.pending, (time.thread_time(), time.perf_counter())
        if pending.start_event is not None:
            self._stream.wait(pending.start_event)
            pending.start_event = None
        if self._after is not None:
            if self._after.finish_event is not None:
                self._stream.wait(self._after.finish_event)
            self._after = None
        if self.at_gate is not None:
            self.at_gate = None
            self._stream.pass_gate()
        with self._stream.current():
            if self.work is not None:
                self._finish(self.work)
            # Other ranks' errors name the bucket for which this rank posts.
            outside = posting_for.set(pending.name)
            try:
                self._take(next(self._steps), wake)
            except StopIteration:
                if not self.queued:
                    pending.queue(self._stream.finished())
                pending.charge(*begun)
                pending.end(None)
                return False
            finally:
                posting_for.reset(outside)
            pending.charge(*begun)
        return True

    def _take(self, outcome: object, wake: Callable[[], None]) -> None:
        if outcome is Gate.PAST_ACROSS:
            self.reached = Gate.PAST_ACROSS
        elif isinstance(outcome, Gate):
            self.at_gate = outcome
            self.reached = max(self.reached, outcome)
            self._stream.at_gate()
        elif outcome is QUEUED:
            self.queued = True
            self.pending.queue(self._stream.finished())
        elif outcome is POSTED or outcome is UNORDERED:
            self.reached = Gate.END
        else:
            self._since_s = time.perf_counter()
            self.work = work = cast(Work, outcome)
            work.when_ready(wake)

    def _finish(self, work: Work) -> None:
        """Takes the result of the work that the job waited for; raises after the deadline."""
        if not work.ready():
            raise CommunicationError(
                "an operation ran out of time",
                expected=f"an answer within {self._deadline_s:.0f} s",
                got="none",
                remedy="look at the other ranks' logs; raise scheme.timeout_s if they are slow",
            )
        self.work = None
        timer = self.pending.timer
        if self.queued:
            work.finish()  # reports: neither network nor any other stage
        elif self._stream.on_cuda:
            with timer.stage("network"):
                work.finish()
        else:
            with marked("network"):
                work.finish()
            timer.add_span("network", self._since_s, time.perf_counter())


def launched(
    name: str, timer: StageTimer, on_done: Callable[[], None] | None, device: torch.device
) -> Pending:
    """The launching thread's view of a new job; on CUDA it marks that thread's current stream."""
    start = None
    if device.type == "cuda":
        start = torch.cuda.Event()
        start.record()
    return Pending(name, timer, start, on_done)


def announce(failed: RunningJob, error: BaseException) -> None:
    """Adds the bucket's name to an error, and tells the other ranks that this one has failed.

    They need not wait for their timeout then.
    """
    if isinstance(error, CommunicationError | WireFormatError):
        error.args = (f"bucket {failed.pending.name}: {error}",)
    announce_failure(error)


def end_all(jobs: Iterable[RunningJob], failed: RunningJob, error: BaseException) -> None:
    """Ends every job: after a failure the group's state is unknown, and no sum can be right."""
    for running in jobs:
        name = running.pending.name
        running.pending.end(error if running is failed else refusal(name, error))


def refusal(name: str, broken: BaseException | None) -> MegatronSparseError:
    """The error of a job that comes after a failure, or after the end."""
    return CommunicationError(
        f"bucket {name} was not synchronised",
        expected="a working process group",
        got=f"an earlier failure: {broken}" if broken else "a closed reducer",
        remedy="restart from the last checkpoint",
    )
