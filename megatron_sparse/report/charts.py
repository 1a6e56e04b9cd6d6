"""A chart: drawn by matplotlib once, shown as SVG inside the page.

SVG instead of an interactive library: a page of ten charts takes a few hundred kilobytes instead of
megabytes, prints sharply and needs no script. Charts are narrow, so that their text is readable on
a phone; a wide screen shows several side by side.
"""

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_sparse.report import theme
from megatron_sparse.simulate.figures import Axes

WIDTH_IN, HEIGHT_IN = 4.1, 2.6
MOST_POINTS = 200
"""Points of a line: more are indistinguishable on so narrow a chart, and make the page large."""
MOST_LETTERS = 22
"""Letters of a name in a chart; tables have the full name."""

TARGET_NOTE = " A dotted vertical line: the target density begins."

_STYLE: Any = {
    # Text stays text: it can be searched, and takes the page's font.
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9,
    # A run's name may hold dollars and underscores.
    "text.parse_math": False,
    "text.color": theme.INK,
    "axes.labelcolor": theme.INK,
    "axes.edgecolor": theme.MUTED,
    "xtick.color": theme.MUTED,
    "ytick.color": theme.MUTED,
    "xtick.labelcolor": theme.INK,
    "ytick.labelcolor": theme.INK,
    "grid.color": theme.LINE,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8.4,
    "legend.handlelength": 1.4,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Chart:
    """One picture of a report, which `draw` draws onto empty axes.

    `name`: of its anchor in the page. The title has units; `note` says how to read the chart.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    height_in: float = HEIGHT_IN

    def svg(self) -> str:
        """An `<svg>` element in the page's font and width, whose ids are unique."""
        from matplotlib import figure, rc_context

        file = io.StringIO()
        # The same data must give the same text: None omits the date, and the salt fixes the ids.
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with rc_context(_STYLE | {"svg.hashsalt": self.name}):
            canvas = figure.Figure(figsize=(WIDTH_IN, self.height_in))
            self.draw(canvas.subplots())
            canvas.savefig(file, format="svg", transparent=True, metadata=no_metadata)
        return _styled(_cleaned(file.getvalue(), self.name), self.title)


def _cleaned(text: str, prefix: str) -> str:
    """The file's `<svg>` element; `prefix` before each id, as charts share ids such as `axes_1`."""
    text = text[text.index("<svg") :]
    # A style sheet inside would apply to the whole page.
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)

    def with_prefix(tag: re.Match[str]) -> str:
        return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", tag.group())

    # Only inside tags: a run's name may contain `id="` as text.
    return re.sub(r"<[^>]+>", with_prefix, text)


def _styled(text: str, title: str) -> str:
    """Replaces the element's fixed font and size by the page's; screen readers get the title."""
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    opening_tag, rest = text.split(">", 1)
    opening_tag = re.sub(r' (width|height)="[^"]*pt"', "", opening_tag)  # page.css sets them
    return f'{opening_tag} role="img" aria-label="{html.escape(title)}">{rest}'


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduces a line to at most `MOST_POINTS` points: the means of neighbouring points.

    `x` ascends. A mean leaves NaN out, and is NaN where all values are.
    """
    count = min(len(x), MOST_POINTS)
    return _means(x, count), _means(y, count)


def _means(values: np.ndarray, parts: int) -> np.ndarray:
    pieces = [piece[np.isfinite(piece)] for piece in np.array_split(values, parts)]
    return np.array([piece.mean() if piece.size else np.nan for piece in pieces])


def thinned_note(lengths: Sequence[int]) -> str:
    """A sentence with the number of iterations behind a point; empty if it is one."""
    most = -(-max(lengths) // MOST_POINTS)
    return f" Each point is the mean of up to {most} iterations." if most > 1 else ""


def short(name: str) -> str:
    """A name cut to at most `MOST_LETTERS` characters.

    Example:
        >>> short("a_run_whose_name_goes_on_and_on")
        'a_run_whose_name_goes…'
    """
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def mark_target(axes: Axes, begins: int | None, colour: str = theme.INK) -> None:
    """A dotted vertical line where the target density begins; none for None."""
    if begins is not None:
        axes.axvline(begins - 0.5, color=colour, linestyle=(0, (1, 2)), linewidth=1.2, zorder=3)


def legend_below(axes: Axes) -> None:
    """A legend of everything that has a label; none without."""
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower center", ncols=4, columnspacing=1.0)
