"""The tables of a report: cells of plain text, which the page escapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sparse.config.dotted import canonical
from megatron_sparse.report.bucket_charts import slowest
from megatron_sparse.report.run_charts import label_of
from megatron_sparse.report.run_data import BucketMedians, RunData
from megatron_sparse.telemetry.quantities import (
    delay_cells,
    hours,
    ms,
    percent,
    rate,
    size,
    traffic_rows,
)
from megatron_sparse.telemetry.readiness import statistics_of

MOST_BUCKETS = 48
UNKNOWN = "-"
OF_THE_RUN_ITSELF = ("name", "runs_dir")
"""Keys that differ in every run."""


@dataclass(frozen=True)
class Table:
    """Rows under headers; the first column names the row, the others hold numbers or words.

    Attributes:
        title: title of the table; empty if the section's heading is enough.
        headers: one for each column.
        rows: one cell for each column.
        note: how to read the table, or what it leaves out.
        words: columns of words, which are aligned left and wrapped.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: frozenset[int] = frozenset({0})


def summary_table(runs: Sequence[RunData]) -> Table:
    """A column for each run."""
    rows: list[tuple[str, Callable[[RunData], str]]] = [
        ("iterations", _iterations),
        ("ranks", lambda run: _ranks(run.summary)),
        ("loss, first to last", _losses),
        ("schemes at the end", _schemes),
        ("target density", _target_density),
        ("density sent", lambda run: percent(at_target(run)["density"])),
        ("bytes sent / dense", lambda run: percent(at_target(run)["wire_ratio"])),
        ("bytes sent, whole run", lambda run: _traffic(run.summary)),
        ("iteration, ms", lambda run: ms(at_target(run)["iteration_ms"])),
        ("exposed, ms", lambda run: ms(run.summary["stage_ms"]["host_wait"])),
        ("exposed / iteration", lambda run: percent(run.summary["exposed_share"])),
        ("overlapped, ms", lambda run: ms(run.summary["overlapped_ms"])),
        ("throughput", _rate),
        ("hours saved over dense", _saved),
        ("memory of the plugin", _memory),
        ("versions", _versions),
    ]
    if any(run.summary["param_dense_bytes"] for run in runs):
        rows[12:12] = [
            ("parameters sent, whole run", _gathered),
            ("all bytes sent / dense", lambda run: percent(run.summary["total_wire_ratio"])),
            ("waits for parameters, ms", lambda run: ms(run.summary["stage_ms"]["param_wait"])),
        ]
    note = (
        "Density, bytes / dense and iteration time are those at the target density, after warm-up "
        "and ramp, if the run has reached it. Milliseconds are medians."
    )
    if len(runs) > 1:
        rows.insert(9, (f"against {runs[0].key}", lambda run: _against(run, runs[0])))
    return Table(
        "",
        ["", *(label_of(run, runs) for run in runs)],
        [[name, *(cell(run) for run in runs)] for name, cell in rows],
        note,
        frozenset(range(len(runs) + 1)),
    )


def at_target(run: RunData) -> dict[str, Any]:
    """The summary of the iterations at the target density; of all iterations if there are none."""
    return run.summary["phases"].get("target", run.summary)


def _iterations(run: RunData) -> str:
    skipped = run.summary["skipped"]
    return f"{run.summary['iterations']}" + (f", {skipped} skipped" if skipped else "")


def _ranks(summary: Any) -> str:
    if summary.get("world_size") is None:
        return UNKNOWN
    return f"{summary['world_size']}, {summary.get('device', UNKNOWN)}"


def _losses(run: RunData) -> str:
    first, last = run.summary["loss_first"], run.summary["loss_last"]
    return UNKNOWN if first is None else f"{first:.4f} to {last:.4f}"


def _schemes(run: RunData) -> str:
    counts = Counter(bucket.scheme for bucket in run.buckets.values())
    return ", ".join(f"{scheme} x {n}" for scheme, n in counts.most_common()) or UNKNOWN


def _target_density(run: RunData) -> str:
    """The target density; unknown if compression was off all the time."""
    is_off = set(run.summary["phases"]) == {"off"}
    return UNKNOWN if is_off else percent(run.summary.get("target_density"))


def _gathered(run: RunData) -> str:
    """Bytes of gathered parameters, sent and raw on a ring."""
    dense = run.summary["param_dense_bytes"]
    if not dense:
        return UNKNOWN
    sent = run.summary["param_wire_bytes"]
    return f"{size(sent)} of {size(dense)} ({percent(sent / dense)})"


def _traffic(traffic: Any) -> str:
    sent, dense = size(traffic["wire_bytes"]), size(traffic["dense_bytes"])
    return f"{sent} of {dense}"


def _rate(run: RunData) -> str:
    return rate(run.summary["tokens_per_s"], run.summary["model_tflop_per_s"]) or UNKNOWN


