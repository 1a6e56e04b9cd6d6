"""The live view as a PNG or PDF, drawn by matplotlib character by character: no browser, no font
beside matplotlib's own.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import SVG_EXPORT_THEME

CHARACTER_IN = (0.085, 0.17)
"""Width and height of a character, in inches."""
DPI = 150
_FONT = "DejaVu Sans Mono"
_POINTS = 10
_MARGIN = 1


def draw(view: RenderableType, columns: int, title: str, output: Path) -> None:
    """Draws a view of rich's; the file's ending decides the format.

    Args:
        view: what the terminal would show.
        columns: width of the terminal.
        title: line above it.
        output: the file.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    console = Console(width=columns, force_terminal=True, color_system="truecolor", highlight=False)
    lines = console.render_lines(view, console.options, pad=False)
    width, height = columns + 2 * _MARGIN, len(lines) + 1 + 2 * _MARGIN
    figure = Figure((width * CHARACTER_IN[0], height * CHARACTER_IN[1]), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(_hex(SVG_EXPORT_THEME.background_color))
    foreground = _hex(SVG_EXPORT_THEME.foreground_color)

    def write(row: int, column: int, text: str, color: str, weight: str) -> None:
        figure.text(
            (column + _MARGIN) / width,
            1 - (row + _MARGIN + 0.5) / height,
            text,
            color=color,
            family=_FONT,
            weight=weight,
            size=_POINTS,
            va="center_baseline",
            parse_math=False,
        )

    write(0, 0, title, foreground, "bold")
    for row, line in enumerate(lines, 1):
        column = 0
        for segment in line:
            color, weight = foreground, "normal"
            if segment.style is not None:
                weight = "bold" if segment.style.bold else weight
                if segment.style.color is not None:
                    color = _hex(segment.style.color.get_truecolor(SVG_EXPORT_THEME))
            # One by one: no font is exactly as wide as the grid.
            for character in segment.text:
                if character.strip():
                    write(row, column, character, color, weight)
                column += 1
    figure.savefig(output)


def _hex(color: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
