"""Draws the pictures of docs/figures again, from two runs.

    python -m tests.integration.figures DENSE SPARSE

`report.png` is the upper part of their report, in Chromium; `live-view.svg` is a terminal's view
of the second one, at two thirds of its iterations.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_sparse.report import page
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.live import Progress, render
from tests.integration import browser

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
WIDTH, HEIGHT = 1180, 2600
COLUMNS = 100
# Rich's own picture of a terminal, with the reader's fonts: its template loads some from a server.
TERMINAL = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; }}
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


def draw(runs: Sequence[Path], folder: Path) -> None:
    """Writes both pictures.

    Args:
        runs: folders of two runs that have ended.
        folder: for the pictures.
    """
    (folder / "live-view.svg").write_text(live_view(runs[1]), "utf-8")
    with tempfile.TemporaryDirectory() as scratch, browser.opened(Path(scratch)) as tab:
        (written,) = page.run(runs, Path(scratch) / "report.html", None)
        tab.open(written, WIDTH, 900)
        upper = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}
        tab.screenshot(folder / "report.png", upper)


def live_view(run: Path) -> str:
    """The terminal's view of a run at two thirds of its iterations, as SVG."""
    lines = (run / "breakdown.jsonl").read_text("utf-8").splitlines()
    progress, now_s = Progress(run.name, len(lines)), 0.0
    for line in lines[: len(lines) * 2 // 3]:
        iteration = IterationBreakdown.of_line(json.loads(line))
        now_s += iteration.iteration_ms / 1e3
        progress.add(iteration, now_s)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(render(progress, COLUMNS))
    title = f"{progress.name}, iteration {progress.latest.iteration}"
    return console.export_svg(title=title, code_format=TERMINAL, unique_id="view")


if __name__ == "__main__":
    draw([Path(text) for text in sys.argv[1:3]], FOLDER)
