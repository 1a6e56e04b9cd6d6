"""When the ranks were ready: the lines of a run, their statistics, and which rank was last.

`readiness.jsonl` has one line for each bucket and iteration: how long each rank of the group waited
for the last one, in milliseconds (`waited_ms`, 0 for the straggler). Runs write it unless
`straggler.mode` is `off` or `pinned`.

`megatron-sparse stragglers RUN` shows them as a table, a CSV and the CDF of StragglAR's figures 2a
and 8: for each delay, the fraction of bucket synchronisations whose last rank was at most that much
later than the others.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_sparse.errors import ConfigError, writing
from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.straggler.detector import DelayStatistics, delay_cdf, delay_s, last_rank
from megatron_sparse.telemetry.console import plain_table
from megatron_sparse.telemetry.lines import other_version, read_lines
from megatron_sparse.telemetry.quantities import delay_cells

READINESS_FILE = "readiness.jsonl"
ALL = "all"


def readiness_line(record: ReadinessRecord) -> str:
    """The line of `readiness.jsonl` for one bucket in one step."""
    return json.dumps(
        {
            "iteration": record.step + 1,
            "bucket": record.bucket,
            "waited_ms": [round(waited_s * 1e3, 4) for waited_s in record.waited_s],
        },
        separators=(",", ":"),
    )


def load_readiness(run_dir: Path) -> dict[str, list[ReadinessRecord]]:
    """Reads the measured delays of a run: by bucket, in the order of steps.

    Raises:
        ConfigError: nothing was measured, or the file is not what a run writes.
    """
    path = Path(run_dir) / READINESS_FILE
    found: dict[str, list[ReadinessRecord]] = defaultdict(list)
    try:
        for line in read_lines(path):
            waited_s = tuple(float(waited_ms) / 1e3 for waited_ms in line["waited_ms"])
            found[line["bucket"]].append(
                ReadinessRecord(line["bucket"], line["iteration"] - 1, waited_s)
            )
    except OSError as error:
        raise ConfigError(
            f"{run_dir} holds no measured delays",
            expected=f"a run's folder with {READINESS_FILE}",
            got=error.strerror,
            remedy="train at least three iterations with straggler.mode=observe, persistent or "
            "dynamic",
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise other_version(path, error, "read it with the version that trained") from None
    return dict(found)


def statistics_of(buckets: Sequence[Sequence[ReadinessRecord]]) -> DelayStatistics | None:
    """Statistics over the records of all given buckets; None without records."""
    return DelayStatistics.of([[record.ready_s for record in records] for records in buckets])


def summary_of(statistics: DelayStatistics | None) -> dict[str, Any] | None:
    """The statistics as fields of `summary.json`, in milliseconds."""
    if statistics is None:
        return None
    return {
        "count": statistics.count,
        "median_ms": statistics.median_s * 1e3,
        "mean_ms": statistics.mean_s * 1e3,
        "max_ms": statistics.max_s * 1e3,
        "persistence": statistics.persistence,
        "rank": statistics.rank,
        "share": statistics.share,
    }


def step_scalars(records: Sequence[ReadinessRecord], without: int = 0) -> dict[str, float]:
    """A step's straggler metrics for the dashboards.

    `straggler/delay_ms` (summed over buckets) and `straggler/rank` (with the longest delay) belong
    to the step before the last, `straggler/buckets_without` to this one.

    Args:
        records: records of the step before the last; empty if nothing is measured.
        without: number of buckets that skipped a rank.
    """
    scalars = {"straggler/buckets_without": float(without)} if records or without else {}
    if records:
        longest = max(records, key=lambda record: delay_s(record.ready_s))
        scalars["straggler/delay_ms"] = sum(delay_s(record.ready_s) for record in records) * 1e3
        scalars["straggler/rank"] = float(last_rank(longest.ready_s))
    return scalars


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
    title = "delay: how much later than all others the last rank was ready"
    numbers = ("count", "median ms", "mean ms", "max ms", "last rank", "share", "persistence")
    table = plain_table(title, "bucket", *numbers)
    rows = {name: [records] for name, records in buckets.items()}
    if len(buckets) > 1:
        rows[ALL] = list(buckets.values())
    for name, records in rows.items():
        statistics = statistics_of(records)
        assert statistics is not None, "a bucket that is in the file has a line there"
        table.add_row(name, *delay_cells(statistics), style="bold" if name == ALL else None)
    return table


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
