"""A figure: makes its rows, and turns them into a CSV and a PNG.

The picture uses only the rows in the CSV. A paper's figure says in its title that it is a model.
The colours are those of Okabe and Ito, which colour-blind readers can tell apart; series also
differ in marker and line.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_sparse.extras import require_figures

if TYPE_CHECKING:
    from matplotlib import axes, figure

type Axes = axes.Axes
type Canvas = figure.Figure
"""Matplotlib's. It is imported only for drawing, because that takes a second."""

Row = dict[str, Any]
type Draw = Callable[[list[Row], Canvas], None]
"""Puts rows onto an empty canvas."""

MODEL = "model (VirtualCluster), not measured"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A900")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
WIDTH_IN, DPI = 9.0, 100


@dataclass(frozen=True)
class Figure:
    """One figure of a paper: spccl, zen, pccl or stragglar.

    `assumptions`, those of the model, are the subtitle. `rows` makes the data; its argument `fast`
    asks for a much smaller sweep.
    """

    paper: str
    number: int
    title: str
    assumptions: str
    rows: Callable[[bool], list[Row]]
    draw: Draw
    height_in: float = 4.5

    @property
    def name(self) -> str:
        """The name of its files, without the suffix."""
        return f"{self.paper}-figure-{self.number}"

    def make(self, folder: Path, *, fast: bool) -> list[Path]:
        """Writes `<name>.csv` and `<name>.png` into a folder, made if missing; returns their paths.

        `fast`: make a much smaller sweep; the title says so.

        Raises:
            DependencyError: matplotlib is missing.
        """
        short = ", reduced sweep" if fast else ""
        title = f"{self.title}\n{MODEL}{short}. {self.assumptions}"
        return write_picture(
            folder, self.name, self.rows(fast), self.draw, self.height_in, title=title
        )


def write_picture(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    draw: Draw,
    height_in: float,
    *,
    title: str = "",
) -> list[Path]:
    """Writes a picture and the CSV that it is drawn from; returns (`<name>.csv`, `<name>.png`).

    `draw` puts the rows (at least one) onto an empty canvas. The title above it may be empty, for
    instance if `draw` writes one. The folder is made if missing.

    Raises:
        DependencyError: matplotlib is missing.
    """
    require_figures()
    from matplotlib import figure

    folder.mkdir(parents=True, exist_ok=True)
    table, picture = (folder / f"{name}.{end}" for end in ("csv", "png"))
    write_csv(rows, table)
    size = (WIDTH_IN, height_in)
    canvas = figure.Figure(figsize=size, dpi=DPI, layout="constrained")
    draw(list(rows), canvas)
    if title:
        canvas.suptitle(title, fontsize=9, wrap=True)
    # `optimize` makes the file a little smaller.
    canvas.savefig(picture, pil_kwargs={"optimize": True})
    return [table, picture]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes rows under a header, the keys of the first row. Floats keep six significant digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            rounded = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(rounded)


