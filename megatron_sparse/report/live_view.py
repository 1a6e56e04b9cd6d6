"""`megatron-sparse view`: a run's progress on the terminal, drawn from the run's files.

It also shows a run in a batch job, which has no terminal. The time left is that of the iterations
alone, because the time between iterations is not recorded.

`--follow` draws the view again whenever the run has written lines. It reads only the end of the
file, so a long run costs no more than a short one.
"""

import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import BUCKET_STAGES, STEP_STAGES
from megatron_sparse.report.run_data import CONFIG_FILE, load_breakdown, load_config
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.lines import other_version, parse
from megatron_sparse.telemetry.progress import RunProgress
from megatron_sparse.telemetry.quantities import REST, ms
from megatron_sparse.telemetry.run import BREAKDOWN_FILE

INTERVAL_S = 1.0
TAIL_BYTES = 1 << 18
"""Read to follow a run: the lines of 100 iterations, of which a view shows means over the last."""
_STYLES = {
    "forward_backward": "green",
    "optimizer": "cyan",
    "host_wait": "red",
    "param_wait": "magenta",
    REST: "white",
}


def render(progress: RunProgress) -> RenderableType:
    """Lays out the view: progress, a bar for each stage of an iteration, and bytes sent.

    `progress` has at least one iteration. The training thread's stages get bars; the buckets'
    stages, which overlap with them, get one line.
    """
    last = progress.latest
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=progress.total or last.iteration, completed=last.iteration)
    head.add_row(Text(progress.name, style="bold"), bar, progress.place())
    iteration_ms = progress.iteration_ms
    stages = Table.grid(padding=(0, 1), expand=True)
    stages.add_column(no_wrap=True, width=max(map(len, STEP_STAGES)))
    stages.add_column(justify="right", no_wrap=True, width=10)
    stages.add_column(justify="right", no_wrap=True, width=4)
    stages.add_column(ratio=1)
    for stage, time_ms in progress.stages().items():
        share = time_ms / iteration_ms if iteration_ms else 0.0
        style = _STYLES[stage]
        bar = ProgressBar(total=1, completed=share, complete_style=style, finished_style=style)
        stages.add_row(stage, f"{ms(time_ms)} ms", f"{share:.0%}", bar)
    bucket_stages = "  ".join(
        f"{stage} {ms(t)}" for stage, t in progress.means_ms(BUCKET_STAGES).items() if t
    )
    return Group(
        Rule(style="dim"),
        head,
        Text(progress.facts()),
        Text(progress.pace(), style="dim"),
        stages,
        Text(progress.traffic()),
        Text(f"buckets, ms: {bucket_stages}" if bucket_stages else "no bucket yet", style="dim"),
    )


def progress_after(folder: Path, lines: Iterable[IterationBreakdown]) -> RunProgress:
    """The progress of a run after the iterations of `lines`; `folder` has its configuration."""
    _, config = load_config(folder, [])
    total = config.get("training.iterations")
    name = config.get("name") or folder.resolve().name
    progress = RunProgress(name, total if isinstance(total, int) else None)
    now_s = 0.0  # of iterations alone: the time between two iterations is not recorded
    for line in lines:
        now_s += line.iteration_ms / 1e3
        progress.add(line, now_s)
    return progress


def run(folder: Path, columns: int | None) -> None:
    """Draws the view after the last iteration, `columns` wide; None: as wide as the terminal.

    Raises:
        ConfigError: the folder is not a run's, or it has no iteration.
    """
    lines, _ = load_breakdown(folder, [])
    progress = progress_after(folder, lines)
    console = Console(width=columns, highlight=False)
    console.print(render(progress))


def _tail(path: Path) -> list[IterationBreakdown]:
    """The iterations in a file's last `TAIL_BYTES`; none if there is no file.

    Leaves out incomplete lines, such as the first one, which may begin before those bytes.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [IterationBreakdown(**line) for line in filter(None, map(parse, lines))]


def follow(folder: Path, columns: int | None) -> None:
    """Draws the view again and again until the run's last iteration, or Ctrl-C.

    On a terminal a view replaces the one before; a pipe or file gets them one below the other. The
    run may have no iteration yet. `columns` is the width; None takes the terminal's.

    Raises:
        ConfigError: the folder is not a run's, or another version writes it.
    """
    console = Console(width=columns, highlight=False)
    if not any((folder / name).is_file() for name in (CONFIG_FILE, BREAKDOWN_FILE)):
        raise ConfigError(
            f"{folder} is not the folder of a run",
            expected=f"a folder with {CONFIG_FILE}, such as runs/quickstart",
            got="a folder without it" if folder.is_dir() else "no such folder",
            remedy="name the folder that training printed",
        )
    drawn: int | None = None  # the iteration that the last view shows
    waiting = Text(f"{folder}: no iteration is written yet")
    in_place = Live(waiting, console=console, auto_refresh=False)
    with in_place if console.is_terminal else nullcontext() as live:
        while True:
            try:
                lines = _tail(folder / BREAKDOWN_FILE)
                if lines and lines[-1].iteration != drawn:
                    drawn, progress = lines[-1].iteration, progress_after(folder, lines)
                    view = render(progress)
                    if live is None:
                        console.print(view)
                    else:
                        live.update(view, refresh=True)
                    if progress.total is not None and drawn >= progress.total:
                        return
                time.sleep(INTERVAL_S)
            except KeyboardInterrupt:
                return
            except (TypeError, KeyError) as error:
                raise other_version(folder / BREAKDOWN_FILE, error) from None
