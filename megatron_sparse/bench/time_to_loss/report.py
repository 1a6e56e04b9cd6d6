"""The table, the JSON lines and the picture of `bench time-to-loss`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse.bench.host_load import MOST_FOREIGN_LOAD
from megatron_sparse.bench.table import Columns, TableRow, print_table
from megatron_sparse.bench.time_to_loss.command import Result
from megatron_sparse.bench.time_to_loss.settings import BY_NAME, PLAIN, VALIDATIONS
from megatron_sparse.simulate import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

PICTURE, BYTES = "time-to-loss", "loss-over-bytes"
"""Names of the pictures and their CSV."""
HEIGHT_IN = 4.2
EARLY_SHARE = 0.8
"""The first target: plain Megatron's loss after this share of its run."""
FINAL_MARGIN = 1.005
"""The second target: plain Megatron's final loss, and half a percent."""


@dataclass
class Row(TableRow):
    """One run; times are of training, without validations.

    Attributes:
        op: `time_to_loss`.
        setting: its name.
        label: the setting in words.
        mbit: rate of each rank's link; null over loopback.
        iterations: how many the run had.
        iteration_ms: median.
        final: validation loss.
        wire_ratio: bytes of gradients and parameters of the whole run, over plain Megatron's.
        to_plain: the final loss over plain Megatron's, in %; null for plain Megatron.
        early_s: seconds to plain Megatron's loss at 80 % of its run; null if never reached.
        early_speedup: plain Megatron's `early_s` over it.
        final_s: seconds to plain Megatron's final loss + 0.5 %; null if never reached.
        final_speedup: plain Megatron's `final_s` over it.
        foreign_load: the share of the machine that other programs took during the run.
        noisy: whether `foreign_load` was too high to trust the times.
    """

    COLUMNS = Columns(
        "label >34 setting | mbit >6 | iterations >5 iters | iteration_ms >13.1f iteration(ms) | "
        "wire_ratio >6.3f wire | final >7.4f loss | to_plain >+11.2f to plain(%) | "
        "early_s >11.1f 80 % loss(s) | early_speedup >8.2f speedup | final_s >10.1f +0.5 %(s) | "
        "final_speedup >8.2f speedup"
    )

    op: str
    setting: str
    label: str
    mbit: int | None
    iterations: int
    iteration_ms: float
    wire_ratio: float
    final: float
    to_plain: float | None
    early_s: float | None
    early_speedup: float | None
    final_s: float | None
    final_speedup: float | None
    foreign_load: float
    noisy: bool


def report(results: Sequence[Result], folder: Path | None, json_path: Path | None) -> None:
    """Prints the table; on request writes its rows and draws the pictures.

    Args:
        results: of finished runs, with plain Megatron's at each rate.
        folder: for the pictures and their CSV, made if missing; None draws none.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: a file cannot be written.
        DependencyError: matplotlib is missing.
    """
    print_table(Row.COLUMNS, rows_of(results), json_path)
    if folder is not None:
        for path in draw(results, folder):
            print(path)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each run, in their order."""
    plains = {each.mbit: each for each in results if each.setting == PLAIN}
    return [_row(each, plains[each.mbit]) for each in results]


def _row(each: Result, plain: Result) -> Row:
    early_loss = plain.curve[round(EARLY_SHARE * VALIDATIONS) - 1][1]
    seconds, speedups = [], []
    for loss in (early_loss, FINAL_MARGIN * plain.final):
        plain_s, own_s = plain.seconds_to(loss), each.seconds_to(loss)
        assert plain_s is not None
        seconds.append(own_s)
        speedups.append(None if own_s is None else plain_s / own_s)
    return Row(
        op="time_to_loss",
        setting=each.setting,
        label=BY_NAME[each.setting].label,
        mbit=each.mbit,
        iterations=len(each.iteration_ms),
        iteration_ms=each.median_ms,
        wire_ratio=each.wire_ratio,
        final=each.final,
        to_plain=None if each is plain else 100 * (each.final / plain.final - 1),
        early_s=seconds[0],
        early_speedup=speedups[0],
        final_s=seconds[1],
        final_speedup=speedups[1],
        foreign_load=each.foreign_load,
        noisy=each.foreign_load > MOST_FOREIGN_LOAD,
    )


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes the pictures and the CSV that each is drawn from.

    Raises:
        DependencyError: matplotlib is missing.
    """
    pictures = (
        (PICTURE, curve_rows(results), _draw_curves),
        (BYTES, bytes_rows(rows_of(results)), _draw_bytes),
    )
    return [
        path for picture in pictures for path in figures.write_picture(folder, *picture, HEIGHT_IN)
    ]


def curve_rows(results: Sequence[Result]) -> list[figures.Row]:
    """A row for each validation of each run."""
    return [
        {
            "series": BY_NAME[each.setting].label,
            "mbit": each.mbit,
            "seconds": seconds,
            "loss": loss,
        }
        for each in results
        for seconds, loss in each.points
    ]


def bytes_rows(rows: Sequence[Row]) -> list[figures.Row]:
    """A row for each run."""
    return [
        {
            "series": row.label,
            "mbit": row.mbit,
            "wire_ratio": row.wire_ratio,
            "to_plain": row.to_plain or 0.0,
        }
        for row in rows
    ]


def _draw_curves(rows: list[figures.Row], canvas: Canvas) -> None:
    styles, by_rate = figures.styles_of(rows), figures.groups(rows, "mbit")
    panels = canvas.subplots(1, len(by_rate), squeeze=False)[0]
    for axes, (mbit, members) in zip(panels, by_rate.items(), strict=True):
        figures.draw_lines(axes, members, "seconds", "loss", styles)
        figures.log_axis(axes, "x")
        axes.set(title=_where(mbit), xlabel="seconds of training", ylabel="validation loss")
    figures.shared_legend(canvas, panels)


def _draw_bytes(rows: list[figures.Row], canvas: Canvas) -> None:
    styles, by_rate = figures.styles_of(rows), figures.groups(rows, "mbit")
    panels = canvas.subplots(1, len(by_rate), squeeze=False, sharey=True)[0]
    for axes, (mbit, members) in zip(panels, by_rate.items(), strict=True):
        figures.draw_lines(axes, members, "wire_ratio", "to_plain", styles)
        figures.log_axis(axes, "x")
        axes.axhline(0, color="black", linestyle="--", linewidth=1)
        axes.set(title=_where(mbit), xlabel="bytes of the whole run, over Megatron's")
    panels[0].set_ylabel("final validation loss, % above Megatron's")
    figures.shared_legend(canvas, panels)


def _where(mbit: int | None) -> str:
    return "loopback" if mbit is None else f"{mbit} Mbit/s"
