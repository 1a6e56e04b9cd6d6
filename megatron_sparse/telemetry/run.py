"""`RunTelemetry`: collects a run's measurements, sums them up, writes files, feeds dashboards."""

import atexit
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import installed_version
from megatron_sparse.recording import (
    STEP_STAGES,
    WAITS,
    BucketRecord,
    GatherRecord,
    ReadinessRecord,
)
from megatron_sparse.telemetry.breakdown import IterationBreakdown, bucket_line, iteration_breakdown
from megatron_sparse.telemetry.console import SUMMARY_FILE, print_summary
from megatron_sparse.telemetry.history import RunHistory
from megatron_sparse.telemetry.lines import JsonLines, other_version, read_lines, write_whole
from megatron_sparse.telemetry.metrics import bucket_scalars
from megatron_sparse.telemetry.profiling import IterationProfile
from megatron_sparse.telemetry.progress import Isolated, RunProgress
from megatron_sparse.telemetry.quantities import target_density
from megatron_sparse.telemetry.readiness import (
    READINESS_FILE,
    read_readiness,
    readiness_line,
    step_scalars,
    summary_of,
)
from megatron_sparse.telemetry.run_lock import locked
from megatron_sparse.telemetry.sinks import ScalarSink
from megatron_sparse.version import __version__

logger = logging.getLogger(__name__)

FLUSH_EVERY = 10
"""Iterations between flushes of the JSON lines: to watch a run, at no cost."""
BREAKDOWN_FILE = "breakdown.jsonl"
BUCKETS_FILE = "buckets.jsonl"


