"""The console output of the writing rank during training: a live view or plain lines.

`live` keeps a few lines at the bottom of the terminal. All other output scrolls by above them,
because the process's standard output and error go through rich. The training thread redraws the
view when an iteration ends, at most `FRAMES_PER_S` times a second; the view has no thread of its
own. `plain` prints one line every few iterations, for files and pipes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatron_sparse.recording import BUCKET_STAGES, STEP_STAGES
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.quantities import (
    REST,
    exposed_share,
    ms,
    of_all,
    percent,
    rate,
    size,
    thread_parts,
)

logger = logging.getLogger(__name__)

FRAMES_PER_S = 5
WINDOW = 20
"""Iterations that times are averaged over; times of single iterations vary too much."""
MIN_COLUMNS = 40
_STYLES = {
    "forward_backward": "green",
    "optimizer": "cyan",
    "host_wait": "red",
    "param_wait": "magenta",
    REST: "white",
}
_PHASES = {
    "trial": "trials of presets",
    "warmup": "dense warm-up",
    "ramp": "ramp",
    "target": "at its target",
    "off": "compression off",
}
"""Words for the phases that need no legend."""


class Closable(Protocol):
    """A dashboard, the console's view, or the timeline."""

    def close(self) -> None:
        """Releases what it holds."""


