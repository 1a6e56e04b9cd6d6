"""`megatron-sparse plan`: every scheme's predicted time for each bucket, the chosen one marked.

Of a run without a cluster file, whose planner compares bytes: the predicted bytes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from megatron_sparse.planner.prices import DENSE

NAMES_SHOWN = 4


def print_plan(rows: Sequence[dict[str, Any]], file: IO[str] | None = None) -> None:
    """Prints one table for each set of buckets that are alike.

    Args:
        rows: see `plan_rows`.
        file: the output; standard output if None. Plain text if it is not a terminal.
    """
    console = Console(file=file, highlight=False, width=None if file is None else 100)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        alike = {key: value for key, value in row.items() if key not in ("bucket", "profile")}
        groups.setdefault(repr(alike), []).append(row)
    for group in groups.values():
        _print_group(console, group)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["chosen"]] = counts.get(row["chosen"], 0) + 1
    told = ", ".join(f"{name} for {count}" for name, count in sorted(counts.items()))
    console.print(f"{len(rows)} buckets: {told}", markup=False)


def _print_group(console: Console, group: Sequence[dict[str, Any]]) -> None:
    row = group[0]
    names = ", ".join(member["bucket"] for member in group[:NAMES_SHOWN])
    more = f" and {len(group) - NAMES_SHOWN} more" if len(group) > NAMES_SHOWN else ""
    console.print(
        f"bucket {names}{more}: {row['numel']} elements, {row['op']} on {row['world_size']} "
        f"ranks, density {row['density']:.3g}",
        style="bold",
        markup=False,
    )
    if row["predicted_us"]:
        measured = row.get("measured_us") or {}
        console.print(_table(row["chosen"], row["predicted_us"], "predicted us", 1, measured))
    elif row.get("predicted_bytes"):
        column = "predicted wire(B) of a rank"
        console.print(_table(row["chosen"], row["predicted_bytes"], column, 0, {}))
    console.print(f"chosen: {row['chosen']}: {row['reason']}\n", markup=False)


def _table(
    chosen: str, prices: dict[str, float], column: str, digits: int, measured: dict[str, float]
) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("scheme")
    table.add_column(column, justify="right")
    table.add_column("/ dense", justify="right")
    if measured:
        table.add_column("measured us", justify="right")
    for name, price in sorted(prices.items(), key=lambda item: item[1]):
        cells = [f"{measured[name]:.0f}" if name in measured else "-"] if measured else []
        table.add_row(
            "*" if name == chosen else "",
            name,
            f"{price:.{digits}f}",
            f"{price / prices[DENSE]:.2f}" if prices.get(DENSE) else "-",
            *cells,
            style="bold" if name == chosen else None,
        )
    return table
