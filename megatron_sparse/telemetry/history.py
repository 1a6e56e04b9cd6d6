"""The whole run in columns, and its summary.

A row is one iteration: 18 numbers of 8 bytes, so a million iterations take under 160 MB and the
summary needs no second pass over the files.
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

_INTEGERS = ("iteration", "dense_bytes", "wire_bytes", "nnz", "numel", "skipped", "phase")
_FLOATS = ("iteration_ms", "exposed_ms", "overlapped_ms", "loss")


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None


class RunHistory:
    """The iterations of a run, in ascending order, as columns of numbers."""

    def __init__(self) -> None:
        self._columns: dict[str, array] = {name: array("q") for name in _INTEGERS}
        self._columns |= {name: array("d") for name in _FLOATS}
        self._stages: dict[str, array] = {stage: array("d") for stage in STAGES}

    def append(self, row: IterationBreakdown) -> None:
        """Adds an iteration; its number must be larger than all before it."""
        columns = self._columns
        for name in ("iteration", "dense_bytes", "wire_bytes", "nnz", "numel", "skipped"):
            columns[name].append(getattr(row, name))
        columns["phase"].append(PHASES.index(row.phase))
        for name in ("iteration_ms", "exposed_ms", "overlapped_ms"):
            columns[name].append(getattr(row, name))
        columns["loss"].append(math.nan if row.loss is None else row.loss)
        for stage, column in self._stages.items():
            column.append(row.stage_ms[stage])

    def cut(self, iteration: int) -> None:
        """Drops every row at or after `iteration`."""
        keep = bisect_left(self._columns["iteration"], iteration)
        for column in (*self._columns.values(), *self._stages.values()):
            del column[keep:]

    def summary(self) -> dict[str, Any]:
        """The numbers of `summary.json`; docs/reading-the-breakdown.md explains each field.

        Milliseconds are medians over iterations (the first ones compile and allocate), except
        `stage_ms_total`. Bytes and densities are sums and ratios of sums.
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
            "wire_ratio": everything["wire_ratio"],
            "density": everything["density"],
            "phases": {
                phase: self._traffic(c, c["phase"] == number)
                for number, phase in enumerate(PHASES)
                if (c["phase"] == number).any()
            },
            "iteration_ms": everything["iteration_ms"],
            "exposed_ms": _median(c["exposed_ms"]),
            "overlapped_ms": _median(c["overlapped_ms"]),
            "stage_ms": {stage: _median(column) for stage, column in stages.items()},
            "stage_ms_total": {stage: float(column.sum()) for stage, column in stages.items()},
        }

    @staticmethod
    def _traffic(c: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
        dense_bytes, wire_bytes, nnz, numel = (
            int(c[name][chosen].sum()) for name in ("dense_bytes", "wire_bytes", "nnz", "numel")
        )
        return {
            "iterations": int(chosen.sum()),
            "dense_bytes": dense_bytes,
            "wire_bytes": wire_bytes,
            "wire_ratio": wire_bytes / dense_bytes if dense_bytes else None,
            "density": nnz / numel if numel else None,
            "iteration_ms": _median(c["iteration_ms"][chosen]),
        }
