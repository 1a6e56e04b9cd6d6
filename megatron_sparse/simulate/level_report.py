"""Levels as a table, and as curves over the number of ranks: a MODEL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_sparse.simulate.figures import (
    draw_lines,
    log_axis,
    shared_legend,
    styles_of,
    write_picture,
)
from megatron_sparse.simulate.levels import LevelRow, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LABEL = "model (cost models), not measured"
HEIGHT_IN = 4.5
TABLE_WIDTH = 132
"""Where the output is not a terminal."""


def describe(training: Training, cluster: str) -> str:
    """What was priced, in a sentence."""
    halves = (
        f"reduce-scatter, and bf16 parameters gathered exactly in {training.move_bits:g} bits"
        if training.sharded
        else "all-reduce"
    )
    if training.instances > 1:
        halves += f", {training.instances} instances"
    dtype = "fp32" if training.gradient_bytes == 4 else "bf16"
    return f"{training.numel / 1e9:g} B parameters on {cluster}: {dtype} gradients, {halves}"


def print_levels(rows: Sequence[LevelRow], training: Training) -> None:
    """Prints a line for each row; the head says what was priced."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH)
    console.print(f"{describe(training, rows[0].cluster)}; milliseconds of a {LABEL}", markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("preset", "ranks", "nodes", "level", "scheme"):
        table.add_column(title, justify="right" if title in ("ranks", "nodes") else "left")
    for title in ("inside", "across", "/ rank", "parameters", "", "whole", "dense", "best dense"):
        table.add_column(title, justify="left" if not title else "right")
    table.add_column("dense / whole", justify="right")
    for row in rows:
        table.add_row(
            row.preset,
            str(row.ranks),
            str(row.nodes),
            row.level,
            row.scheme,
            f"{row.inside_ms:.1f}",
            f"{row.across_ms:.1f}",
            f"{1 / row.gradient_over_rank:.2f}",
            f"{row.parameters_ms:.1f}",
            row.parameters,
            f"{row.total_ms:.1f}",
            f"{row.dense_ms:.1f}",
            f"{row.best_dense_ms:.1f}",
            f"{row.speedup:.2f}",
        )
    console.print(table)


def draw_levels(rows: Sequence[LevelRow], training: Training, folder: Path) -> list[Path]:
    """Writes `levels.csv` and `levels.png`.

    Returns:
        The files.

    Raises:
        DependencyError: matplotlib is missing.
    """
    title = f"{describe(training, rows[0].cluster)}\n{LABEL}"
    plain = [row.to_dict() for row in rows]
    return write_picture(folder, "levels", plain, _draw, HEIGHT_IN, title=title)


def _draw(rows: Sequence[dict[str, Any]], canvas: Canvas) -> None:
    """Whole synchronisation on the left, dense over it on the right."""
    series = [row | {"series": f"{row['preset']}, {row['level']}"} for row in rows]
    dense = {row["ranks"]: row for row in rows}.values()
    for name, column in (("dense", "dense_ms"), ("best dense", "best_dense_ms")):
        series += [
            row
            | {
                "series": name,
                "preset": name,
                "level": name,
                "total_ms": row[column],
                "speedup": row["dense_ms"] / row[column],
            }
            for row in dense
        ]
    left, right = canvas.subplots(1, 2)
    styles = styles_of(series, colour="preset", form="level")
    for axes, column, label in (
        (left, "total_ms", "whole synchronisation (ms)"),
        (right, "speedup", "dense / whole synchronisation"),
    ):
        draw_lines(axes, series, "ranks", column, styles)
        for which in ("x", "y"):
            log_axis(axes, which)
        axes.set_xticks(sorted({row["ranks"] for row in rows}))
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
    shared_legend(canvas, [left, right])
