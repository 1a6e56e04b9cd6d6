"""docs/reference/configuration.md: every key with its default and a line from its dataclass.

`python -m tests.integration.configuration_page` writes it anew.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from megatron_sparse.config import described
from megatron_sparse.config.run import RunConfig
from megatron_sparse.config.sparse import SparseConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
_HEAD = """\
# Configuration

Every key with its default; together they are the preset
[`safe`](../choosing-density.md#where-to-begin). `megatron-sparse train` and the YAML files under
`configs/` take the sections by their names (`compression.density=0.01`). In Python they are these
dataclasses; `install`, `attach` and `DDPState` take a `SparseConfig`, or as keywords the keys of
its sections `compression` and `scheme` and the other sections whole. A wrong value is a
`ConfigError` that names the key.

`python -m tests.integration.configuration_page` writes this page.
"""
_FULL = """\
## In full

The dataclasses' own texts, on the site.
"""


def page() -> str:
    of_plugin, of_run = described.sections(SparseConfig), described.sections(RunConfig)
    others = {name: section for name, section in of_run.items() if name not in of_plugin}
    return "\n".join(
        [
            _HEAD,
            "## The plugin\n",
            *_section(SparseConfig, ""),
            *(line for name, section in of_plugin.items() for line in _section(section, name)),
            "## A training run\n",
            *_section(RunConfig, ""),
            *(line for name, section in others.items() for line in _section(section, name)),
            _FULL,
            *(f"::: {s.__module__}.{s.__name__}" for s in (*of_plugin.values(), *others.values())),
            "",
        ]
    )


def _section(section: type, name: str) -> Iterator[str]:
    yield f"### {section.__name__}\n"
    yield f"{f'`{name}`. ' if name else ''}{_linked(described.summary(section))}\n"
    keys = list(described.keys(section, f"{name}." if name else ""))
    if keys:
        yield "| key | default | meaning |"
        yield "| --- | --- | --- |"
    for key in keys:
        value = yaml.safe_dump(key.default, default_flow_style=True).removesuffix("...\n").strip()
        yield f"| `{key.name}` | `{value}` | {_linked(key.line)} |"
    if keys:
        yield ""


def _linked(text: str) -> str:
    """With links to the other pages, and without a bar that would end a table's cell."""
    text = text.replace("`|`", "<code>&#124;</code>")
    return re.sub(r"docs/([\w/-]+\.md)", r"[\g<0>](../\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
