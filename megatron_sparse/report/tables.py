"""The tables of a report: cells of plain text, which the page escapes."""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_sparse.config.described import canonical
from megatron_sparse.report.run_charts import label_of, slowest
from megatron_sparse.report.run_data import BucketMedians, RunData
from megatron_sparse.telemetry.quantities import (
    PHASE_COLUMNS,
    QUANTITIES,
    at_target,
    ms,
    of_all,
    percent,
    phase_rows,
    rate,
    size,
)
from megatron_sparse.telemetry.readiness import summary_of

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
    """The table of totals and means: a row for each quantity, a column for each run."""

    def of(name: str) -> tuple[str, Callable[[RunData], str]]:
        """The row of one of `QUANTITIES`: its label, and the function that makes a run's cell."""
        quantity = QUANTITIES[name]
        return quantity.label, lambda run: quantity.cell(run.summary)

    gather_rows: list[tuple[str, Callable[[RunData], str]]] = []
    if any(run.summary["param_dense_bytes"] for run in runs):  # parameters were gathered
        title = "parameters sent, whole run"
        gather_rows.append((title, lambda run: _traffic(run.summary, "param_")))
        gather_rows.append(of("total_wire_ratio"))
    rows: list[tuple[str, Callable[[RunData], str]]] = [
        ("iterations", _iterations),
        ("ranks", lambda run: _ranks(run.summary)),
        of("loss_first"),
        of("loss_last"),
        ("schemes at the end", _schemes),
        of("target_density"),
        of("target_begins"),
        of("density"),
        of("wire_ratio"),
        ("bytes sent, whole run", lambda run: _traffic(run.summary, "")),
        of("iteration_ms"),
        of("iteration_ms_p95"),
        of("exposed_share"),
        ("exposed, mean ms", lambda run: of_all(at_target(run.summary))),
        of("overlapped_ms"),
        *gather_rows,
        ("throughput", _rate),
        ("memory of the plugin", _memory),
        ("versions", _versions),
    ]
    note = (
        "Densities, bytes / dense and times are those at the target density, after warm-up and "
        "ramp, if the run has reached it; all other rows are of the whole run."
    )
    return Table(
        "",
        ["", *(label_of(run, runs) for run in runs)],
        [[name, *(cell(run) for run in runs)] for name, cell in rows],
        note,
        words=frozenset(range(len(runs) + 1)),  # all columns
    )


def _iterations(run: RunData) -> str:
    done, skipped = run.summary["iterations"], run.summary["skipped"]
    asked = run.config.get("training.iterations", done)
    unfinished = f" of {asked}" if done != asked else ""
    return f"{done}{unfinished}" + (f", {skipped} skipped" if skipped else "")


def _ranks(summary: Any) -> str:
    if summary.get("world_size") is None:
        return UNKNOWN
    return f"{summary['world_size']}, {summary.get('device', UNKNOWN)}"


def _schemes(run: RunData) -> str:
    counts = Counter(bucket.scheme for bucket in run.buckets.values())
    return ", ".join(f"{scheme} x {n}" for scheme, n in counts.most_common()) or UNKNOWN


def _traffic(traffic: Any, half: str) -> str:
    """Bytes of the gradients (`half` is empty) or of the parameters (`param_`)."""
    sent, dense = traffic[f"{half}wire_bytes"], traffic[f"{half}dense_bytes"]
    return f"{size(sent)} of {size(dense)} ({percent(sent / dense)})" if dense else UNKNOWN


def _rate(run: RunData) -> str:
    return rate(run.summary["tokens_per_s"], run.summary["model_tflop_per_s"]) or UNKNOWN


def _memory(run: RunData) -> str:
    held = run.summary.get("memory_bytes") or {}
    return ", ".join(f"{name} {size(count)}" for name, count in held.items()) or UNKNOWN


def _versions(run: RunData) -> str:
    versions = run.summary.get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or (
        UNKNOWN
    )


def phase_table(run: RunData, runs: Sequence[RunData]) -> Table:
    """The table of a run's bytes and times by phase of its schedule (dense, ramp, target)."""
    headers = [header for header, _ in PHASE_COLUMNS.values()]
    return Table(
        f"Bytes by phase, {label_of(run, runs)}", ["phase", *headers], phase_rows(run.summary)
    )


