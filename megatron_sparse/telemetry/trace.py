"""A timeline of some iterations, for chrome://tracing and ui.perfetto.dev.

One row shows the training thread, and one each bucket with its stages; the gathers of its
parameters have a row of their own. The timeline shows at a
glance whether synchronisation overlaps with the backward pass: overlapped stages of a bucket lie
below `forward_backward`; the waits of the training thread (`host_wait`) are the exposed part.

Times are the host's. On CUDA a bucket's row shows only its launch and end; its stages are kernels,
which torch.profiler shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_sparse.recording import BucketRecord, GatherRecord
from megatron_sparse.telemetry.lines import write_whole

TRAINING_ROW = 0

Span = tuple[str, float, float]
"""A name, and the `time.perf_counter` seconds of its begin and end."""


class Timeline:
    """Collects events in the Trace Event Format.

    Args:
        rank: the rank that the events belong to.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def add(
        self,
        iteration: int,
        steps: Sequence[Span],
        records: Iterable[BucketRecord],
        gathers: Iterable[GatherRecord],
    ) -> None:
        """Adds an iteration.

        Args:
            iteration: its number.
            steps: spans of the training thread.
            records: records of the buckets.
            gathers: records of the gathers of parameters.
        """
        for name, begin_s, end_s in steps:
            self._span(TRAINING_ROW, name, begin_s, end_s, {"iteration": iteration})
        for record in records:
            arguments = {
                "iteration": iteration,
                "scheme": record.scheme,
                "density": record.density,
                "numel": record.numel,
                "nnz": record.nnz,
                "wire_bytes": record.wire_bytes,
                "inside_bytes": record.inside_bytes,
            }
            self._bucket(record.bucket, record, arguments)
        for gather in gathers:
            arguments = {
                "iteration": iteration,
                "method": gather.method,
                "numel": gather.numel,
                "wire_bytes": gather.wire_bytes,
            }
            self._bucket(f"{gather.bucket} parameters", gather, arguments)

    def _bucket(
        self, name: str, record: BucketRecord | GatherRecord, arguments: dict[str, Any]
    ) -> None:
        """Adds a span, and those of its stages, to a row of this name."""
        row = self._rows.setdefault(name, len(self._rows) + 1)
        self._span(row, name, record.launched_s, record.finished_s, arguments)
        for stage, begin_s, end_s in record.timer.spans:
            self._span(row, stage, begin_s, end_s, {"iteration": arguments["iteration"]})

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._events

    @property
    def begin_us(self) -> float:
        """Begin of the first event, in microseconds of `time.perf_counter`; 0 without events."""
        return min((event["ts"] for event in self._events), default=0.0)

    def events(self, origin_us: float) -> list[dict[str, Any]]:
        """All events, for `write_trace`.

        Args:
            origin_us: microseconds of `time.perf_counter` at which the trace's times are 0.
        """
        common = {"ph": "M", "pid": self._rank}
        process = {"name": "process_name", "args": {"name": f"rank {self._rank}: buckets"}}
        rows = [common | process] + [
            common | {"name": "thread_name", "tid": row, "args": {"name": name}}
            for name, row in {"training thread": TRAINING_ROW, **self._rows}.items()
        ]
        return rows + [event | {"ts": event["ts"] - origin_us} for event in self._events]

    def _span(
        self, row: int, name: str, begin_s: float, end_s: float, arguments: dict[str, Any]
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": self._rank,
                "tid": row,
                "ts": begin_s * 1e6,
                "dur": (end_s - begin_s) * 1e6,
                "args": arguments,
            }
        )


def write_trace(
    path: Path, events: Sequence[dict[str, Any]], trace: dict[str, Any] | None = None
) -> None:
    """Writes a file in the Trace Event Format, atomically.

    Args:
        path: the file.
        events: events of one or several timelines with the same origin.
        trace: further fields of the file.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, json.dumps({"displayTimeUnit": "ms", **(trace or {}), "traceEvents": events}))
