"""What is measured of each bucket: the timer, the records, and the sink that receives them.

A `StageTimer` measures. A `BucketRecord` holds the measurements of one bucket in one step. The
reducer hands records to a `RecordSink` and never imports telemetry. The stage names are used in
every table, JSON line and dashboard of the project.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Protocol

import torch

from megatron_sparse.profiler_ranges import marked

BUCKET_STAGES = ("threshold", "prune", "encode", "network", "decode", "profile")
"""Stages that each bucket goes through, possibly while the backward pass goes on."""

STEP_STAGES = ("forward_backward", "optimizer", "host_wait", "param_wait")
"""Stages of the training thread; with nothing else running they add up to the iteration."""

WAITS = ("host_wait", "param_wait")
"""Step stages in which the thread waits for communication: for gradients, and for parameters."""

STAGES = STEP_STAGES + BUCKET_STAGES


@dataclass
class Awaited:
    """A record of what the training thread waits for: a bucket's gradients, or its parameters.

    Attributes:
        WAIT: the step stage that the wait counts to.
        bucket: its name.
        step: counted from 0.
        numel: elements of the parameters; of the gradients those that this rank selects from: of
            the bucket, or of its part of it at a level above `rank`.
        dense_bytes: bytes that each rank of a ring would send for the whole bucket: of its
            all-reduce or reduce-scatter, or of an all-gather of the raw parameters.
        message_bytes: bytes of this rank's own message, however often it is sent; of a dense plan
            the bytes of its values; 0 for raw parameters.
        wire_bytes: bytes that this rank sent in pairwise messages; for `dense` and `raw`, whose
            messages the backend chooses, those of a ring.
        launched_s: the host's `time.perf_counter` at the launch.
        finished_s: the same at the end.
        exposed_s: seconds for which the training thread waited for it.
        host_cpu_us: processor microseconds that the progress thread spent in its steps, codecs on a
            CPU included; without waiting for works.
        host_wall_us: clock microseconds of the same steps.
        timer: measures the stages.
    """

    WAIT: ClassVar[str]

    bucket: str
    step: int
    _: KW_ONLY
    numel: int
    dense_bytes: int = 0
    message_bytes: int = 0
    wire_bytes: int = 0
    launched_s: float = 0.0
    finished_s: float = 0.0
    exposed_s: float = 0.0
    host_cpu_us: float = 0.0
    host_wall_us: float = 0.0
    timer: StageTimer = field(default_factory=lambda: StageTimer())

    def waited(self, began_s: float) -> float:
        """Notes the training thread's wait, which began at `began_s`; returns its seconds."""
        self.exposed_s = time.perf_counter() - began_s
        return self.exposed_s

    def end(self, finished_s: float, host_cpu_s: float, host_wall_s: float) -> None:
        """Takes over what the progress thread has measured, in seconds."""
        self.finished_s = finished_s
        self.host_cpu_us, self.host_wall_us = host_cpu_s * 1e6, host_wall_s * 1e6

    def hand_to(self, sink: RecordSink) -> None:
        """Gives the record to its sink."""
        raise NotImplementedError


@dataclass
class BucketRecord(Awaited):
    """What happened to one bucket in one step.

    Attributes:
        scheme: the collective that ran.
        phase: of the schedule.
        density: target density of the plan.
        nnz: elements that this rank sent.
        inside_bytes: those of `wire_bytes` that added up gradients inside the node or instance,
            dense, and gathered sums there: 0 at level `rank`.
        predicted_us: microseconds of all stages together by the planner's cost model; None if no
            such model chose the scheme.
        straggler: the rank of the group that was skipped, None if none was.
    """

    WAIT: ClassVar = "host_wait"

    scheme: str
    phase: str
    density: float
    nnz: int = 0
    inside_bytes: int = 0
    predicted_us: float | None = None
    straggler: int | None = None

    def hand_to(self, sink: RecordSink) -> None:
        """Gives the record to its sink."""
        sink.record_bucket(self)


@dataclass
class GatherRecord(Awaited):
    """What happened to one bucket's parameters in one all-gather.

    The stages of an exact or lossy gather are `encode`, `network` and `decode`.

    Attributes:
        method: `raw`, `exact` or `lossy`.
    """

    WAIT: ClassVar = "param_wait"

    method: str

    def hand_to(self, sink: RecordSink) -> None:
        """Gives the record to its sink."""
        sink.record_gather(self)


