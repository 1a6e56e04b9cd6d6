"""The documentation site: no warnings, no network, an entry for each public name."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import megatron_sparse
from tests.integration import browser
from tests.programs import ROOT, output_of, with_variables


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, built as in CI, by a process that has no network."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    output_of(command, env=with_variables(https_proxy=nowhere, http_proxy=nowhere))
    return folder


def names_on(page: Path) -> set[str]:
    """The ids of the page's headings, one for each documented name."""
    return set(re.findall(r'<h[1-6] id="([^"]+)"', page.read_text("utf-8")))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//'
    )
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text("utf-8")), page.relative_to(site)


# Tables that are wider than the part of the page that shows them, or scrolls them on a phone.
CUT = """
[...document.querySelectorAll('article table')]
  .filter(e => !e.closest('.highlight'))
  .map(e => [e.closest('.md-typeset__scrollwrap'), e.scrollWidth])
  .filter(([box, width]) => !box || width > (SCROLLS ? box.scrollWidth : box.clientWidth)).length
"""


@pytest.mark.parametrize(
    ("width", "scrolls"), [pytest.param(1280, False, marks=pytest.mark.slow), (360, True)]
)
def test_no_table_is_cut(site: Path, width: int, scrolls: bool) -> None:
    pages = sorted(site.rglob("index.html"))
    with browser.opened() as chromium:
        for page in pages:
            with browser.tab_of(chromium, page, width, 900) as tab:
                assert tab.evaluate(CUT.replace("SCROLLS", str(scrolls).lower())) == 0, page
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, page
    assert len(pages) > 30


def test_every_public_name_has_an_entry(site: Path) -> None:
    api = names_on(site / "reference/api/index.html")
    configuration = names_on(site / "reference/configuration/index.html")
    for name in megatron_sparse.__all__:
        assert f"megatron_sparse.{name}" in api or name.lower() in configuration, name


def test_the_pages_of_the_top_and_their_links_are_there(site: Path) -> None:
    front = (site / "index.html").read_text("utf-8")
    assert 'href="results/testbed/"' in front
    assert 'src="figures/live-view.svg"' in front
    assert 'href="../design/#where-things-are"' in (site / "contributing/index.html").read_text()
    assert (site / "changelog/index.html").exists()


def test_the_navigation_has_the_sections_of_the_readme() -> None:
    # mkdocs.yml holds no tags, so the safe loader reads it.
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    nav = {title: pages for entry in settings["nav"] for title, pages in entry.items()}
    readme = (ROOT / "README.md").read_text("utf-8").partition("\n## Read on\n")[2]
    sections = {}
    for paragraph in readme.strip().split("\n\n"):
        title, _, links = paragraph.partition(": ")
        pages = re.findall(r"\]\(docs/([^)#]+\.md)\)", links)
        if pages and links.startswith("["):
            sections[title] = pages
    assert len(sections) >= 6
    for title, pages in sections.items():
        # The README names the first pages to read, in the navigation's order.
        assert [page for page in nav[title] if page in pages] == pages, title