def groups(rows: Sequence[Row], *keys: str) -> dict[Any, list[Row]]:
    """Groups rows by a column's value, or by a tuple of several columns'; keeps their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        group = values if len(keys) > 1 else values[0]
        found.setdefault(group, []).append(row)
    return found


Style = tuple[str, str, str]
"""Colour, marker, dash."""


def styles_of(rows: Sequence[Row]) -> dict[str, Style]:
    """The style of each series of a figure, the same in all panels; `rows` are all of its rows."""
    looks = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(DASHES))
    return dict(zip(groups(rows, "series"), looks, strict=False))


def draw_lines(
    axes: Axes,
    rows: Sequence[Row],
    x: str,
    y: str,
    styles: Mapping[str, Style],
    *,
    log: str = "",
    ticks: bool = False,
) -> None:
    """Draws a line for each value of the column `series`: column y over column x.

    `log`: the logarithmic axes: `x`, `y` or `xy`. `ticks`: put ticks at the values of x and nowhere
    else.
    """
    for name, members in groups(rows, "series").items():
        colour, marker, dash = styles[name]
        axes.plot(
            [row[x] for row in members],
            [row[y] for row in members],
            label=name,
            color=colour,
            marker=marker,
            linestyle=dash,
            markersize=4.5,
            linewidth=1.4,
        )
    axes.grid(True, which="both", alpha=0.25, linewidth=0.5)
    for which in log:
        log_axis(axes, which)
    if ticks:
        axes.set_xticks(sorted({row[x] for row in rows}))


def panels(
    canvas: Canvas, rows: Sequence[Row], by: str, *, sharey: bool = False
) -> list[tuple[Any, Axes, list[Row]]]:
    """Makes a panel for each value of the column `by`, side by side.

    Returns (value, panel, rows with this value) for each.
    """
    rows_by_value = groups(rows, by)
    axes = canvas.subplots(1, len(rows_by_value), squeeze=False, sharey=sharey)[0]
    return list(zip(rows_by_value, axes, rows_by_value.values(), strict=True))


def line_panels(
    canvas: Canvas, rows: Sequence[Row], by: str, x: str, y: str, *, sharey: bool = False
) -> dict[Any, Axes]:
    """Draws a panel of lines y over x for each value of the column `by`, with one legend.

    `sharey`: all panels have one scale. Returns the panels, by value.
    """
    found = {}
    for value, axes, panel_rows in panels(canvas, rows, by, sharey=sharey):
        draw_lines(axes, panel_rows, x, y, styles_of(rows))
        found[value] = axes
    shared_legend(canvas, list(found.values()))
    return found


def log_axis(axes: Axes, which: str) -> None:
    """Makes the axis `which` (x or y) logarithmic, with plain numbers at 1, 2 and 5 of a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def shared_legend(canvas: Canvas, axes: Sequence[Axes]) -> None:
    """Draws one legend for all panels, below them; a label of several panels has one entry."""
    entries: dict[Any, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= zip(labels, handles, strict=True)
    canvas.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        fontsize=8,
        ncols=min(len(entries), 4),
        frameon=False,
    )


def draw_bars(axes: Axes, rows: Sequence[Row], group: str, y: str) -> None:
    """Draws a group of bars for each value of the column `group`, with one bar for each series.

    There is one row for each pair of group and series. Column y has the bars' heights, which are
    also written above them.
    """
    by_series, labels = groups(rows, "series"), list(groups(rows, group))
    width = 0.85 / len(by_series)  # groups are 1 apart, and 0.15 is free between them
    for index, (name, members) in enumerate(by_series.items()):
        from_middle = (index - (len(by_series) - 1) / 2) * width
        places = [labels.index(row[group]) + from_middle for row in members]
        bars = axes.bar(
            places,
            [row[y] for row in members],
            width,
            label=name,
            color=COLOURS[index],
            edgecolor="white",
            linewidth=0.4,
        )
        axes.bar_label(bars, fmt="{:.1f}", fontsize=6)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(True, axis="y", alpha=0.25, linewidth=0.5)


def heatmaps(
    canvas: Canvas,
    rows: Sequence[Row],
    by: str,
    y: str,
    value: str,
    xlabel: str,
    *,
    most: float,
    number: str = "{:.2f}",
) -> dict[Any, Axes]:
    """Draws a heatmap of a ratio for each value of the column `by`, with `ranks` along the x axis.

    Values of column y go upwards. Each cell also shows its ratio (column `value`) as text in the
    format `number`. Ratios above 1 are green-blue, those below 1 brown; `most` and its inverse have
    the darkest colours. `rows` has one row for each value of `by`, `ranks` and y. `xlabel` is the
    label of the x axis. Returns the maps, by the value of `by`.
    """
    found, most_log = {}, np.log2(most)
    for key, axes, cells in panels(canvas, rows, by):
        columns, lines = sorted({row["ranks"] for row in cells}), sorted({row[y] for row in cells})
        grid = np.full((len(lines), len(columns)), np.nan)
        for row in cells:
            grid[lines.index(row[y]), columns.index(row["ranks"])] = row[value]
        logs = np.log2(grid)
        axes.imshow(logs, "BrBG", vmin=-most_log, vmax=most_log, origin="lower", aspect="auto")
        for (line, column), cell in np.ndenumerate(grid):
            is_dark = abs(logs[line, column]) > 0.7 * most_log
            style = {"fontsize": 8, "color": "white" if is_dark else "black"}
            axes.text(column, line, number.format(cell), ha="center", va="center", **style)
        axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
        axes.set_yticks(range(len(lines)), [f"{line:g}" for line in lines])
        axes.set_xlabel(xlabel)
        found[key] = axes
    return found