@dataclass(frozen=True)
class ReadinessRecord:
    """When the ranks of a group were ready to synchronise one bucket in one step.

    Attributes:
        bucket: its name.
        step: in which.
        waited_s: for each rank of the group, the seconds that it waited for the last one; 0 for
            the last one.
    """

    bucket: str
    step: int
    waited_s: tuple[float, ...]

    @property
    def ready_s(self) -> tuple[float, ...]:
        """Seconds at which each rank was ready, counted from the last one: none is positive."""
        return tuple(-waited_s for waited_s in self.waited_s)


INSIDE_TIER = "inside"
"""What a level above `rank` does inside the node or instance; a part of the stage `network`."""


class StageTimer:
    """Times stages with the host clock on CPU and with events on CUDA.

    On CUDA `stage` only records events on the current stream, so timing adds no host
    synchronisation; `times_us` waits for them and is meant for the end of an iteration. A profiler
    that is on sees each stage as a range, see `profiler_ranges`.

    Attributes:
        spans: (stage, begin, end) in host seconds; empty on CUDA.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._host_us: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` body to stage `name`."""
        with marked(name), self._timed(name, is_span=True):
            yield

    def inside(self) -> AbstractContextManager[None]:
        """Adds the time of the `with` body, a part of the stage `network`, to `inside_us`."""
        return self._timed(INSIDE_TIER, is_span=False)

    def in_flight(self) -> AbstractContextManager[None]:
        """Adds the time of the `with` body, which may end in another call, to stage `network`."""
        return self._timed("network", is_span=True)

    @contextmanager
    def _timed(self, name: str, *, is_span: bool) -> Iterator[None]:
        """Times the `with` body: by events on CUDA, else by the host's clock.

        On a CPU `is_span` says whether `spans` gets the begin and end too.
        """
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            end_s = time.perf_counter()
            if is_span:
                self.add_span(name, begin_s, end_s)
            else:
                self.add(name, (end_s - begin_s) * 1e6)

    def inside_us(self) -> float:
        """Microseconds of `INSIDE_TIER`; waits for its CUDA events if there are any."""
        self._settle()
        return self._host_us.get(INSIDE_TIER, 0.0)

    def borders(self, stages: Sequence[str]) -> list[int]:
        """Makes CUDA events that time consecutive stages, for code in C++ to record.

        Returns:
            For each stage the `cudaEvent_t` that marks its begin, and one for the end of the last;
            C++ records them on the current stream. All are 0 on a CPU, which needs no events.
        """
        if not self._cuda:
            return [0] * (len(stages) + 1)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(stages) + 1)]
        for event in events:
            event.record()  # torch creates the `cudaEvent_t` at the first record
        # A stage ends with the event that begins the next one.
        self._events += zip(stages, events, events[1:], strict=False)
        return [event.cuda_event for event in events]

    def add_span(self, name: str, begin_s: float, end_s: float) -> None:
        """Adds the host time between two readings of `time.perf_counter` to stage `name`."""
        self.spans.append((name, begin_s, end_s))
        self.add(name, (end_s - begin_s) * 1e6)

    def add(self, name: str, time_us: float) -> None:
        """Adds `time_us` microseconds of host time to stage `name`."""
        self._host_us[name] = self._host_us.get(name, 0.0) + time_us

    def times_us(self) -> dict[str, float]:
        """Microseconds by stage; waits for the CUDA events if there are any."""
        self._settle()
        return {name: self._host_us.get(name, 0.0) for name in BUCKET_STAGES}

    def _settle(self) -> None:
        """Waits for the CUDA events so far, and adds their times to the stages."""
        for name, begin, end in self._events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) * 1e3)
        self._events.clear()


class RecordSink(Protocol):
    """Receives what the reducer measured. Must not block and must not raise."""

    def record_bucket(self, record: BucketRecord) -> None:
        """Called once for each bucket and step, by the training thread, after its `wait()`."""

    def record_gather(self, record: GatherRecord) -> None:
        """Called once for each bucket and gather of parameters, after its `wait()`."""

    def record_readiness(self, record: ReadinessRecord) -> None:
        """Called by the training thread two steps after the record's, on every rank alike."""

    def record_stage(self, stage: str, seconds: float) -> None:
        """Adds host seconds to one of `STEP_STAGES` of the current iteration."""


class NullSink(RecordSink):
    """A sink that keeps nothing: it does what the protocol's own methods do."""
