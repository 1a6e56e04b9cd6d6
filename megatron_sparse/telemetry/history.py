"""Stores numbers of all iterations of a run in columns, and computes the run's summary from them.

A row is one iteration: under 30 numbers of 8 bytes, so a million iterations take under 240 MB and
the summary needs no second pass over the files.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from megatron_sparse.recording import STAGES, WAITS
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.quantities import exposed_share, ratio

PHASES = ("trial", "warmup", "ramp", "target", "off")
_FLOATS = (
    "iteration_ms",
    "overlapped_ms",
    "loss",
    "tokens_per_s",
    "model_tflop_per_s",
)
"""Columns of numbers that may be missing (NaN); all others count."""
_SUMMED = ("dense_bytes", "wire_bytes", "inside_bytes", "param_dense_bytes", "param_wire_bytes")


def _of(figure: Callable[[np.ndarray], Any], values: np.ndarray) -> float | None:
    return float(figure(values)) if values.size else None


_mean, _median, _least = partial(_of, np.mean), partial(_of, np.median), partial(_of, np.min)
_high = partial(_of, partial(np.percentile, q=95))
"""Of no values each is None."""


def _median_known(values: np.ndarray) -> float | None:
    return _median(values[np.isfinite(values)])


@dataclass(frozen=True)
class Iterations:
    """The iterations of a run, in ascending order, as columns; NaN where a value is missing.

    A column is named after the attribute of `IterationBreakdown` that it holds; `number` is the
    iteration's, `phase` an index into `PHASES`, and `stage_ms` has a column for each stage.
    """

    number: np.ndarray
    phase: np.ndarray
    dense_bytes: np.ndarray
    message_bytes: np.ndarray
    wire_bytes: np.ndarray
    inside_bytes: np.ndarray
    nnz: np.ndarray
    numel: np.ndarray
    skipped: np.ndarray
    param_dense_bytes: np.ndarray
    param_wire_bytes: np.ndarray
    iteration_ms: np.ndarray
    overlapped_ms: np.ndarray
    loss: np.ndarray
    tokens_per_s: np.ndarray
    model_tflop_per_s: np.ndarray
    stage_ms: Mapping[str, np.ndarray]

    @property
    def exposed_share(self) -> np.ndarray:
        """Exposed time over the iteration's; NaN for an iteration without duration."""
        known_ms = np.where(self.iteration_ms > 0, self.iteration_ms, np.nan)
        return sum(self.stage_ms[stage] for stage in WAITS) / known_ms

    @property
    def target_begins(self) -> int | None:
        """The first iteration at the target density after a warm-up or ramp.

        None if the run began at the target density, or never reached it (such as a dense run).
        """
        is_sparse = self.nnz < self.numel
        (at_target,) = np.nonzero((self.phase == PHASES.index("target")) & is_sparse)
        comes_after_others = at_target.size > 0 and at_target[0] > 0
        return int(self.number[at_target[0]]) if comes_after_others else None

    @property
    def wire_ratio(self) -> np.ndarray:
        """Bytes on the wire over those of dense; NaN where dense would send nothing."""
        return self.wire_bytes / np.where(self.dense_bytes > 0, self.dense_bytes, np.nan)


class RunHistory:
    """Collects the iterations of a run and sums them up."""

    def __init__(self) -> None:
        # Arrays of fp64 ("d") or int64 ("q"); the columns of `stage_ms` are in `_stages`.
        self._columns: dict[str, array[Any]] = {
            field.name: array("d" if field.name in _FLOATS else "q")
            for field in fields(Iterations)
            if field.name != "stage_ms"
        }
        self._stages: dict[str, array] = {stage: array("d") for stage in STAGES}

    def append(self, row: IterationBreakdown) -> None:
        """Adds an iteration; its number must be larger than all before it."""
        values = row.__dict__ | {"number": row.iteration, "phase": PHASES.index(row.phase)}
        for name, column in self._columns.items():
            value = values[name]
            column.append(math.nan if value is None else value)
        for stage, column in self._stages.items():
            column.append(row.stage_ms[stage])

    def cut(self, iteration: int) -> None:
        """Drops every row at or after `iteration`."""
        keep = bisect_left(self._columns["number"], iteration)
        for column in (*self._columns.values(), *self._stages.values()):
            del column[keep:]

    def iterations(self) -> Iterations:
        """Returns all iterations so far, as numpy copies of the columns."""
        # Copies, because an array that numpy has a view of cannot grow.
        columns = {name: np.array(column) for name, column in self._columns.items()}
        stages = {stage: np.array(column) for stage, column in self._stages.items()}
        return Iterations(**columns, stage_ms=stages)

    def summary(self) -> dict[str, Any]:
        """Computes the fields of `summary.json`; docs/reading-the-breakdown.md explains each.

        Rates are medians over iterations, because the first iterations compile and allocate; times
        are means, medians and 95th percentiles; bytes are sums; shares and densities are ratios.
        """
        run = self.iterations()
        losses = run.loss[np.isfinite(run.loss)]
        every = np.ones(len(run.number), dtype=bool)
        phases = {}
        for number, phase in enumerate(PHASES):
            in_phase = run.phase == number
            if in_phase.any():
                phases[phase] = _figures(run, in_phase)
        return {
            "skipped": int(run.skipped.sum()),
            "loss_first": float(losses[0]) if losses.size else None,
            "loss_last": float(losses[-1]) if losses.size else None,
            **_figures(run, every),
            "phases": phases,
            "target_begins": run.target_begins,
            "tokens_per_s": _median_known(run.tokens_per_s),
            "model_tflop_per_s": _median_known(run.model_tflop_per_s),
        }


def _figures(run: Iterations, chosen: np.ndarray) -> dict[str, Any]:
    """Computes bytes, densities and times of the iterations where the mask `chosen` is True."""

    def total(name: str) -> int:
        return int(getattr(run, name)[chosen].sum())

    sums, numel = {name: total(name) for name in _SUMMED}, total("numel")
    # Of gradients and parameters together.
    total_dense_bytes = sums["dense_bytes"] + sums["param_dense_bytes"]
    total_wire_bytes = sums["wire_bytes"] + sums["param_wire_bytes"]
    iteration_ms = run.iteration_ms[chosen]
    stage_ms = {stage: column[chosen] for stage, column in run.stage_ms.items()}
    means_ms = {stage: _mean(times_ms) for stage, times_ms in stage_ms.items()}
    return {
        "iterations": int(chosen.sum()),
        **sums,
        "wire_ratio": ratio(sums["wire_bytes"], sums["dense_bytes"]),
        "total_wire_ratio": ratio(total_wire_bytes, total_dense_bytes),
        "density": ratio(total("nnz"), numel),
        "bits_per_element": ratio(8 * total("message_bytes"), numel),
        "iteration_ms": _median(iteration_ms),
        "iteration_ms_mean": _mean(iteration_ms),
        "iteration_ms_p95": _high(iteration_ms),
        "exposed_share": exposed_share(means_ms, _mean(iteration_ms)),
        "overlapped_ms": _mean(run.overlapped_ms[chosen]),
        "stage_ms": {stage: _median(times_ms) for stage, times_ms in stage_ms.items()},
        "stage_ms_mean": means_ms,
        "stage_ms_p95": {stage: _high(times_ms) for stage, times_ms in stage_ms.items()},
        "network_ms_least": _least(stage_ms["network"]),
    }
