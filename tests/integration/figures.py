"""Draws the pictures of docs/figures again, from two runs.

    python -m tests.integration.figures DENSE SPARSE

`report.png` is the upper part of their report, in Chromium; `live-view.svg` is a terminal's view
of the second one, at two thirds of its iterations.
"""

import io
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_sparse.report import live_view, page
from megatron_sparse.report.run_data import load_breakdown
from tests.integration import browser

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
WIDTH, HEIGHT = 1180, 2185
COLUMNS = 100


def draw(chromium: browser.Browser, runs: Sequence[Path], folder: Path) -> None:
    """Writes both pictures: chromium draws the report of two runs that have ended."""
    lines, _ = load_breakdown(runs[1], [])
    progress = live_view.progress_after(runs[1], lines[: len(lines) * 2 // 3])
    console = Console(
        record=True,
        file=io.StringIO(),
        width=COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(live_view.render(progress))
    title = f"{progress.name}, iteration {progress.latest.iteration}"
    # Without rich's name, and its font, which a browser would load from a server.
    drawn = console.export_svg(title=title, unique_id="view")
    svg = re.sub(r"<!--.*?-->|@font-face {.*?}", "", drawn, flags=re.DOTALL)
    (folder / "live-view.svg").write_text(svg, "utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        (written,) = page.run(runs, [Path(scratch) / "report.html"])
        tab = browser.tab_of(chromium, written, WIDTH, HEIGHT)
        tab.screenshot(path=folder / "report.png")


if __name__ == "__main__":
    with browser.opened() as chromium:
        draw(chromium, [Path(text) for text in sys.argv[1:3]], FOLDER)
