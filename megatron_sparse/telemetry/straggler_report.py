"""`megatron-sparse stragglers RUN`: the delays of a run as a table, a CSV and the CDF of the paper.

The curve is that of StragglAR's figures 2a and 8, for the user's own run: for each delay, the
fraction of bucket synchronisations whose last rank was at most that much later than the others.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_sparse.errors import ConfigError, writing
from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.straggler.detector import DelayStatistics, delay_cdf, delay_s, last_rank
from megatron_sparse.telemetry.quantities import delay_cells
from megatron_sparse.telemetry.readiness import load_readiness, statistics_of

ALL = "all"


def run(run_dir: Path, output: Path | None, csv_path: Path | None) -> None:
    """Prints a run's table of delays; draws the CDF and writes the CSV if requested.

    Args:
        run_dir: folder of a run whose `straggler.mode` measured delays.
        output: PNG of the CDF; None draws none.
        csv_path: CSV with one line for each bucket and iteration; None writes none.

    Raises:
        ConfigError: the run has measured nothing, or a file cannot be written.
    """
    buckets = load_readiness(run_dir)
    if not buckets:
        raise ConfigError(
            f"{run_dir} has measured no delays yet",
            expected="at least three iterations",
            got="no delay that all ranks know",
            remedy="train longer",
        )
    Console(highlight=False).print(table_of(buckets))
    with writing("the delays"):
        if csv_path is not None:
            _write_csv(buckets, csv_path)
        if output is not None:
            _draw(buckets, run_dir.name, output)


def table_of(buckets: dict[str, list[ReadinessRecord]]) -> Table:
    """A row for each bucket and one for all of them."""
    table = Table(
        title="delay: how much later than all others the last rank was ready",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("bucket")
    for header in ("count", "median ms", "mean ms", "max ms", "last rank", "share", "persistence"):
        table.add_column(header, justify="right")
    for name, records in buckets.items():
        _add_row(table, name, statistics_of([records]))
    if len(buckets) > 1:
        _add_row(table, ALL, statistics_of(list(buckets.values())))
    return table


def _add_row(table: Table, name: str, statistics: DelayStatistics | None) -> None:
    assert statistics is not None, "a bucket that is in the file has a line there"
    table.add_row(name, *delay_cells(statistics), style="bold" if name == ALL else None)


def _write_csv(buckets: dict[str, list[ReadinessRecord]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", "bucket", "last_rank", "delay_ms"])
        for record in _in_order(buckets):
            delay_ms = delay_s(record.ready_s) * 1e3
            writer.writerow(
                [record.step + 1, record.bucket, last_rank(record.ready_s), f"{delay_ms:.4f}"]
            )


def _in_order(buckets: dict[str, list[ReadinessRecord]]) -> Sequence[ReadinessRecord]:
    records = [record for of_bucket in buckets.values() for record in of_bucket]
    return sorted(records, key=lambda record: record.step)


def _draw(buckets: dict[str, list[ReadinessRecord]], title: str, path: Path) -> None:
    # Imported here: it takes a second, and only drawing needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, records in {**buckets, ALL: _in_order(buckets)}.items():
        delays_s, fractions = delay_cdf([delay_s(record.ready_s) for record in records])
        delays_ms = [delay * 1e3 for delay in delays_s]
        is_all = name == ALL
        axes.step(
            delays_ms,
            fractions,
            where="post",
            label=name if is_all else None,
            color="black" if is_all else "silver",
            linewidth=2 if is_all else 0.8,
            zorder=2 if is_all else 1,
        )
    axes.set(title=f"{title}: straggler delay", xlabel="ms", ylabel="CDF", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="grey: single buckets")
    figure.savefig(path, dpi=150)
