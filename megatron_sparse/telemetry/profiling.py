"""The traces of some iterations: our own timeline, and torch.profiler's.

`trace.json` is the host's view and costs nothing: what was recorded anyway. `profile.json` is what
torch.profiler sees of the training thread, the progress thread and the GPU, with every stage as a
range `megatron_sparse/<stage>`; the buckets' timeline is put beside it, because a bucket that is on
the wire is no thread's work. Recording slows the iterations down: their times are not the run's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.profiler_ranges import profiler_is_on
from megatron_sparse.recording import BucketRecord
from megatron_sparse.telemetry.trace import Span, Timeline, write_trace

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
PROFILE_FILE = "profile.json"


class IterationTraces:
    """Writes both files when their last iteration has ended, or at the end of the run.

    A disk or a profiler that fails is reported once; training goes on.

    Args:
        run_dir: of the run, which exists.
        tracking: `trace_iters`, `profile_iters`, `trace_start`.
    """

    def __init__(self, run_dir: Path, tracking: TrackingConfig) -> None:
        self._run_dir = run_dir
        start = tracking.trace_start
        self._traced = range(start, start + tracking.trace_iters)
        self._profiled = range(start, start + tracking.profile_iters)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._timeline = Timeline(self._rank)
        self._beside_profile = Timeline(self._rank)
        self._profiler: Any = None

    def begin(self, iteration: int) -> None:
        """Starts the profiler if this iteration is the first for it."""
        if iteration not in self._profiled or self._profiler is not None:
            return
        if profiler_is_on():
            # Two at once break each other, and torch does not refuse the second.
            self._profiled = range(0)
            logger.error("no %s: another torch.profiler is on", PROFILE_FILE)
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            # The progress thread was there before the profiler, which otherwise leaves it out.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def end(self, iteration: int, spans: Sequence[Span], records: Sequence[BucketRecord]) -> None:
        """Adds an iteration; the last one writes."""
        if iteration in self._traced:
            self._timeline.add(iteration, spans, records)
        if iteration in self._profiled:
            self._beside_profile.add(iteration, spans, records)
        if self._traced and iteration == self._traced[-1]:
            self._write_timeline()
        if self._profiled and iteration == self._profiled[-1]:
            self._write_profile()

    def close(self) -> None:
        """Writes what a run that ended early has."""
        self._write_timeline()
        self._write_profile()

    def _write_timeline(self) -> None:
        timeline, self._timeline = self._timeline, Timeline(self._rank)
        if not timeline.empty:
            self._write(TRACE_FILE, timeline.events(timeline.begin_us))

    def _write_profile(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        part = self._run_dir / f".{PROFILE_FILE}.torch"
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(part))
            trace = json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        except (OSError, RuntimeError, ValueError) as error:
            logger.error("%s cannot be made: %s", PROFILE_FILE, error)
            return
        # Its times count from this moment of the calendar, ours from one of the host's own clock.
        base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
        calendar_us = (time.time_ns() - time.perf_counter_ns()) / 1e3
        beside = self._beside_profile.events(base_us - calendar_us)
        self._write(PROFILE_FILE, trace["traceEvents"] + beside, trace)

    def _write(
        self, name: str, events: list[dict[str, Any]], trace: dict[str, Any] | None = None
    ) -> None:
        try:
            write_trace(self._run_dir / name, events, trace)
        except OSError as error:
            logger.error("%s cannot be written: %s", name, error)
