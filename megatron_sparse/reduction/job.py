"""A job: a bucket's pipeline, or a gather of parameters, from its launch to its result.

A job is a generator. It yields

- a `Work`, an operation that it has posted (handed to gloo or NCCL): resume when it is complete;
- `GATE`: the job has worked locally until now and will post operations from here on;
- `INSIDE`: likewise, to the ranks of its node or instance (`level`), and `LOCAL`: it works locally
  again, until its `GATE`;
- `POSTED`: the job will post nothing more;
- `UNORDERED`: the job will post only messages with unique tags, whose order does not matter;
- `QUEUED` (CUDA only): all of the job's work is on a stream; from here on it only copies reports
  (error flags and counts that kernels wrote) to the CPU and checks them.

Between two yields it works locally. A stage is a job, or a part of one. `Pending` holds a running
job: one thread launches it and waits for it; a driver (`progress`) steps it, that is, resumes the
generator. "Host" is the CPU's side, as opposed to the device.

On CUDA a job uses up to three streams, which all buckets share:

    codec     before its gate: average, select, encode
    inside    from `INSIDE` to `LOCAL`: the sum inside
    network   behind its gate: exchange, decode, and all else

Each stream runs the buckets in the order of their launch. A bucket enters the codec stream after
what the launching stream has queued, and each other one after its own work before. So bucket N + 1
is added up inside and selected during the exchange of bucket N. On the network stream one bucket
follows the other, so buffers that are used only there are shared by all buckets (`Exchange.take`);
the same holds inside. Memory allocated on the codec stream and used on the network stream must be
passed to `used_here`. That is enough for buffers that outlive the step, too: the next launch comes
after this `finish_event`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import cast

import torch

from megatron_sparse.collectives import POSTED, QUEUED, UNORDERED
from megatron_sparse.collectives.base import without
from megatron_sparse.errors import CommunicationError
from megatron_sparse.profiler_ranges import marked
from megatron_sparse.recording import BucketRecord, GatherRecord, NullSink, RecordSink, StageTimer
from megatron_sparse.transport import Work
from megatron_sparse.transport.base import Marker


class Gate(Enum):
    """Yielded by a job before it posts operations; `LOCAL` before it works locally again.

    Jobs pass `GATE` and `INSIDE` in the order of their launch: none passes while an earlier job may
    still post.
    """

    INSIDE = "inside"
    LOCAL = "local"
    GATE = "gate"


INSIDE, LOCAL, GATE = Gate

type Stage[T] = Generator[object, None, T]
"""A job or a part of one: yields works and markers (see the module's docstring), returns T."""


def one_after_another(first: Stage[int], second: Stage[int], *, second_posts: bool) -> Stage[int]:
    """Joins two stages of a bucket: runs `first`, then `second` on its result.

    On CUDA `second` begins as soon as `first` is queued; both read their reports at the end.

    Args:
        first: usually a collective.
        second: works on the result of `first`.
        second_posts: whether `second` posts operations. The next bucket must then wait until they
            are posted. Otherwise ranks would post them in the order in which their first stages
            end, which differs between ranks.

    Returns:
        The bytes sent in both stages.
    """
    first_bytes = yield from _until_queued(first, hides_markers=second_posts)
    second_bytes = yield from _until_queued(second, hides_markers=False)
    # None: the stage has stopped at `QUEUED`, and still has to read its reports.
    if first_bytes is None or second_bytes is None:
        yield QUEUED
    if first_bytes is None:
        first_bytes = yield from first
    if second_bytes is None:
        second_bytes = yield from second
    return first_bytes + second_bytes


def _until_queued(steps: Stage[int], *, hides_markers: bool) -> Stage[int | None]:
    """Runs a stage to its end and returns its bytes, or to its `QUEUED` and returns None.

    With `hides_markers` it does not yield the stage's `POSTED` and `UNORDERED`: they would be
    untrue where a later stage of the job posts operations.
    """
    while True:
        try:
            outcome = next(steps)
        except StopIteration as end:
            return end.value
        if outcome is QUEUED:
            return None
        is_marker = isinstance(outcome, Marker)  # `POSTED` or `UNORDERED`
        if not (is_marker and hides_markers):
            yield outcome


class BucketStreams:
    """The streams of a process, on CUDA, each by the gate that it lies behind."""

    def __init__(self, device: torch.device) -> None:
        self.behind = {gate: torch.cuda.Stream(device) for gate in Gate}


class JobStream:
    """The stream of one job, at first the codec stream; none on a CPU."""

    def __init__(self, streams: BucketStreams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.behind[LOCAL]
        # Between `at_gate` and `pass_gate`: the end of the work so far, and where it goes on.
        self._next: tuple[torch.cuda.Event | None, torch.cuda.Stream] | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether the job uses streams."""
        return self._streams is not None

    def current(self) -> AbstractContextManager[object]:
        """Makes the job's stream the thread's current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Lets the job's stream wait for an event, if there is one."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def at_gate(self, gate: Gate) -> None:
        """Records an event after the job's work so far; call it with the job's stream current."""
        if self._streams is not None:
            self._next = self.recorded_event(), self._streams.behind[gate]

    def pass_gate(self) -> None:
        """Moves the job to the stream behind its last gate, which waits for its work so far."""
        if self._next is not None:
            event, self._stream = self._next
            self._next = None
            self.wait(event)

    def recorded_event(self) -> torch.cuda.Event | None:
        """A new event, recorded after all that the current stream has queued; None on a CPU."""
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tells torch's caching allocator that the current stream uses tensors of another stream.

    Call it behind the gate for memory that was allocated before the gate. Otherwise, when Python
    drops the tensors, the allocator may give their memory to the next bucket's selection on the
    codec stream, while the network stream still reads it.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())


DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 5.0
"""The deadline of an operation is this factor times the timeout, plus this slack: it must come
after the backend's own timeout, whose error says more."""


class Pending[T]:
    """A running job. Call `wait` once, or else `wait_until_queued` and `confirm`, each once.

    A job ends in two steps. When it is *queued*, all of its work on the device is on a stream, and
    the bucket can be used on every stream that waits for `finish_event`. When it has *ended*, its
    reports have been checked, so the sum is known to be right. Only on CUDA, in capacity mode
    (`scheme.capacity`), are these two moments; otherwise a job is queued when it ends.

    Args:
        name: of the bucket, for errors.
        steps: the job's generator.
        timer: receives the time that operations take.
        record: telemetry; gets the job's times; None for a job that is not recorded.
        sink: receives the record in `confirm`, and the time that the launching thread waits.
        on_done: called once when the job has ended, with or without an error: by the thread that
            drives it (on CUDA with its stream current), or by the caller if the job is refused.
            Must neither block nor raise.

    Attributes:
        after: a job submitted earlier, whose buffers this one reuses: on the device this one's
            work begins after that job's. Set it before `Progress.submit`.
        error: the error that ended the job; None without one.
        result: what the job returned; None before its end, and after an error.
        finish_event: on CUDA, marks the end of the job's work on its stream.
        finished_s: `time.perf_counter` when the host's part ended.
        host_cpu_s: processor seconds that the driving thread has spent in the job's steps.
        host_wall_s: clock seconds of the same steps; longer if the thread had to wait for a core,
            for the interpreter's lock, or for the device.
        drive_rest: steps a queued job to its end, for a driver without a thread
            (`InOrderProgress`); else None.
        may_post: this job has not yet yielded `POSTED` or `UNORDERED`, so the driver lets later
            jobs wait at the gate.
    """

    def __init__(
        self,
        name: str,
        steps: Stage[T],
        timer: StageTimer,
        record: BucketRecord | GatherRecord | None = None,
        sink: RecordSink | None = None,
        on_done: Callable[[Pending[T]], None] | None = None,
    ) -> None:
        self.name = name
        self.record = record
        self.after: Pending | None = None
        self.error: BaseException | None = None
        self.result: T | None = None
        self.finish_event: torch.cuda.Event | None = None
        self.finished_s = self.host_cpu_s = self.host_wall_s = 0.0
        self.drive_rest: Callable[[], None] | None = None
        self.may_post = True
        self._steps = steps
        self._timer = timer
        self._sink = sink or NullSink()
        self._on_done = on_done
        self._queued, self._ended = threading.Event(), threading.Event()
        self._start_event: torch.cuda.Event | None = None  # recorded by the launching thread
        self._is_at_gate = False
        self._work: Work | None = None  # the operation that the job waits for
        self._work_since_s = 0.0  # when the job yielded it

    # The launching thread's side.

    def done(self) -> bool:
        """Whether the job has ended, with or without an error."""
        return self._ended.is_set()

    def queued(self) -> bool:
        """Whether all of the job's work on the device is on a stream, or it has ended."""
        return self._queued.is_set()

    def wait(self) -> T:
        """Blocks until the job has ended and its sum has been checked.

        Returns:
            What the job returned; the bucket holds the sum.

        Raises:
            MegatronSparseError: the job failed; the bucket's content is undefined.
        """
        self.wait_until_queued()
        self.confirm()
        return cast(T, self.result)

    def wait_until_queued(self) -> None:
        """Blocks the host until the job is queued; on CUDA the current stream waits for its work.

        The host does not wait for the device, except where the job copies a size to the CPU. The
        sum may still prove wrong: do nothing with it that cannot be undone before `confirm`.

        Raises:
            MegatronSparseError: the error that ended the job, if it has failed by now.
        """
        start_s = time.perf_counter()
        with nullcontext() if self.record is None else marked(self.record.WAIT):
            self._queued.wait()
        if self.error is not None:
            raise self.error
        if self.finish_event is not None:
            torch.cuda.current_stream().wait_event(self.finish_event)
        if self.record is not None:
            self._sink.record_stage(self.record.WAIT, self.record.waited(start_s))

    def confirm(self) -> None:
        """Blocks until the job has ended, its reports checked; hands its record to the sink.

        Raises:
            MegatronSparseError: the error that ended the job; the bucket's content is undefined.
        """
        if self.drive_rest is not None and not self.done():
            self.drive_rest()
        self._ended.wait()
        if self.error is not None:
            raise self.error
        if self.record is not None:
            self.record.end(self.finished_s, self.host_cpu_s, self.host_wall_s)
            self.record.hand_to(self._sink)

    # The driver's side.

    def launch(self, streams: BucketStreams | None, timeout_s: float) -> None:
        """Prepares the job for its first step; the launching thread calls it once.

        Args:
            streams: of the process; None on a CPU. The job will begin after what the current
                stream has queued by now.
            timeout_s: seconds that one operation may take.
        """
        self._stream = JobStream(streams)
        self._deadline_s = timeout_s * DEADLINE_FACTOR + DEADLINE_SLACK_S  # after the backend's own
        self._start_event = self._stream.recorded_event()

    def can_move(self, *, gate_is_open: bool) -> bool:
        """Whether `step` can resume the job now without waiting for anything.

        Args:
            gate_is_open: whether no job before this one may still post.
        """
        if self.after is not None:  # `step` needs the event that `after` records when it is queued
            return self.after.queued()
        if self._is_at_gate:
            return gate_is_open
        if self._work is None:
            return True
        # After the deadline the driver resumes the job too, so that `_finish_work` raises.
        waited_s = time.perf_counter() - self._work_since_s
        return self._work.ready() or waited_s > self._deadline_s

    def step(self, wake: Callable[[], None]) -> bool:
        """Resumes the job until its next yield; returns False when it has ended.

        Args:
            wake: a thread calls it as soon as `can_move` may have become true.

        Raises:
            BaseException: raised by the job. The driver then calls `end` for this and all jobs.
        """
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        # Before the first step the job's stream waits for the launching stream and for `after`.
        self._stream.wait(self._start_event)
        self._start_event = None
        if self.after is not None:
            self._stream.wait(self.after.finish_event)
            self.after = None
        self._is_at_gate = False
        self._stream.pass_gate()
        with self._stream.current():
            if self._work is not None:
                self._finish_work(self._work)
            ended = False
            try:
                self._note_yielded(next(self._steps), wake)
            except StopIteration as end:
                ended, self.result = True, end.value
                if not self.queued():
                    self._mark_queued()
            self.host_cpu_s += time.thread_time() - cpu_s
            self.host_wall_s += time.perf_counter() - wall_s
            if ended:  # only now: threads that wait for the end read the times added above
                self.end(None)
        return not ended

    def run_alone(self) -> Stage[None]:
        """A generator of all the job's steps, for virtual ranks: no gates, deadlines or streams.

        `VirtualCluster.run(lambda transport: pending[transport.rank].run_alone())` runs one job of
        each rank to its end.
        """
        self.result = yield from without(self._steps, Gate)
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Ends the job, by an error or without, and wakes waiting threads; call it once."""
        self.error = error
        self.finished_s = time.perf_counter()
        self._ended.set()
        self._queued.set()  # a job may end without `QUEUED`
        if self._on_done is not None:
            self._on_done(self)

    def _mark_queued(self) -> None:
        """Records `finish_event` and wakes a thread in `wait_until_queued`."""
        self.finish_event = self._stream.recorded_event()
        self._queued.set()

    def _note_yielded(self, outcome: object, wake: Callable[[], None]) -> None:
        """Stores what the job has yielded: a marker (see the module), or a work to wait for."""
        if isinstance(outcome, Gate):
            self._is_at_gate = outcome is not LOCAL
            self._stream.at_gate(outcome)
        elif outcome is QUEUED:
            self._mark_queued()
        elif outcome is POSTED or outcome is UNORDERED:
            self.may_post = False
        else:
            self._work_since_s = time.perf_counter()
            self._work = work = cast(Work, outcome)
            work.when_ready(wake)

    def _finish_work(self, work: Work) -> None:
        """Finishes the work that the job waited for; the timer gets the wait as stage `network`.

        Raises:
            CommunicationError: the work's deadline has passed.
        """
        if not work.ready():  # `can_move` was true only because the deadline has passed
            raise CommunicationError(
                "an operation ran out of time",
                expected=f"an answer within {self._deadline_s:.0f} s",
                got="none",
                remedy="look at the other ranks' logs; raise scheme.timeout_s if they are slow",
            )
        self._work = None
        if self.queued():
            # A copy of reports after `QUEUED` belongs to no timed stage.
            work.finish()
        elif self._stream.on_cuda:
            with self._timer.stage("network"):  # the stream waits in `finish`: timed by events
                work.finish()
        else:
            with marked("network"):
                work.finish()
            # On a CPU the work is complete before `finish`: the wait began at the job's yield.
            self._timer.add_span("network", self._work_since_s, time.perf_counter())
