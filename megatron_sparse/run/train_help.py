"""What `train --help` says of groups and keys: Hydra's template calls `groups` and `keys`.

The texts are those of the dataclasses' docstrings, see `config.described`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from megatron_sparse.config import described
from megatron_sparse.config.run import RunConfig

WIDTH = 100
_KEY_COLUMNS = 36
_FREE_GROUPS = {
    "preset": "Settings by a name that says what a user wants: see docs/choosing-density.md.",
    "experiment": "A whole run: keys of several sections.",
}
"""Groups that set keys of several sections."""


def groups(names: Sequence[str], options: Callable[[str], Sequence[str]]) -> str:
    """Each group with its options, and a line about it.

    Args:
        names: of the groups.
        options: of a group.
    """
    summaries = _summaries() | _FREE_GROUPS
    found = [f"{name}: {', '.join(options(name))}\n    {summaries[name]}" for name in sorted(names)]
    return _for_template("\n".join(found))


def keys(composed: DictConfig) -> str:
    """Each key with its value in this configuration, and the first sentence about it.

    Args:
        composed: by Hydra.
    """
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, Mapping)
    lines = [line for key in described.keys(RunConfig) for line in _of(key, values, "")]
    summaries = _summaries()
    for name, section in described.sections(RunConfig).items():
        lines += ["", f"{name}:", f"  # {summaries[name]}"]
        lines += [line for key in described.keys(section) for line in _of(key, values[name], "  ")]
    return _for_template("\n".join(lines))


def _summaries() -> dict[str, str]:
    return {
        name: described.first_sentence(described.summary(section))
        for name, section in described.sections(RunConfig).items()
    }


def _of(key: described.Key, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    flow = yaml.safe_dump(values[key.name], default_flow_style=True, width=10**6)
    head = f"{indent}{key.name}: {flow.removesuffix('...\n').strip()}"
    if len(head) >= _KEY_COLUMNS:
        yield head
        head = ""
    margin = " " * _KEY_COLUMNS
    wrapped = textwrap.wrap(key.line, WIDTH - _KEY_COLUMNS - 2)
    for number, line in enumerate(wrapped):
        yield f"{head if number == 0 else '':{len(margin)}}# {line}"


def _for_template(text: str) -> str:
    """Hydra substitutes names behind a dollar sign."""
    return text.replace("$", "$$")
