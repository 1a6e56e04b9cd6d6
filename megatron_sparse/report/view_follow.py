"""`megatron-sparse view --follow`: the live view, drawn anew as the run writes lines.

It reads what the file has grown by, so a long run costs no more than a short one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_sparse.report import live_view
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.lines import other_version
from megatron_sparse.telemetry.live import render
from megatron_sparse.telemetry.run import BREAKDOWN_FILE

INTERVAL_S = 1.0


class Lines:
    """The iterations of a run, as they come.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / BREAKDOWN_FILE
        self._read_bytes = 0

    def new(self) -> tuple[list[IterationBreakdown], bool]:
        """Complete lines that were written since the last call.

        A damaged line is left out, as in reports.

        Returns:
            The iterations, and whether the file began anew: a run of the same name was started.
        """
        try:
            began_anew = self._path.stat().st_size < self._read_bytes
            with self._path.open("rb") as file:
                file.seek(0 if began_anew else self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return [], False
        complete = text[: text.rfind(b"\n") + 1]
        self._read_bytes = len(complete) + (0 if began_anew else self._read_bytes)
        return list(_parsed(complete)), began_anew


def _parsed(text: bytes) -> Iterator[IterationBreakdown]:
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        yield IterationBreakdown.of_line(values)


def run(folder: Path, columns: int | None) -> None:
    """Draws the view until the run's last iteration, or Ctrl-C.

    On a terminal it stays in its place; into a pipe or file each is written below the one before.

    Args:
        folder: the run's folder; it may have no iteration yet.
        columns: width; None takes the terminal's.

    Raises:
        ConfigError: the folder is not a run's, or another version writes it.
    """
    console = Console(width=columns, highlight=False)
    lines, now_s = Lines(folder), 0.0
    progress = live_view.progress_at_start(folder)
    with ExitStack() as screen:
        live = None
        if console.is_terminal:
            waiting = Text(f"{progress.name}: no iteration is written yet")
            live = screen.enter_context(Live(waiting, console=console, auto_refresh=False))
        while True:
            try:
                found, began_anew = lines.new()
                if began_anew:
                    progress = live_view.progress_at_start(folder)
                for line in found:
                    now_s += line.iteration_ms / 1e3
                    progress.add(line, now_s)
                if found:
                    view = render(progress, console.width)
                    if live is None:
                        console.print(view)
                    else:
                        live.update(view, refresh=True)
                    if progress.total is not None and progress.latest.iteration >= progress.total:
                        return
                time.sleep(INTERVAL_S)
            except KeyboardInterrupt:
                return
            except (TypeError, KeyError) as error:
                remedy = "view it with the version that trains"
                raise other_version(folder / BREAKDOWN_FILE, error, remedy) from None
