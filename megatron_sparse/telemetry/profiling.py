"""The traces of some iterations: the plugin's own timeline, and torch.profiler's.

`trace.json` shows the host's view and costs nothing, because its times are recorded anyway.
`profile.json` holds torch.profiler's records of the training thread, the progress thread and the
GPU, with every stage as a range `megatron_sparse/<stage>`. The buckets' timeline is added to it,
because no thread works while a bucket is on the wire. The profiler slows iterations down: their
times are not typical of the run.
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
from megatron_sparse.recording import BucketRecord, GatherRecord
from megatron_sparse.telemetry.trace import Span, Timeline, write_trace

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
PROFILE_FILE = "profile.json"


class IterationTraces:
    """Writes both files when their last iteration has ended, or at the end of the run.

    A failure of the disk or the profiler is logged once; training goes on.

    Args:
        run_dir: the run's folder, which exists.
        tracking: `trace_iters`, `profile_iters` and `trace_start` are used.
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
        """Starts the profiler if this iteration is its first."""
        if iteration not in self._profiled or self._profiler is not None:
            return
        if profiler_is_on():
            # Two active profilers break each other, and torch does not refuse the second.
            self._profiled = range(0)
            logger.error("%s is not written: another torch.profiler is active", PROFILE_FILE)
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            # The progress thread is older than the profiler, which would leave it out otherwise.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def end(
        self,
        iteration: int,
        spans: Sequence[Span],
        records: Sequence[BucketRecord],
        gathers: Sequence[GatherRecord],
    ) -> None:
        """Adds an iteration; writes a file after its last iteration."""
        if iteration in self._traced:
            self._timeline.add(iteration, spans, records, gathers)
        if iteration in self._profiled:
            self._beside_profile.add(iteration, spans, records, gathers)
        if self._traced and iteration == self._traced[-1]:
            self._write_timeline()
        if self._profiled and iteration == self._profiled[-1]:
            self._write_profile()

    def close(self) -> None:
        """Writes the iterations so far, for a run that ends early."""
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
        # The profiler's times count from a calendar time, ours from a time of the host's clock.
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
