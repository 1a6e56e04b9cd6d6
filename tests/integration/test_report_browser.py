"""The report in a real browser: on a desktop, on a phone, on paper.

scripts/system_packages.sh installs Chromium, as in CI.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from megatron_sparse.report import page
from tests.integration import browser, figures
from tests.report_runs import make_run

DESK, PHONE = (1280, 900), (360, 740)
# Elements that are wider than the screen, except inside a part that scrolls by itself.
TOO_WIDE = """
[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest('.scroll'))
  .map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40))
"""
LONG = "a_run_whose_name_has_no_place_to_break_" * 4


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """A page of two runs: one with a name that cannot be wrapped, and one that still runs."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        make_run(folder / "first", "first", config={"data": {"dir": "data/" + "deep/" * 40}}),
        make_run(folder / "second", LONG, density=0.05, ends=False, plan=False, delays=False),
    ]
    return page.run(runs, [folder / "report.html"])[0]


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.opened() as chromium:
        yield chromium


@pytest.fixture
def tab_on(chromium, report) -> Callable[..., browser.Page]:
    """Shows the report on a screen of this size."""
    return partial(browser.tab_of, chromium, report)


@pytest.mark.parametrize("screen", [DESK, PHONE])
def test_it_fits(tab_on, screen):
    tab = tab_on(*screen)
    width = screen[0]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(TOO_WIDE) == []
    shot = pixels(tab.screenshot(full_page=True))
    assert shot.shape[1] == width
    assert share(shot, shot[1, 1]) > 0.5, "most of the page is paper"


@pytest.mark.parametrize("screen", [DESK, PHONE])
def test_every_chart_shows_data_and_text_large_enough(tab_on, screen):
    tab = tab_on(*screen)
    boxes = tab.evaluate(
        "[...document.querySelectorAll('figure svg')].map(e => {const b = "
        "e.getBoundingClientRect(); return {x: b.x, y: b.y + scrollY, width: b.width, "
        "height: b.height}})"
    )
    assert len(boxes) == 8
    whole = pixels(tab.screenshot(full_page=True))
    for box in boxes:
        assert box["width"] >= 300
        x, y, width, height = (int(box[key]) for key in ("x", "y", "width", "height"))
        drawn = 1 - share(whole[y : y + height, x : x + width], whole[1, 1])
        assert 0.005 < drawn < 0.9, "a chart is blank, or nothing but colour"
    heights = tab.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(e => {const m = e.getScreenCTM();"
        "return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(m.a, m.b)})"
    )
    # Of a phone's pixels, which are 1/160 of an inch: 9 of them are 1.4 mm.
    assert min(heights) >= 9


def test_charts_of_two_runs_share_a_row(tab_on):
    tops = tab_on(*DESK).evaluate(
        "Object.fromEntries([...document.querySelectorAll('figure')]"
        ".map(e => [e.id, e.getBoundingClientRect().top]))"
    )
    pairs = [(name, f"{name[:-1]}b") for name in tops if name.endswith("-a")]
    pairs = [(first, second) for first, second in pairs if second in tops]
    assert len(pairs) == 2
    assert all(tops[first] == tops[second] for first, second in pairs), tops


def test_only_the_page_itself_is_requested(tab_on, report):
    tab, requested = tab_on(*DESK), set()
    tab.on("request", lambda request: requested.add(request.url))
    tab.reload()
    assert requested == {report.resolve().as_uri()}
    assert tab.evaluate("document.scripts.length") == 0


def test_it_prints_on_a4(tab_on):
    tab = tab_on(*DESK)
    pdf = tab.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF")
    boxes = {tuple(map(float, b.split())) for b in re.findall(rb"/MediaBox \[([^\]]+)\]", pdf)}
    (box,) = boxes
    # A4 in points; Chromium rounds to pixels of 1/96 inch.
    assert box[2:] == pytest.approx((595.3, 841.9), abs=1)
    pages = pdf.count(b"/Type /Page\n")
    assert 2 <= pages <= 10
    # With a wide table Chromium would shrink all pages until it fits.
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 703, "height": 1000})  # 210 mm less the margins
    assert tab.evaluate("document.documentElement.scrollWidth") <= 703


def pixels(png: bytes) -> np.ndarray:
    """Of a PNG: uint8 [height, width, 3]."""
    from matplotlib import image

    return (image.imread(BytesIO(png))[..., :3] * 255).round().astype("uint8")


def share(of: np.ndarray, colour: Sequence[int] | np.ndarray) -> float:
    """Of some pixels that have this colour."""
    return float((of == colour).all(axis=-1).mean())


def test_the_pictures_of_the_docs_are_drawn_again(chromium, tmp_path):
    runs = [make_run(tmp_path / "dense", "dense", density=1.0), make_run(tmp_path / "thin", "thin")]
    figures.draw(chromium, runs, tmp_path)
    shot = pixels((tmp_path / "report.png").read_bytes())
    assert shot.shape[1] == figures.WIDTH
    assert 0.5 < share(shot, shot[figures.HEIGHT - 1, figures.WIDTH - 1]) < 0.97
    view = (tmp_path / "live-view.svg").read_text("utf-8")
    assert "thin,&#160;iteration&#160;8" in view
    assert "http" not in view.replace("http://www.w3.org", "")