class RunTelemetry:
    """Implements `recording.RecordSink` for one process of a training run.

    Every rank may have one and gets breakdowns from it; only the writer has files, dashboards and
    the final table. Call all methods from the training thread.

    During training no method raises because of a failing disk or dashboard: the failure is logged
    once, and the disk or dashboard is not used again.

    Args:
        run_dir: folder for the files, made if needed; None writes none.
        tracking: console, intervals, traces.
        is_writer: whether this rank writes.
        sinks: dashboards; `close` closes them.
        resolved_config: `name` and `compression.density` of it go into the summary.
        iterations: iterations of the whole run, for the time left; None if unknown.
        locks: whether the writer locks `run_dir` until `close`; False where the run's launcher has.

    Attributes:
        waited_s: seconds of `WAITS` since the run began.

    Raises:
        ConfigError: the writer cannot write to `run_dir`, or another process trains there.

    Example:
        >>> telemetry = RunTelemetry(None, TrackingConfig(console="off"), is_writer=False)
        >>> telemetry.record_stage("host_wait", 0.002)
        >>> telemetry.end_iteration(1, iteration_s=0.1).exposed_ms
        2.0
    """

    def __init__(
        self,
        run_dir: Path | None,
        tracking: TrackingConfig,
        *,
        is_writer: bool,
        sinks: Sequence[ScalarSink] = (),
        resolved_config: Mapping[str, Any] | None = None,
        iterations: int | None = None,
        locks: bool = False,
    ) -> None:
        self._run_dir = Path(run_dir) if run_dir is not None and is_writer else None
        self._tracking = tracking
        self._is_writer = is_writer
        self._sinks = [Isolated(sink, type(sink).__name__) for sink in sinks]
        self._config = resolved_config or {}
        self._name = self._config.get("name") or (Path(run_dir).name if run_dir else None)
        # Of the current iteration; `end_iteration` takes and empties them.
        self._records: list[BucketRecord] = []
        self._gathers: list[GatherRecord] = []
        self._readiness: list[ReadinessRecord] = []
        self._step_s: dict[str, float] = {}
        # Of the run so far.
        self.waited_s = 0.0
        self._profile: Isolated[IterationProfile] | None = None
        self._history = RunHistory()
        self._last: IterationBreakdown | None = None
        self._since_flush = 0  # iterations
        self._machine: dict[str, Any] | None = None  # see `machine`
        self._closed: dict[str, Any] | None = None  # the summary, from `close` on
        self._files: tuple[JsonLines, ...] = ()
        self._lock = ExitStack()
        self._progress = None
        if is_writer and tracking.console != "off":
            self._progress = Isolated(RunProgress(self._name, iterations), "the progress")
        if self._run_dir is not None:
            self._open_files(self._run_dir, locks)

    def _open_files(self, run_dir: Path, locks: bool) -> None:
        """Repairs the files and reads a resumed run's iterations into the history.

        Locks the folder first if `locks`. Raises a ConfigError if any of this fails.
        """
        files = (
            JsonLines(run_dir / BREAKDOWN_FILE),
            JsonLines(run_dir / BUCKETS_FILE),
            # Only runs that measure delays have it.
            JsonLines(run_dir / READINESS_FILE, optional=True),
        )
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if locks:
                self._lock.enter_context(locked(run_dir))
            for file in files:
                file.repair()
            for line in read_lines(run_dir / BREAKDOWN_FILE):
                self._history.append(IterationBreakdown(**line))
        except OSError as error:
            raise ConfigError(
                "the run's folder cannot be used",
                expected="a readable and writable folder",
                got=error,
                remedy="choose another run folder or free the disk",
            ) from None
        except (TypeError, ValueError, KeyError) as error:
            raise other_version(run_dir / BREAKDOWN_FILE, error) from None
        self._files = files
        self._profile = Isolated(IterationProfile(run_dir, self._tracking), "the profile")
        atexit.register(self.flush)

    def samples(self, iteration: int) -> bool:
        """Whether this rank samples the expensive metrics in this iteration."""
        every = self._tracking.sample_every
        return self._is_writer and every > 0 and iteration % every == 0

    def begin_iteration(self, iteration: int) -> None:
        """Begins an iteration: drops earlier waits, and starts torch.profiler if it is to profile.

        The training thread may have waited for parameters since the last iteration, such as before
        an evaluation. That wait counts in no iteration; the bytes sent count in this iteration.
        """
        self._step_s.pop("param_wait", None)
        if self._profile is not None:
            self._profile.do(lambda profile: profile.begin(iteration))

    def record_bucket(self, record: BucketRecord) -> None:
        """Keeps `record` for the current iteration; reads its times only when that ends."""
        self._records.append(record)

    def record_gather(self, record: GatherRecord) -> None:
        """Keeps `record` for the current iteration."""
        self._gathers.append(record)

    def record_readiness(self, record: ReadinessRecord) -> None:
        """Keeps `record` for the current iteration, which is later than the record's own."""
        self._readiness.append(record)

    def record_stage(self, stage: str, seconds: float) -> None:
        """Adds host seconds to one of `STEP_STAGES` of the current iteration."""
        assert stage in STEP_STAGES, f"{stage!r} is not one of {STEP_STAGES}"
        self._step_s[stage] = self._step_s.get(stage, 0.0) + seconds
        if stage in WAITS:
            self.waited_s += seconds

    def end_iteration(
        self,
        iteration: int,
        *,
        iteration_s: float,
        loss: float | None = None,
        grad_norm: float | None = None,
        skipped: bool = False,
        extra: Mapping[str, float] | None = None,
    ) -> IterationBreakdown:
        """Ends the current iteration: sums up, appends to the files, feeds the sinks.

        An iteration number that is not larger than the last one (a resumed run, a repeated step)
        replaces all lines from that number on. On CUDA this waits for the events of the iteration's
        stages: call it after the optimizer step, when the losses are read anyway.

        Arguments: see `iteration_breakdown`. Returns the breakdown, on every rank.
        """
        assert self._closed is None, "end_iteration after close"
        # From here on new records belong to the next iteration.
        records, self._records = self._records, []
        gathers, self._gathers = self._gathers, []
        step_s, self._step_s = self._step_s, {}
        readiness, self._readiness = self._readiness, []
        # Buckets that were synchronised without their straggler.
        buckets_without = sum(record.straggler is not None for record in records)
        breakdown = iteration_breakdown(
            iteration,
            records,
            step_s,
            iteration_s=iteration_s,
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped,
            extra={**step_scalars(readiness, buckets_without), **(extra or {})},
            gathers=gathers,
        )
        if self._last is None or iteration <= self._last.iteration:
            # The run repeats iterations, or resumes (`_last` is None): drop what it will rewrite.
            self._history.cut(iteration)
            self._on_files(lambda file: file.cut(iteration))
        self._last = breakdown
        self._history.append(breakdown)
        if self._machine is None:
            # Read now, because at the end of the run the process group may be destroyed.
            self._machine = machine()
        if self._files:
            self._write(breakdown, records, readiness)
        # `do`: an exception of a profile, sink or progress only turns that one off.
        if self._profile is not None:
            self._profile.do(lambda profile: profile.end(iteration, records, gathers))
        if self._is_writer:
            scalars = breakdown.scalars()
            if self.samples(iteration):
                scalars |= bucket_scalars(records, readiness)
            for sink in self._sinks:
                sink.do(lambda shown: shown.log(scalars, iteration))
        if self._progress is not None:
            self._progress.do(lambda progress: self._show_progress(progress, breakdown))
        return breakdown

    def flush(self) -> None:
        """Writes pending lines to the files; also runs when the interpreter exits."""
        self._since_flush = 0
        self._on_files(JsonLines.flush)

    def close(
        self, memory: Mapping[str, int] | None = None, trials: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Writes `summary.json`, closes the sinks, prints the table; later calls do nothing.

        Buckets of an unfinished iteration are dropped. Call it in a `finally` block.

        Args:
            memory: bytes that the plugin holds on this rank, by purpose; kept as `memory_bytes`.
            trials: the preset that `density=auto` took, and every preset's time.

        Returns:
            The summary. On the writer it covers the whole run, including earlier parts of a resumed
            one; on other ranks it covers this process.
        """
        if self._closed is not None:
            return self._closed
        self.flush()
        # `always`: what has failed may still hold files and threads.
        if self._profile is not None:
            self._profile.do(IterationProfile.close, always=True)
        atexit.unregister(self.flush)
        summary = self._closed = self._summary()
        summary["memory_bytes"] = dict(memory or {})
        summary["trials"] = dict(trials or {})
        for sink in self._sinks:
            sink.do(lambda shown: shown.close(), always=True)
        if self._run_dir is not None:
            try:
                write_whole(self._run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
            except OSError as error:
                logger.error("%s cannot be written: %s", SUMMARY_FILE, error)
        self._lock.close()  # after the last file
        if self._progress is not None:  # the console is on
            print_summary(summary)
        return summary

    def _write(
        self,
        breakdown: IterationBreakdown,
        records: Sequence[BucketRecord],
        readiness: Sequence[ReadinessRecord],
    ) -> None:
        """Adds an iteration's lines to the three files; flushes every `FLUSH_EVERY` iterations."""
        breakdowns, buckets, delays = self._files
        breakdowns.append(breakdown.line())
        # The lines count a bucket's times from the iteration's first launch.
        first_launch_s = min((record.launched_s for record in records), default=0.0)
        for record in records:
            buckets.append(bucket_line(record, breakdown.iteration, first_launch_s))
        for record in readiness:
            delays.append(readiness_line(record))
        self._since_flush += 1
        if self._since_flush >= FLUSH_EVERY:
            self.flush()

    def _show_progress(self, progress: RunProgress, breakdown: IterationBreakdown) -> None:
        """Adds an iteration that has just ended; prints a line in sampled iterations."""
        progress.add(breakdown, time.perf_counter())
        if self.samples(breakdown.iteration):
            print(progress.line(), flush=True)

    def _on_files(self, act: Callable[[JsonLines], None]) -> None:
        """Calls `act` with each file; logs the first OSError and writes no more lines after it."""
        try:
            for file in self._files:
                act(file)
        except OSError as error:
            self._files = ()
            logger.error("no more JSON lines are written in this run: %s", error)

    def _summary(self) -> dict[str, Any]:
        """Returns the fields of `summary.json`, except `close`'s arguments."""
        compression = self._config.get("compression") or {}
        of_history = self._history.summary()
        return {
            "name": self._name,
            **of_history,
            "stragglers": summary_of(read_readiness(self._run_dir) if self._run_dir else ()),
            "target_density": target_density(compression.get("density"), of_history),
            **(self._machine or machine()),
            "versions": versions(),
        }


def machine() -> dict[str, Any]:
    """Returns the number of ranks and the device's name."""
    # Not is_available: asking for a GPU's name makes a CUDA context, also in a CPU run.
    cuda = torch.cuda.is_initialized()
    distributed = dist.is_available() and dist.is_initialized()
    return {
        "world_size": dist.get_world_size() if distributed else 1,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of this package and of what it runs on; None for what is missing.

    `cuda` is None, too, if this process has not used a GPU.
    """
    return {
        "megatron_sparse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_initialized() else None,
        "megatron_core": installed_version("megatron-core"),
        "python": platform.python_version(),
    }