def _saved(run: RunData) -> str:
    """Estimated; unknown without a cluster to predict dense by."""
    found = run.summary["against_dense"]
    if found is None:
        return f"{UNKNOWN} (no planner.cluster)"
    return f"{hours(found['saved_hours'])} of {hours(found['dense_hours'])}, estimated"


def _memory(run: RunData) -> str:
    held = run.summary.get("memory_bytes") or {}
    return ", ".join(f"{name} {size(count)}" for name, count in held.items()) or UNKNOWN


def _versions(run: RunData) -> str:
    versions = run.summary.get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or (
        UNKNOWN
    )


def _against(run: RunData, first: RunData) -> str:
    own, other = at_target(run)["iteration_ms"], at_target(first)["iteration_ms"]
    if run is first:
        return UNKNOWN
    return UNKNOWN if not own or not other else f"{own / other:.2f} times as long"


def phase_table(run: RunData, runs: Sequence[RunData]) -> Table:
    """Traffic and time by phase."""
    return Table(
        f"Bytes by phase, {label_of(run, runs)}",
        ["phase", "iterations", "dense", "sent", "sent / dense", "density", "ms / iteration"],
        traffic_rows(run.summary),
    )


def bucket_table(run: RunData, runs: Sequence[RunData]) -> Table:
    """Plan and times of the slowest buckets."""
    shown = slowest(run, MOST_BUCKETS)
    left_out = len(run.buckets) - len(shown)
    note = (
        "Measured: all stages of the bucket, medians. Predicted: by the planner's cost model; "
        "a dash if no model chose the scheme. Ratio: measured / predicted."
    )
    if left_out:
        note += f" {left_out} faster buckets are left out; buckets.jsonl has them."
    return Table(
        f"Buckets, {label_of(run, runs)}",
        [
            "bucket",
            "elements",
            "scheme",
            "density",
            "sent",
            "predicted ms",
            "measured ms",
            "ratio",
            "reason for the scheme",
        ],
        [_bucket_row(bucket, run) for bucket in shown],
        note,
        frozenset({0, 2, 8}),
    )


def _bucket_row(bucket: BucketMedians, run: RunData) -> list[str]:
    predicted_us = bucket.predicted_us
    return [
        bucket.name,
        f"{bucket.numel:,}",
        bucket.scheme,
        percent(bucket.density),
        size(bucket.wire_bytes),
        ms(None if predicted_us is None else predicted_us / 1e3),
        ms(bucket.measured_us / 1e3),
        f"{bucket.measured_us / predicted_us:.2f}" if predicted_us else UNKNOWN,
        str(run.plan.get(bucket.name, {}).get("reason", UNKNOWN)),
    ]


def sparsity_table(run: RunData, runs: Sequence[RunData]) -> Table:
    """ZEN's characteristics of each bucket."""
    rows = []
    for name, profile in list(run.profiles.items())[:MOST_BUCKETS]:
        n = profile.world_size
        rows.append(
            [
                name,
                f"{profile.numel:,}",
                percent(profile.density),
                f"{profile.overlap[2]:.3f}",
                percent(profile.sum_density(n)),
                f"{profile.densification[n]:.2f}",
                f"{profile.skewness.get(n, 1.0):.2f}",
            ]
        )
    left_out = len(run.profiles) - len(rows)
    note = f"{run.profiled.capitalize()}. Overlap: the median over pairs of ranks."
    return Table(
        f"Sparsity, {label_of(run, runs)}",
        ["bucket", "elements", "density", "overlap", "sum density", "densified", "skewness"],
        rows,
        note + (f" {left_out} more buckets are left out." if left_out else ""),
    )


def straggler_table(runs: Sequence[RunData]) -> Table:
    """A row for each run that measured delays."""
    found = [(run, statistics_of(list(run.readiness.values()))) for run in runs]
    rows = [[label_of(run, runs), *delay_cells(one)] for run, one in found if one is not None]
    return Table(
        "Delay of the last rank",
        ["run", "count", "median ms", "mean ms", "max ms", "most often rank", "share", "again"],
        rows,
        "Share: how often that rank was last. Again: how often the last rank of a step was also "
        "last in the next step.",
    )


def difference_table(runs: Sequence[RunData]) -> Table:
    """Configuration keys in which the runs differ; runs of unknown configuration are left out."""
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config)
    rows = []
    for key in keys:
        cells = [canonical(run.config[key]) if key in run.config else UNKNOWN for run in known]
        if key not in OF_THE_RUN_ITSELF and len(set(cells)) > 1:
            rows.append([key, *cells])
    return Table(
        "Configuration: differences",
        ["key", *(label_of(run, runs) for run in known)],
        rows,
        "" if rows else "Nothing differs.",
        frozenset(range(len(known) + 1)),
    )
