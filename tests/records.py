"""Measurements as the reducer hands them to telemetry."""

from collections.abc import Mapping
from typing import Any

from megatron_sparse.recording import BucketRecord, GatherRecord, NullSink, ReadinessRecord


def bucket_record(
    name: str = "b0", *, stage_us: Mapping[str, float] | None = None, **fields: Any
) -> BucketRecord:
    """A bucket of 1,000 elements at its target density of 1 %, with these fields changed."""
    values = {
        "step": 3,
        "scheme": "agsparse",
        "phase": "target",
        "density": 0.01,
        "numel": 1000,
        "nnz": 10,
    }
    record = BucketRecord(name, **(values | fields))
    for stage, time_us in (stage_us or {}).items():
        record.timer.add(stage, time_us)
    return record


class Kept(NullSink):
    """Keeps everything that it is told."""

    def __init__(self) -> None:
        self.buckets: list[BucketRecord] = []
        self.gathers: list[GatherRecord] = []
        self.readiness: list[ReadinessRecord] = []
        self.stages: list[tuple[str, float]] = []

    def record_bucket(self, record: BucketRecord) -> None:
        self.buckets.append(record)

    def record_gather(self, record: GatherRecord) -> None:
        self.gathers.append(record)

    def record_readiness(self, record: ReadinessRecord) -> None:
        self.readiness.append(record)

    def record_stage(self, stage: str, seconds: float) -> None:
        self.stages.append((stage, seconds))


class Sink:
    """A dashboard that keeps what it receives.

    Args:
        breaks_at: the iteration at which it fails; it then fails to close, too.
    """

    def __init__(self, breaks_at: int | None = None) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.closed = 0
        self._breaks_at = breaks_at

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.rows[step] = dict(scalars)
        if step == self._breaks_at:
            raise ConnectionError("gone")

    def close(self) -> None:
        self.closed += 1
        if self._breaks_at is not None:
            raise ConnectionError("still gone")
