"""The profile of some iterations: torch.profiler's trace, with the buckets' timeline beside it.

`profile.json` holds torch.profiler's records of the training thread, the progress thread and the
GPU, with every stage as a range `megatron_sparse/<stage>`. The buckets' timeline is added to it,
because no thread works while a bucket is on the wire. The profiler slows iterations down: their
times are not typical of the run.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.profiler_ranges import profiler_is_on
from megatron_sparse.recording import BucketRecord, GatherRecord
from megatron_sparse.telemetry.lines import write_whole

logger = logging.getLogger(__name__)

PROFILE_FILE = "profile.json"
OF_BUCKET = ("scheme", "density", "numel", "nnz", "wire_bytes", "inside_bytes")
OF_GATHER = ("method", "numel", "wire_bytes")
"""Attributes of a record that its span shows."""


class Timeline:
    """Collects events in the Trace Event Format, for chrome://tracing and ui.perfetto.dev.

    Each bucket has a row with its stages; the gathers of its parameters have a row of their own.
    Beside the training thread's ranges the rows show whether synchronisation overlaps with the
    backward pass: overlapped stages of a bucket lie below `forward_backward`; the waits of the
    training thread (`host_wait`) are the exposed part.

    Times are the host's. On CUDA a bucket's row shows only its launch and end; its stages are
    kernels, which torch.profiler shows.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # A process number that torch's trace does not use: its GPUs have numbers from 0 on, and its
        # processes those of Linux, below 2**22.
        self._pid = 2**23 + rank
        # Row, name, begin and end in seconds of `time.perf_counter`, and details by name.
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def add(
        self, iteration: int, records: Iterable[BucketRecord], gathers: Iterable[GatherRecord]
    ) -> None:
        """Adds the spans of an iteration: of each record, and of its stages in the same row."""
        rows: list[tuple[str, BucketRecord | GatherRecord, Sequence[str]]]
        rows = [(record.bucket, record, OF_BUCKET) for record in records]
        rows += [(f"{gather.bucket} parameters", gather, OF_GATHER) for gather in gathers]
        for row, record, attributes in rows:
            of_stage = {"iteration": iteration}
            of_record = of_stage | {name: getattr(record, name) for name in attributes}
            self._spans.append((row, row, record.launched_s, record.finished_s, of_record))
            # A stage's span is (stage, begin, end).
            self._spans += [(row, *span, of_stage) for span in record.timer.spans]

    def events(self, origin_us: float) -> list[dict[str, Any]]:
        """Returns all events in the Trace Event Format: the names of the rows, then the spans.

        Args:
            origin_us: microseconds of `time.perf_counter` at which the trace's times are 0.
        """
        common = {"ph": "M", "pid": self._pid}  # M: an event that names something
        process = {"name": "process_name", "args": {"name": f"rank {self._rank}: buckets"}}
        names = dict.fromkeys(row for row, *_ in self._spans)
        number_of = {row: number for number, row in enumerate(names, 1)}
        rows = [common | process] + [
            common | {"name": "thread_name", "tid": number, "args": {"name": row}}
            for row, number in number_of.items()
        ]
        return rows + [
            {
                "ph": "X",  # an event with a duration
                "name": name,
                "pid": self._pid,
                "tid": number_of[row],
                "ts": begin_s * 1e6 - origin_us,
                "dur": (end_s - begin_s) * 1e6,
                "args": arguments,
            }
            for row, name, begin_s, end_s, arguments in self._spans
        ]


class IterationProfile:
    """Profiles some iterations; writes `profile.json` after the last of them, or at the run's end.

    A failing disk or profiler raises: wrap it in `Isolated`.

    Args:
        run_dir: the run's folder, which exists.
        tracking: `profile_iters` and `trace_start` are used.
    """

    def __init__(self, run_dir: Path, tracking: TrackingConfig) -> None:
        self._run_dir = run_dir
        start = tracking.trace_start
        self._profiled = range(start, start + tracking.profile_iters)
        self._timeline = Timeline(dist.get_rank() if dist.is_initialized() else 0)
        self._profiler: Any = None

    def begin(self, iteration: int) -> None:
        """Starts the profiler if this iteration is to be profiled and the profiler is not on."""
        if iteration not in self._profiled or self._profiler is not None:
            return
        if profiler_is_on():
            # Two active profilers break each other, and torch does not refuse the second one.
            self._profiled = range(0)  # profile nothing
            logger.error("%s is not written: another torch.profiler is active", PROFILE_FILE)
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            # By default the profiler leaves out threads older than itself: the progress thread.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def end(
        self, iteration: int, records: Sequence[BucketRecord], gathers: Sequence[GatherRecord]
    ) -> None:
        """Adds an iteration; writes the file after the last one."""
        if iteration in self._profiled:
            self._timeline.add(iteration, records, gathers)
            if iteration == self._profiled[-1]:
                self.close()

    def close(self) -> None:
        """Stops the profiler and writes the iterations so far; does nothing if none is active."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        torch_path = self._run_dir / f".{PROFILE_FILE}.torch"
        profiler.stop()
        profiler.export_chrome_trace(str(torch_path))
        trace = json.loads(torch_path.read_text(encoding="utf-8"))
        torch_path.unlink()
        # The trace's times count from a Unix time; our events use `time.perf_counter`.
        origin_unix_us = trace.get("baseTimeNanoseconds", 0) / 1e3
        unix_minus_counter_us = (time.time_ns() - time.perf_counter_ns()) / 1e3
        origin_us = origin_unix_us - unix_minus_counter_us
        trace["traceEvents"] += self._timeline.events(origin_us)
        write_whole(self._run_dir / PROFILE_FILE, json.dumps({"displayTimeUnit": "ms", **trace}))
