"""`megatron-sparse view`: the live view of a run, drawn from the run's files.

For runs whose terminal is elsewhere (a batch job), and for pictures. The view is that of
`telemetry.live`, fed with the lines of `breakdown.jsonl`. Only the time left differs: time between
iterations is not recorded, so the estimate counts the iterations alone.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from megatron_sparse.errors import ConfigError, writing
from megatron_sparse.report.run_data import CONFIG_FILE, load_breakdown, load_config
from megatron_sparse.telemetry.live import RunProgress, render
from megatron_sparse.telemetry.run import BREAKDOWN_FILE

PICTURE_COLUMNS = 100

# rich fills in this template. Its default loads a font from a server, which a picture must not do.
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


def progress_of(folder: Path, iteration: int | None) -> RunProgress:
    """The progress of a run at the end of an iteration.

    Args:
        folder: folder of a run, which may still be going on.
        iteration: number of the iteration; None takes the last one written.

    Raises:
        ConfigError: the folder is not a run's, or the run does not have that iteration.
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
            remedy="leave --iteration out to see the last one",
        )
    progress = RunProgress(config.get("name") or folder.resolve().name, _total(config))
    now_s = 0.0
    for line in shown:
        now_s += line.iteration_ms / 1e3
        progress.add(line, now_s)
    return progress


def progress_at_start(folder: Path) -> RunProgress:
    """The progress of a run of which no iteration is known.

    Raises:
        ConfigError: the folder is not a run's.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, BREAKDOWN_FILE)):
        raise ConfigError(
            f"{folder} is not the folder of a run",
            expected=f"a folder with {CONFIG_FILE}, such as runs/quickstart",
            got="a folder without it" if folder.is_dir() else "no such folder",
            remedy="name the folder that training printed",
        )
    _, config = load_config(folder, [])
    return RunProgress(config.get("name") or folder.resolve().name, _total(config))


def _total(config: dict[str, object]) -> int | None:
    total = config.get("training.iterations")
    return total if isinstance(total, int) else None


def run(folder: Path, iteration: int | None, output: Path | None, columns: int | None) -> None:
    """Draws the view, on standard output or into a file.

    Args:
        folder: the run's folder.
        iteration: see `progress_of`.
        output: an SVG, PNG or PDF file; None prints.
        columns: width of the view; None takes the terminal's, or `PICTURE_COLUMNS` for a picture.

    Raises:
        ConfigError: see `progress_of`; or the file cannot be written.
    """
    progress = progress_of(folder, iteration)
    if output is None:
        console = Console(width=columns, highlight=False)
        console.print(render(progress, console.width))
        return
    with writing(output):
        picture(progress, columns or PICTURE_COLUMNS, output)
    print(output)


def picture(progress: RunProgress, columns: int, output: Path) -> None:
    """Writes the view into a file, whose ending decides the format.

    Raises:
        OSError: it cannot be written.
    """
    if output.suffix.lower() == ".svg":
        output.write_text(svg(progress, columns), encoding="utf-8")
        return
    from megatron_sparse.report import view_picture  # needs matplotlib

    view_picture.draw(render(progress, columns), columns, _title(progress), output)


def _title(progress: RunProgress) -> str:
    return f"{progress.name}, iteration {progress.latest.iteration}"


def svg(progress: RunProgress, columns: int) -> str:
    """The view in a terminal window, as one self-contained SVG.

    Args:
        progress: progress with at least one iteration.
        columns: width of the terminal.
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
    return console.export_svg(title=_title(progress), code_format=_SVG, unique_id="view")
