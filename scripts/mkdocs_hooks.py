"""mkdocs hooks: pages from outside of docs/, and links that work on the site and in the source.

README, CONTRIBUTING and CHANGELOG are at the top of the repository, where readers look for them;
the site shows them as pages. Links from page to page are adapted. A link to a file that is not a
page (a source, an example) is replaced by its text, because the site contains no sources.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from the top of the repository."""
    for source, page in TOP_PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapts the links of a page, except in code."""
    here = page.file.src_uri
    sources = {target: source for source, target in TOP_PAGES.items()}
    source_dir = os.path.dirname(sources.get(here, f"docs/{here}"))

    def adapted(match: re.Match[str]) -> str:
        """The link with a target that works on the site; its text alone if the site lacks it."""
        picture, text, target, anchor = match.groups(default="")
        if "://" in target:
            return match[0]
        in_repository = os.path.normpath(os.path.join(source_dir, target))
        in_site = TOP_PAGES.get(in_repository, in_repository.removeprefix("docs/"))
        if files.get_file_from_path(in_site) is None:
            # A link to a missing file stays as it is, so that mkdocs reports it.
            return text if (ROOT / in_repository).exists() else match[0]
        return (
            f"{picture}[{text}]({os.path.relpath(in_site, os.path.dirname(here) or '.')}{anchor})"
        )

    parts = _CODE.split(markdown)  # every second part is code
    return "".join(part if i % 2 else _LINK.sub(adapted, part) for i, part in enumerate(parts))
