"""Draws the pictures of docs/figures again, from two runs.

    python -m tests.integration.figures DENSE SPARSE

`report.png` is the upper part of their report, in Chromium; `live-view.svg` is a terminal's view
of the second one, at two thirds of its iterations.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_sparse.report import live_view, page
from tests.integration import browser

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
WIDTH, HEIGHT = 1180, 2600


def draw(chromium: browser.Browser, runs: Sequence[Path], folder: Path) -> None:
    """Writes both pictures.

    Args:
        chromium: draws the report.
        runs: folders of two runs that have ended.
        folder: for the pictures.
    """
    iterations = live_view.progress_of(runs[1], None).latest.iteration
    progress = live_view.progress_of(runs[1], iterations * 2 // 3)
    live_view.picture(progress, live_view.PICTURE_COLUMNS, folder / "live-view.svg")
    with tempfile.TemporaryDirectory() as scratch:
        (written,) = page.run(runs, Path(scratch) / "report.html", None)
        tab = browser.tab_of(chromium, written, WIDTH, HEIGHT)
        tab.screenshot(path=folder / "report.png")


if __name__ == "__main__":
    with browser.opened() as chromium:
        draw(chromium, [Path(text) for text in sys.argv[1:3]], FOLDER)
