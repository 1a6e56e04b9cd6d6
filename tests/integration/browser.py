"""The Chromium that scripts/system_packages.sh installs, headless, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

# Generous: a loaded machine takes many seconds to start a browser.
DEADLINE_S = 120


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser without a tab; the test is skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no chromium: bash scripts/system_packages.sh installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, timeout=1e3 * DEADLINE_S)
        with browser:
            yield browser


def tab_of(browser: Browser, path: Path, width: int, height: int) -> Page:
    """A new tab that has drawn a file, on a screen of that size; a narrow one is a phone's."""
    tab = browser.new_page(viewport={"width": width, "height": height}, is_mobile=width < 600)
    tab.set_default_timeout(1e3 * DEADLINE_S)
    tab.goto(path.resolve().as_uri())
    return tab
