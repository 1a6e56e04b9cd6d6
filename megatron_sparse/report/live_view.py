"""`megatron-sparse view`: the live view of a run, drawn again from what the run has written.

For runs whose terminal is elsewhere (a batch job), and for pictures. The view is `telemetry.live`'s
own, fed with the lines of `breakdown.jsonl`; only the clock is another: what lies between two
iterations is not recorded, so the time left is that of the iterations alone.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from megatron_sparse.errors import ConfigError
from megatron_sparse.report.run_data import load_breakdown, load_config
from megatron_sparse.telemetry.live import Progress, render

PICTURE_COLUMNS = 100

# rich fills this in. Its own form asks a server for a font, which a picture must not do.
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", \
monospace; line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def progress_of(folder: Path, iteration: int | None) -> Progress:
    """What the live view knew when an iteration had ended.

    Args:
        folder: of a run, which may still be going on.
        iteration: its number; None takes the last one that has been written.

    Raises:
        ConfigError: the folder is no run's, or the run has not got that iteration.
    """
    gaps: list[str] = []
    lines, _ = load_breakdown(folder, gaps)
    _, config = load_config(folder, gaps)
    last = math.inf if iteration is None else iteration
    shown = [line for line in lines if line.iteration <= last]
    if iteration is not None and (not shown or shown[-1].iteration != iteration):
        raise ConfigError(
            f"{folder} has no iteration {iteration}",
            expected=f"{lines[0].iteration} to {lines[-1].iteration}",
            got=iteration,
            remedy="leave --iteration out for the last one",
        )
    progress = Progress(config.get("name") or folder.resolve().name, _total(config))
    now_s = 0.0
    for line in shown:
        now_s += line.iteration_ms / 1e3
        progress.add(line, now_s)
    return progress


def _total(config: dict[str, object]) -> int | None:
    total = config.get("training.iterations")
    return total if isinstance(total, int) else None


def run(folder: Path, iteration: int | None, output: Path | None, columns: int | None) -> None:
    """Draws the view, on standard output or into a file.

    Args:
        folder: of the run.
        iteration: see `progress_of`.
        output: an SVG; None prints.
        columns: of the view; None takes the terminal's, or `PICTURE_COLUMNS` for an SVG.

    Raises:
        ConfigError: see `progress_of`; or the file cannot be written.
    """
    progress = progress_of(folder, iteration)
    if output is None:
        console = Console(width=columns, highlight=False)
        console.print(render(progress, console.width))
        return
    try:
        output.write_text(svg(progress, columns or PICTURE_COLUMNS), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written",
            expected="a file that can be made",
            got=error,
            remedy="choose another with --output",
        ) from None
    print(output)


def svg(progress: Progress, columns: int) -> str:
    """The view in a terminal's window, as one SVG that asks for nothing else.

    Args:
        progress: with an iteration at least.
        columns: of the terminal.
    """
    console = Console(
        record=True,
        file=io.StringIO(),
        width=columns,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(render(progress, columns))
    title = f"{progress.name}, iteration {progress.latest.iteration}"
    return console.export_svg(title=title, code_format=_SVG, unique_id="view")
