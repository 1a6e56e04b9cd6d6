"""The whole run in columns, and its summary.

A row is one iteration: under 30 numbers of 8 bytes, so a million iterations take under 240 MB and
the summary needs no second pass over the files.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from typing import Any

import numpy as np

from megatron_sparse.recording import STAGES
from megatron_sparse.telemetry.breakdown import IterationBreakdown

PHASES = ("warmup", "ramp", "target", "off")

_COUNTS = (
    "iteration",
    "dense_bytes",
    "message_bytes",
    "wire_bytes",
    "inside_bytes",
    "nnz",
    "numel",
    "skipped",
    "param_dense_bytes",
    "param_wire_bytes",
)
_INTEGERS = (*_COUNTS, "phase")
_FLOATS = ("iteration_ms", "overlapped_ms")
_UNSURE = ("loss", "dense_iteration_ms", "tokens_per_s", "model_tflop_per_s")
"""Numbers that an iteration may lack; NaN in the column."""
MS_PER_HOUR = 3.6e6


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None


def _median_known(values: np.ndarray) -> float | None:
    return _median(values[np.isfinite(values)])


def _shares(parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
    return parts[wholes > 0] / wholes[wholes > 0]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _saved_ms(dense_ms: float | None, own_ms: float) -> float:
    return 0.0 if dense_ms is None or math.isnan(dense_ms) else dense_ms - own_ms


def _against_dense(dense_ms: np.ndarray, own_ms: np.ndarray) -> dict[str, Any] | None:
    """Measured and estimated hours of the iterations that have an estimate; None without any."""
    known = np.isfinite(dense_ms)
    if not known.any():
        return None
    measured, dense = (float(times[known].sum()) / MS_PER_HOUR for times in (own_ms, dense_ms))
    return {
        "iterations": int(known.sum()),
        "measured_hours": measured,
        "dense_hours": dense,
        "saved_hours": dense - measured,
    }


class RunHistory:
    """The iterations of a run, in ascending order, as columns of numbers."""

    def __init__(self) -> None:
        self._columns: dict[str, array] = {name: array("q") for name in _INTEGERS}
        self._columns |= {name: array("d") for name in (*_FLOATS, *_UNSURE)}
        self._stages: dict[str, array] = {stage: array("d") for stage in STAGES}
        self._saved_ms = 0.0

    @property
    def saved_hours(self) -> float:
        """Estimated hours that the iterations would have taken longer with dense synchronisation.

        Negative if they would have been shorter. Iterations without an estimate count as 0.
        """
        return self._saved_ms / MS_PER_HOUR

    def append(self, row: IterationBreakdown) -> None:
        """Adds an iteration; its number must be larger than all before it."""
        columns = self._columns
        for name in _COUNTS:
            columns[name].append(getattr(row, name))
        columns["phase"].append(PHASES.index(row.phase))
        for name in _FLOATS:
            columns[name].append(getattr(row, name))
        for name in _UNSURE:
            value = getattr(row, name)
            columns[name].append(math.nan if value is None else value)
        self._saved_ms += _saved_ms(row.dense_iteration_ms, row.iteration_ms)
        for stage, column in self._stages.items():
            # Older lines lack a stage that was added later.
            column.append(row.stage_ms.get(stage, 0.0))

    def cut(self, iteration: int) -> None:
        """Drops every row at or after `iteration`."""
        keep = bisect_left(self._columns["iteration"], iteration)
        for column in (*self._columns.values(), *self._stages.values()):
            del column[keep:]
        columns = self._columns["dense_iteration_ms"], self._columns["iteration_ms"]
        self._saved_ms = sum(map(_saved_ms, *columns))

    def summary(self) -> dict[str, Any]:
        """The numbers of `summary.json`; docs/reading-the-breakdown.md explains each field.

        Times, shares and rates are medians over iterations (the first ones compile and allocate),
        except `stage_ms_total` and `against_dense`. Bytes and densities are sums and ratios of
        sums.
        """
        # Copies, because an array whose buffer numpy holds can no longer grow.
        c = {name: np.array(column) for name, column in self._columns.items()}
        stages = {stage: np.array(column) for stage, column in self._stages.items()}
        losses = c["loss"][np.isfinite(c["loss"])]
        everything = self._traffic(c, np.ones(len(c["iteration"]), dtype=bool))
        return {
            "iterations": everything["iterations"],
            "skipped": int(c["skipped"].sum()),
            "loss_first": float(losses[0]) if losses.size else None,
            "loss_last": float(losses[-1]) if losses.size else None,
            "dense_bytes": everything["dense_bytes"],
            "wire_bytes": everything["wire_bytes"],
            "inside_bytes": everything["inside_bytes"],
            "wire_ratio": everything["wire_ratio"],
            "density": everything["density"],
            "bits_per_element": everything["bits_per_element"],
            "param_dense_bytes": everything["param_dense_bytes"],
            "param_wire_bytes": everything["param_wire_bytes"],
            "total_wire_ratio": everything["total_wire_ratio"],
            "phases": {
                phase: self._traffic(c, c["phase"] == number)
                for number, phase in enumerate(PHASES)
                if (c["phase"] == number).any()
            },
            "iteration_ms": everything["iteration_ms"],
            "exposed_share": _median(_shares(stages["host_wait"], c["iteration_ms"])),
            "overlapped_ms": _median(c["overlapped_ms"]),
            "tokens_per_s": _median_known(c["tokens_per_s"]),
            "model_tflop_per_s": _median_known(c["model_tflop_per_s"]),
            "against_dense": _against_dense(c["dense_iteration_ms"], c["iteration_ms"]),
            "stage_ms": {stage: _median(column) for stage, column in stages.items()},
            "stage_ms_total": {stage: float(column.sum()) for stage, column in stages.items()},
        }

    @staticmethod
    def _traffic(c: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
        names = (
            "dense_bytes",
            "wire_bytes",
            "inside_bytes",
            "param_dense_bytes",
            "param_wire_bytes",
        )
        sums = {name: int(c[name][chosen].sum()) for name in names}
        nnz, numel = (int(c[name][chosen].sum()) for name in ("nnz", "numel"))
        total_dense = sums["dense_bytes"] + sums["param_dense_bytes"]
        total_wire = sums["wire_bytes"] + sums["param_wire_bytes"]
        return {
            "iterations": int(chosen.sum()),
            **sums,
            "wire_ratio": _ratio(sums["wire_bytes"], sums["dense_bytes"]),
            "total_wire_ratio": _ratio(total_wire, total_dense),
            "density": _ratio(nnz, numel),
            "bits_per_element": _ratio(8 * int(c["message_bytes"][chosen].sum()), numel),
            "iteration_ms": _median(c["iteration_ms"][chosen]),
        }
