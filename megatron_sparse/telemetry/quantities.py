"""What tables, the console and reports show alike: numbers as text, parts of an iteration, rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_sparse.recording import STEP_STAGES
from megatron_sparse.straggler.detector import DelayStatistics

REST = "other"
"""The part of an iteration that no stage of the training thread accounts for."""


def ms(time_ms: float | None) -> str:
    """Milliseconds with two decimals, from 10 s on with none; `-` for None.

    Example:
        >>> ms(12.345), ms(16250.17)
        ('12.35', '16250')
    """
    if time_ms is None:
        return "-"
    # The bound takes rounding into account, so that ten characters always suffice.
    return f"{time_ms:.2f}" if time_ms < 9999.995 else f"{time_ms:.0f}"


def percent(ratio: float | None) -> str:
    """Two decimals, or as many as a smaller share needs to show two digits; `-` for None.

    Example:
        >>> percent(0.0123), percent(0.0000456)
        ('1.23%', '0.0046%')
    """
    if ratio is None:
        return "-"
    return f"{ratio:.2%}" if ratio == 0 or ratio >= 0.001 else f"{100 * ratio:.2g}%"


def size(count: float) -> str:
    """Bytes in binary units.

    Example:
        >>> size(3 * 2**20)
        '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def hours(count: float) -> str:
    """A duration, in the unit that suits it; negative ones keep their sign.

    Example:
        >>> hours(2.5), hours(0.01), hours(-0.5), hours(1e-5)
        ('2.50 h', '36.00 s', '-30.00 min', '36 ms')
    """
    seconds = abs(count) * 3600
    sign = "-" if count < 0 else ""
    if seconds < 1:
        return f"{sign}{seconds * 1e3:.0f} ms"
    for unit, length_s in (("s", 1), ("min", 60)):
        if seconds < 60 * length_s:
            return f"{sign}{seconds / length_s:.2f} {unit}"
    return f"{sign}{seconds / 3600:.2f} h"


def against_dense(found: Mapping[str, Any] | None, cluster: str | None) -> str:
    """The sentence about what dense would have taken, or why it is unknown.

    Args:
        found: `against_dense` of a summary; None without an estimate.
        cluster: `planner.cluster` of the run, None if unknown.

    Example:
        >>> against_dense({"dense_hours": 3.0, "measured_hours": 2.0, "saved_hours": 1.0}, "c.yaml")
        'dense: 3.00 h estimated from c.yaml, measured: 2.00 h, saved: 1.00 h'
    """
    if found is None:
        return (
            "dense: unknown without planner.cluster; `megatron-sparse calibrate` measures this "
            "cluster's link"
        )
    saved = found["saved_hours"]
    if saved == 0:
        return f"dense: {hours(found['measured_hours'])}, measured: every iteration went dense"
    outcome = f"saved: {hours(saved)}" if saved >= 0 else f"lost: {hours(-saved)}"
    return (
        f"dense: {hours(found['dense_hours'])} estimated from {cluster or 'planner.cluster'}, "
        f"measured: {hours(found['measured_hours'])}, {outcome}"
    )


def rate(tokens_per_s: float | None, model_tflop_per_s: float | None) -> str:
    """Tokens and operations per second; empty if both are unknown.

    Example:
        >>> rate(12345.6, 71.25), rate(980.4, None), rate(None, None)
        ('12,346 tokens/s, 71.2 TFLOP/s a GPU', '980 tokens/s', '')
    """
    tokens = [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} tokens/s"]
    operations = [] if model_tflop_per_s is None else [f"{model_tflop_per_s:.1f} TFLOP/s a GPU"]
    return ", ".join(tokens + operations)


def thread_parts(
    stage_ms: Mapping[str, Any], iteration_ms: float | None, *, gathers: bool = True
) -> dict[str, Any]:
    """The training thread's stages and, as `REST`, what no stage accounts for.

    Args:
        stage_ms: milliseconds by stage: of an iteration, or means or medians; None: unknown.
        iteration_ms: of the whole; None without an iteration, which has no rest.
        gathers: whether parameters are gathered; leaves out the wait for them otherwise.

    Example:
        >>> stage_ms = {"forward_backward": 6.0, "optimizer": 1.0, "host_wait": 2.0}
        >>> thread_parts(stage_ms, 10.0, gathers=False)["other"]
        1.0
    """
    parts = {s: stage_ms[s] for s in STEP_STAGES if gathers or s != "param_wait"}
    if iteration_ms is None:
        return parts
    # Medians of parts need not add up to the median of the whole; never go below 0.
    return parts | {REST: max(0.0, iteration_ms - sum(parts.values()))}


def traffic_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The gradients' bytes by phase and of all: phase, iterations, dense, sent, ratio, density, ms.

    Args:
        summary: of a run.
    """
    rows = [
        [
            phase,
            str(row["iterations"]),
            size(row["dense_bytes"]),
            size(row["wire_bytes"]),
            percent(row["wire_ratio"]),
            percent(row["density"]),
            ms(row["iteration_ms"]),
        ]
        for phase, row in [*summary["phases"].items(), ("all", summary)]
    ]
    if inside_bytes := summary["inside_bytes"]:
        ratio = percent(inside_bytes / summary["dense_bytes"])
        rows.append(["of it inside nodes", "", "", size(inside_bytes), ratio, "", ""])
    return rows


def delay_cells(found: DelayStatistics) -> list[str]:
    """The last rank's delays: count, median, mean and longest ms, rank, share, persistence."""
    again = found.persistence
    return [
        str(found.count),
        *(ms(time_s * 1e3) for time_s in (found.median_s, found.mean_s, found.max_s)),
        str(found.rank),
        f"{found.share:.0%}",
        "-" if again is None else f"{again:.0%}",
    ]