class Isolated[Shown: Closable]:
    """A dashboard, view or timeline whose first exception is logged and turns it off.

    A full disk or a lost network must not end a run of days.

    Args:
        shown: the dashboard, view or timeline.
        name: of it, for the log.
    """

    def __init__(self, shown: Shown, name: str) -> None:
        self.shown = shown
        self._name = name
        self._works = True

    def do(self, act: Callable[[Shown], None]) -> None:
        """Calls `act` with it; does nothing once it has failed."""
        if self._works:
            self._try(act)

    def close(self) -> None:
        """Closes it, even after a failure: it may hold files, threads and the terminal."""
        self._try(lambda shown: shown.close())

    def _try(self, act: Callable[[Shown], None]) -> None:
        try:
            act(self.shown)
        except Exception as error:
            if self._works:
                logger.error(
                    "%s failed and is off for the rest of the run: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )
            self._works = False


class View(Closable, Protocol):
    """Shows the progress of the training; `close` frees the terminal, and may be called twice."""

    def update(self, breakdown: IterationBreakdown) -> None:
        """Called at the end of each iteration."""


class RunProgress:
    """The position of a run, and means over its last iterations.

    Args:
        name: name of the run.
        total: iterations of the whole run; None if unknown.
    """

    def __init__(self, name: str | None, total: int | None) -> None:
        self.name = name or "run"
        self.total = total
        self._last: deque[IterationBreakdown] = deque(maxlen=WINDOW)
        self._ended_s: deque[float] = deque(maxlen=WINDOW + 1)
        self._loss: float | None = None

    def add(self, breakdown: IterationBreakdown, now_s: float) -> None:
        """Adds an iteration that ended at `now_s`."""
        self._last.append(breakdown)
        self._ended_s.append(now_s)
        if breakdown.loss is not None:
            self._loss = breakdown.loss

    @property
    def latest(self) -> IterationBreakdown:
        """The last iteration."""
        return self._last[-1]

    @property
    def iteration_ms(self) -> float:
        """Mean time of an iteration."""
        return self.mean_ms(lambda b: b.iteration_ms)

    def mean_ms(self, of: Callable[[IterationBreakdown], float]) -> float:
        """Mean of the number `of(iteration)` over the last iterations."""
        return sum(of(b) for b in self._last) / len(self._last)

    def stages(self) -> dict[str, float]:
        """The training thread's stages and the rest of the iteration, see `thread_parts`."""
        gathers = bool(self.latest.param_gathers)
        return thread_parts(self._means_ms(STEP_STAGES), self.iteration_ms, gathers=gathers)

    def bucket_stages(self) -> dict[str, float]:
        """The buckets' stages, summed over buckets."""
        return self._means_ms(BUCKET_STAGES)

    def _means_ms(self, stages: Sequence[str]) -> dict[str, float]:
        return {s: self.mean_ms(lambda b, s=s: b.stage_ms[s]) for s in stages}

    def left_s(self) -> float | None:
        """Seconds to the end at the pace of the last iterations, time between them included.

        None before the second iteration, and without a total.
        """
        if self.total is None or len(self._ended_s) < 2:
            return None
        pace_s = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return max(0, self.total - self.latest.iteration) * pace_s

    def place(self) -> str:
        """`120/500, 1:52 left`; no time left is shown for the last iteration."""
        of_all = "" if self.total is None else f"/{self.total}"
        left_s = self.left_s()
        left = "" if not left_s else f", {clock(left_s)} left"
        return f"{self.latest.iteration}{of_all}{left}"

    def facts(self) -> str:
        """Loss, bytes sent of both halves, density, and the phase that explains the density."""
        last = self.latest
        sent = size(last.wire_bytes + last.param_wire_bytes)
        loss = "" if self._loss is None else f"loss {self._loss:.4f}  "
        # A dense run has no target.
        dense = last.phase == "target" and last.density == 1.0
        phase = "nothing left out" if dense else _PHASES[last.phase]
        return (
            f"{loss}wire/dense {percent(last.total_wire_ratio)} ({sent})  "
            f"density {percent(last.density)} ({phase})"
        )

    def traffic(self) -> str:
        """Exposed communication with its parts, and the overlapped time: means."""
        means = self._means_ms(STEP_STAGES)
        share = percent(exposed_share(means, self.iteration_ms))
        figures = {"stage_ms_mean": means, "iteration_ms_mean": self.iteration_ms}
        overlapped = ms(self.mean_ms(lambda b: b.overlapped_ms))
        return f"exposed: {share}, {of_all(figures)}; {overlapped} ms overlapped"

    def pace(self) -> str:
        """Time of an iteration, tokens per second, and the estimate of dense, where known."""
        speed = rate(self.latest.tokens_per_s, self.latest.model_tflop_per_s)
        known_ms = [b.dense_iteration_ms for b in self._last if b.dense_iteration_ms is not None]
        dense = f"dense: about {ms(sum(known_ms) / len(known_ms))} ms" if known_ms else ""
        count = len(self._last)
        over = "so far" if count == 1 else f"mean of the last {count}"
        first = f"an iteration takes {ms(self.iteration_ms)} ms, {over}"
        return "  ".join(filter(None, (first, speed, dense)))


def clock(seconds: float) -> str:
    """`1:52`, `2:03:04`, `3d 04:05`.

    Example:
        >>> [clock(112), clock(7384), clock(3 * 86400 + 14700)]
        ['1:52', '2:03:04', '3d 04:05']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class LiveView:
    """The view that redraws itself, see the module's docstring.

    Args:
        progress: the run's progress.
        console: a terminal; None takes standard output.
    """

    def __init__(self, progress: RunProgress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._logs: list[tuple[logging.StreamHandler, IO[str]]] = []
        self._drawn_s = 0.0

    def update(self, breakdown: IterationBreakdown) -> None:
        """Adds an iteration; redraws unless the last drawing is very recent."""
        now_s = time.perf_counter()
        self._progress.add(breakdown, now_s)
        if now_s - self._drawn_s >= 1 / FRAMES_PER_S:
            self._drawn_s = now_s
            self._draw()

    def close(self) -> None:
        """Draws the last iteration and leaves it on the screen."""
        live, self._live = self._live, None
        if live is not None:
            live.update(self.render(), refresh=True)
            live.stop()
            for handler, stream in self._logs:
                handler.setStream(stream)
            self._console.print()

    def render(self) -> RenderableType:
        """The view as it is now."""
        return render(self._progress, self._console.width)

    def _draw(self) -> None:
        if self._live is None:
            # Only from the first iteration on, so that Megatron's earlier output stays as it is.
            self._live = Live(console=self._console, auto_refresh=False)
            before = sys.stdout, sys.stderr
            self._live.start()
            self._logs = _redirect_logs(before)
            # A killed rank could not show a hidden cursor again.
            self._console.show_cursor(True)
        self._live.update(self.render(), refresh=True)


def _redirect_logs(before: tuple[IO[str], IO[str]]) -> list[tuple[logging.StreamHandler, IO[str]]]:
    """Points log handlers at today's standard output and error: they keep their first stream.

    Args:
        before: standard output and error when the handlers were made.

    Returns:
        The handlers and their old streams.
    """
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    moved = []
    for found in loggers:
        for handler in getattr(found, "handlers", []):  # a placeholder has none
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                now = sys.stdout if handler.stream is before[0] else sys.stderr
                moved.append((handler, handler.stream))
                handler.setStream(now)
    return moved


def render(progress: RunProgress, columns: int) -> RenderableType:
    """The live view.

    Args:
        progress: progress with at least one iteration.
        columns: width of the terminal; below `MIN_COLUMNS` there are no bars.
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
    if columns >= MIN_COLUMNS:
        stages.add_column(ratio=1)
    for stage, time_ms in progress.stages().items():
        share = time_ms / iteration_ms if iteration_ms else 0.0
        row: list[RenderableType] = [stage, f"{ms(time_ms)} ms", f"{share:.0%}"]
        if columns >= MIN_COLUMNS:
            style = _STYLES[stage]
            row.append(
                ProgressBar(total=1, completed=share, complete_style=style, finished_style=style)
            )
        stages.add_row(*row)
    inside = "  ".join(f"{stage} {ms(t)}" for stage, t in progress.bucket_stages().items() if t)
    return Group(
        Rule(style="dim"),
        head,
        Text(progress.facts()),
        Text(progress.pace(), style="dim"),
        stages,
        Text(progress.traffic()),
        Text(f"buckets, ms: {inside}" if inside else "no bucket yet", style="dim"),
    )


class PlainView:
    """Prints one line every `every` iterations, and none if `every` is 0.

    Args:
        progress: the run's progress.
        every: iterations between lines.
        file: output file; None takes standard output.
    """

    def __init__(self, progress: RunProgress, every: int, file: IO[str] | None = None) -> None:
        self._progress = progress
        self._every = every
        self._file = file

    def update(self, breakdown: IterationBreakdown) -> None:
        """Adds an iteration; prints a line if it is due."""
        self._progress.add(breakdown, time.perf_counter())
        if self._every and breakdown.iteration % self._every == 0:
            parts = " + ".join(f"{stage} {ms(t)}" for stage, t in self._progress.stages().items())
            print(
                f"{self._progress.name}: {self._progress.place()}  {self._progress.facts()}  "
                f"{ms(self._progress.iteration_ms)} ms = {parts}",
                file=self._file or sys.stdout,
                flush=True,
            )

    def close(self) -> None:
        """Does nothing."""


def open_view(
    console: str, name: str | None, total: int | None, every: int, stream: IO[str] | None = None
) -> Isolated[View] | None:
    """The view that `tracking.console` asks for.

    Args:
        console: `tracking.console`; `auto` checks whether `stream` is a terminal that can move its
            cursor.
        name: name of the run.
        total: iterations of the run; None if unknown.
        every: `tracking.sample_every`, for plain lines.
        stream: output stream; None takes standard output.

    Returns:
        The view; None for `off`.
    """
    if console == "off":
        return None
    out: IO[str] = sys.stdout if stream is None else stream
    if console == "auto":
        moves = out.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        console = "live" if moves else "plain"
    progress = RunProgress(name, total)
    view: View
    if console == "plain":
        view = PlainView(progress, every, out)
    else:
        view = LiveView(progress, Console(file=out, highlight=False))
    return Isolated(view, "the console view")
