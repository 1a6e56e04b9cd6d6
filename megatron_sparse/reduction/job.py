"""A job: a bucket's pipeline, or a gather of parameters, from its launch to its result.

A job is a generator. It yields

- a `Work`, an operation that it has posted (handed to gloo or NCCL): resume when it is complete;
- `GATE`: the job has worked locally until now and will post operations from here on;
- `POSTED`: the job will post nothing more;
- `UNORDERED`: the job will post only messages with tags of their own, whose order does not matter;
- `QUEUED`: all of its work is on a stream (CUDA only); what follows reads reports on the host.

Between two yields it works locally. `Pending` is the job under way: one thread launches it and
waits for it, a driver (`progress`) steps it. Only drivers step a job; `without` and
`one_after_another` combine stages into one.

On CUDA buckets are worked on in two streams:

    codec     prepare and select: all that a job does before its gate
    network   exchange, decode, and all else behind the gate

Each stream runs the buckets in the order of their launch. A bucket enters the codec stream after
the launching stream's work, enters the network stream after its own selection, and the stream that
waits for it goes on after its work on the network stream. So bucket N + 1 is selected beside the
exchange of bucket N. Exchanges follow one another, and so do the decoders between them: buffers
that only work behind the gate uses are shared by all buckets (`Exchange.take`). Memory that is
allocated before the gate and used behind it must be named to `used_here`; a buffer that outlives
the step needs no more than that, because the next step's launch comes after this one's
`finish_event`.
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
    """Yielded by a job before it posts operations; once it has passed, it may yield it again.

    Jobs pass in the order of their launch: none passes while an earlier job may still post.
    """

    GATE = "gate"


GATE = Gate.GATE

type Stage[T] = Generator[object, None, T]
"""A job or a part of one: yields works and markers (see the module's docstring), returns T."""


def one_after_another(first: Stage[int], second: Stage[int], *, second_posts: bool) -> Stage[int]:
    """Two stages of a bucket; `second` begins when the result of `first` is on the stream.

    What a stage does after `QUEUED` only reads reports: that comes when both are queued.

    Args:
        first: usually a collective.
        second: what its result goes into.
        second_posts: whether `second` posts operations. Then the next bucket may post only when
            `second` has: ranks would else meet there in the order in which their first halves end,
            which differs between ranks.

    Returns:
        The bytes sent in both.
    """
    first_bytes = yield from _until_queued(first, more_follows=second_posts)
    second_bytes = yield from _until_queued(second, more_follows=False)
    # None: that stage has stopped at `QUEUED`, and still has its reports to read.
    if first_bytes is None or second_bytes is None:
        yield QUEUED
    if first_bytes is None:
        first_bytes = yield from first
    if second_bytes is None:
        second_bytes = yield from second
    return first_bytes + second_bytes


def _until_queued(steps: Stage[int], *, more_follows: bool) -> Stage[int | None]:
    """Runs a stage to its end and returns its bytes, or to `QUEUED` and returns None.

    With `more_follows` a later stage of the job posts too, so this one's `POSTED` and `UNORDERED`
    are left out.
    """
    while True:
        try:
            outcome = next(steps)
        except StopIteration as end:
            return end.value
        if outcome is QUEUED:
            return None
        ends_posting = isinstance(outcome, Marker)
        if not (ends_posting and more_follows):
            yield outcome


class BucketStreams:
    """The streams of a process, on CUDA; see the module's docstring.

    Args:
        device: of the buckets.
    """

    def __init__(self, device: torch.device) -> None:
        self.codec = torch.cuda.Stream(device)
        self.network = torch.cuda.Stream(device)


class JobStream:
    """The stream that one job is on.

    Args:
        streams: the process's; None on a CPU, where nothing here has an effect.
    """

    def __init__(self, streams: BucketStreams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.codec
        self._local_work_done: torch.cuda.Event | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether there are streams at all."""
        return self._streams is not None

    def current(self) -> AbstractContextManager[object]:
        """Makes the job's stream the thread's current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Lets the job's stream wait for an event, if there is one."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def at_gate(self) -> None:
        """Marks the end of the job's local work; call it with the job's stream current."""
        if self._streams is not None and self._stream is self._streams.codec:
            self._local_work_done = self.marked_here()

    def pass_gate(self) -> None:
        """Moves the job to the network stream, behind its own local work."""
        if self._streams is not None and self._local_work_done is not None:
            self._stream = self._streams.network
            self._stream.wait_event(self._local_work_done)
            self._local_work_done = None

    def marked_here(self) -> torch.cuda.Event | None:
        """An event after all that the current stream has queued; None on a CPU."""
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tells torch's allocator that tensors are used on the current stream from here on.

    Call it behind the gate for memory that was allocated before it: freed by the host, it would
    else go to the next bucket's selection while the network stream still reads it.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())


DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 5.0
"""The deadline of an operation is this factor times the timeout, plus this slack: it must come
after the backend's own timeout, whose error says more."""


class Pending[T]:
    """A job under way. Call `wait` once, or else `wait_until_queued` and `confirm`, each once.

    A job ends in two steps. When it is *queued*, all of its work on the device is on a stream, and
    the bucket can be used on every stream that waits for `finish_event`. When it has *ended*, its
    reports have been read, so the sum is known to be right. On a CPU both are one moment; on CUDA
    only a job in capacity mode has the first one to itself.

    Args:
        name: of the bucket, for errors.
        steps: the job.
        timer: receives the time that operations take.
        record: gets the job's times, and goes to the sink when the job is confirmed; or None.
        sink: receives the record, and the launching thread's waits.
        on_done: called once when the job has ended, with or without an error: by the thread that
            drives it (on CUDA with its stream current), or by the caller if the job is refused.
            Must neither block nor raise.

    Attributes:
        after: a job submitted before, whose memory this one reuses: on the device this one's work
            begins after that job's. Set it before `Progress.submit`.
        error: the error that ended the job; None without one.
        result: what the job returned; None before its end, and after an error.
        finish_event: on CUDA, marks the end of the job's work on its stream.
        finished_s: `time.perf_counter` when the host's part ended.
        host_cpu_s: processor seconds that the driving thread has spent in the job's steps.
        host_wall_s: clock seconds of the same steps; longer if the thread had to wait for a core,
            for the interpreter's lock, or for the device.
        drive_rest: runs what a queued job still has to do, where no thread of its own does that.
        may_post: for the driver: later jobs must wait at the gate, because this one has not yet
            yielded `POSTED` or `UNORDERED`.
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
        self._start_event: torch.cuda.Event | None = None
        self._is_at_gate = False
        self._work: Work | None = None
        self._since_s = 0.0

    # The launching thread's side.

    def done(self) -> bool:
        """Whether the host's part has ended, with or without an error."""
        return self._ended.is_set()

    def queued(self) -> bool:
        """Whether all of its work on the device is on a stream, or it has ended."""
        return self._queued.is_set()

    def wait(self) -> T:
        """Blocks until the job has ended well: the bucket holds the sum, which is right.

        Returns:
            The job's result.

        Raises:
            MegatronSparseError: the job failed; the bucket's content is undefined.
        """
        self.wait_until_queued()
        self.confirm()
        return cast(T, self.result)

    def wait_until_queued(self) -> None:
        """Blocks the host until the job is queued; on CUDA the current stream waits for its work.

        The host does not wait for the device, unless the job needed a number from it. Nothing
        irrevocable may be done with the sum before `confirm` has returned.

        Raises:
            MegatronSparseError: the error that ended the job, if it is known by now.
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
        """Blocks until the job has ended: its reports have been read. Then the sink has its record.

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
        """Called once by the launching thread, before the first step.

        Args:
            streams: of the process; None on a CPU. The job begins after what the current stream
                has queued.
            timeout_s: seconds that one operation may take.
        """
        self._stream = JobStream(streams)
        self._deadline_s = timeout_s * DEADLINE_FACTOR + DEADLINE_SLACK_S
        self._start_event = self._stream.marked_here()

    def can_move(self, *, gate_is_open: bool) -> bool:
        """Whether `step` would return at once.

        Args:
            gate_is_open: whether no job before this one may still post.
        """
        if self.after is not None:  # `step` lets the stream wait for that job's work
            return self.after.queued()
        if self._is_at_gate:
            return gate_is_open
        if self._work is None:  # it waits for no operation
            return True
        # After the deadline the job is resumed too, and `_finish_work` raises.
        waited_s = time.perf_counter() - self._since_s
        return self._work.ready() or waited_s > self._deadline_s

    def step(self, wake: Callable[[], None]) -> bool:
        """Resumes the job until its next yield; False when it has ended.

        Args:
            wake: called by some thread as soon as the job may have become able to move.

        Raises:
            BaseException: the error that ends the job; the driver ends it, and all others.
        """
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        # The first step comes after what the launching stream had queued, and after `after`.
        self._stream.wait(self._start_event)
        self._start_event = None
        if self.after is not None:
            self._stream.wait(self.after.finish_event)
            self.after = None
        if self._is_at_gate:
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
            if ended:
                self.end(None)
        return not ended

    def run_alone(self) -> Stage[None]:
        """All steps, for a caller that drives them itself: without gates, deadlines and streams.

        `VirtualCluster.run(lambda transport: pending[transport.rank].run_alone())` drives a job of
        each rank, all of which have ended then.
        """
        self.result = yield from without(self._steps, Gate)
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Marks the job as ended, by an error or well, and wakes waiting threads; call it once."""
        self.error = error
        self.finished_s = time.perf_counter()
        self._ended.set()
        self._queued.set()  # a job may end without `QUEUED`
        if self._on_done is not None:
            self._on_done(self)

    def _mark_queued(self) -> None:
        self.finish_event = self._stream.marked_here()
        self._queued.set()

    def _note_yielded(self, outcome: object, wake: Callable[[], None]) -> None:
        """Notes what the job has yielded: where it is, or the work that it waits for."""
        if outcome is GATE:
            self._is_at_gate = True
            self._stream.at_gate()
        elif outcome is QUEUED:
            self._mark_queued()
        elif outcome is POSTED or outcome is UNORDERED:
            self.may_post = False
        else:
            self._since_s = time.perf_counter()
            self._work = work = cast(Work, outcome)
            work.when_ready(wake)

    def _finish_work(self, work: Work) -> None:
        """Takes the result of the work that the job waited for, and times the wait.

        Raises:
            CommunicationError: the work is not ready, so its deadline has passed: a driver resumes
                a job only then or when its work is ready.
        """
        if not work.ready():
            raise CommunicationError(
                "an operation ran out of time",
                expected=f"an answer within {self._deadline_s:.0f} s",
                got="none",
                remedy="look at the other ranks' logs; raise scheme.timeout_s if they are slow",
            )
        self._work = None
        if self.queued():
            # The job yielded `QUEUED`: it now reads reports, which is no stage and is not timed.
            work.finish()
        elif self._stream.on_cuda:
            with self._timer.stage("network"):
                work.finish()
        else:
            with marked("network"):
                work.finish()
            # From the yield on: by now the work is done, and `finish` takes no time.
            self._timer.add_span("network", self._since_s, time.perf_counter())
