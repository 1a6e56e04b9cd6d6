"""The iterations of a run as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sparse.recording import STAGES
from megatron_sparse.telemetry.breakdown import IterationBreakdown


@dataclass(frozen=True)
class Iterations:
    """Columns with one value for each iteration; NaN where a value is missing.

    Attributes:
        number: the iteration's number, as the training loop counts.
        loss: loss of the iteration.
        iteration_ms: wall-clock time.
        dense_bytes: bytes that a dense ring would have sent.
        wire_bytes: bytes sent.
        dense_iteration_ms: estimated time with dense synchronisation.
        stage_ms: milliseconds of each stage in `recording.STAGES`.
    """

    number: np.ndarray
    loss: np.ndarray
    iteration_ms: np.ndarray
    dense_bytes: np.ndarray
    wire_bytes: np.ndarray
    dense_iteration_ms: np.ndarray
    stage_ms: Mapping[str, np.ndarray]

    @property
    def exposed_share(self) -> np.ndarray:
        """Exposed time over the iteration's; NaN for an iteration without duration."""
        return self.stage_ms["host_wait"] / np.where(
            self.iteration_ms > 0, self.iteration_ms, np.nan
        )

    @property
    def wire_ratio(self) -> np.ndarray:
        """Bytes on the wire over those of dense; NaN where dense would send nothing."""
        dense = np.where(self.dense_bytes > 0, self.dense_bytes, np.nan)
        return self.wire_bytes / dense

    @classmethod
    def of(cls, lines: Sequence[IterationBreakdown]) -> Iterations:
        """The columns of a run's lines, which are in order."""
        return cls(
            number=np.array([line.iteration for line in lines]),
            loss=_column(line.loss for line in lines),
            iteration_ms=np.array([line.iteration_ms for line in lines]),
            dense_bytes=np.array([line.dense_bytes for line in lines], dtype=np.float64),
            wire_bytes=np.array([line.wire_bytes for line in lines], dtype=np.float64),
            dense_iteration_ms=_column(line.dense_iteration_ms for line in lines),
            stage_ms={
                stage: np.array([line.stage_ms.get(stage, 0.0) for line in lines])
                for stage in STAGES
            },
        )


def _column(values: Iterable[float | None]) -> np.ndarray:
    """The values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in values])