def bucket_table(run: RunData, runs: Sequence[RunData]) -> Table:
    """The table of a run's slowest buckets: plan, bytes and times."""
    shown = slowest(run, MOST_BUCKETS)
    left_out = len(run.buckets) - len(shown)
    note = (
        "Exposed: the training thread waited for the bucket, on average. "
        "Measured: all stages of the bucket, medians. Predicted: by the planner's cost model; "
        "a dash if no model chose the scheme. Ratio: measured / predicted."
    )
    if left_out:
        note += f" {left_out} faster buckets are left out; buckets.jsonl has them."
    return Table(
        f"Buckets, {label_of(run, runs)}",
        [
            *("bucket", "elements", "scheme", "density", "sent"),
            *("exposed ms", "predicted ms", "measured ms", "ratio", "reason for the scheme"),
        ],
        [_bucket_row(bucket, run) for bucket in shown],
        note,
        words=frozenset({0, 2, 9}),  # bucket, scheme and reason
    )


def _bucket_row(bucket: BucketMedians, run: RunData) -> list[str]:
    """A bucket's cells, in the order of the headers of `bucket_table`."""
    predicted_us = bucket.predicted_us
    return [
        bucket.name,
        f"{bucket.numel:,}",
        bucket.scheme,
        percent(bucket.density),
        size(bucket.wire_bytes),
        ms(bucket.exposed_us / 1e3),
        ms(None if predicted_us is None else predicted_us / 1e3),
        ms(bucket.measured_us / 1e3),
        f"{bucket.measured_us / predicted_us:.2f}" if predicted_us else UNKNOWN,
        str(run.plan.get(bucket.name, {}).get("reason", UNKNOWN)),
    ]


def straggler_table(runs: Sequence[RunData]) -> Table:
    """The table of how late the last rank was: a row for each run.

    A report of one run also has a row for each of its buckets.
    """
    records_of = {label_of(run, runs): list(chain(*run.readiness.values())) for run in runs}
    if len(runs) == 1:
        records_of |= runs[0].readiness
    rows = []
    for name, records in records_of.items():
        if found := summary_of(records):
            times = [ms(found[f"{statistic}_ms"]) for statistic in ("median", "mean", "max")]
            shares = [percent(found[share]) for share in ("share", "persistence")]
            rows.append([name, str(found["count"]), *times, str(found["rank"]), *shares])
    return Table(
        "Delay of the last rank",
        ["", "count", "median ms", "mean ms", "max ms", "most often rank", "share", "again"],
        rows,
        "Share: how often that rank was last. Again: how often the last rank of a step was also "
        "last in the next step.",
    )


def difference_table(runs: Sequence[RunData]) -> Table:
    """The table of the configuration keys in which the runs differ: a column for each run."""
    rows = []
    every_key = dict.fromkeys(key for run in runs for key in run.config)  # each once, in order
    for key in every_key:
        cells = [canonical(run.config[key]) if key in run.config else UNKNOWN for run in runs]
        # A run without a `config.yaml` differs in no key.
        values = {cell for cell, run in zip(cells, runs, strict=True) if run.config}
        if key not in OF_THE_RUN_ITSELF and len(values) > 1:
            rows.append([key, *cells])
    return Table(
        "Configuration: differences",
        ["key", *(label_of(run, runs) for run in runs)],
        rows,
        "" if rows else "Nothing differs.",
        words=frozenset(range(len(runs) + 1)),  # all columns
    )


def write_csv(runs: Sequence[RunData], path: Path) -> None:
    """Writes a CSV line for each run: its name, the keys in which the runs differ, its summary.

    Raises:
        OSError: the file cannot be written.
    """
    # Transposes the two tables, which have a column for each run: a row becomes a CSV column.
    columns = [*difference_table(runs).rows, *summary_table(runs).rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *(name for name, *_ in columns)])
        for index, run in enumerate(runs):
            writer.writerow([run.name, *(cells[index] for _, *cells in columns)])
