"""Every key of a run with its default and its meaning, from the docstrings of the dataclasses.

A section is a dataclass of the configuration, and its fields are keys. A config group is a folder
of `configs/`; the YAML files in it are its options, of which Hydra takes one.

`train --help` shows a sentence about each, from `groups_help` and `keys_help`, which Hydra's
template calls; docs/reference/configuration.md shows everything. `flat` and `canonical` make keys
and values of a configuration, for tables that compare runs.
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import yaml

from megatron_sparse.config.run import RunConfig

_ENTRY = re.compile(r"^    (\w+): (.*)")
_SENTENCE = re.compile(r"(.+?)(?:(?<!e\.g)(?<!i\.e)\.|;)(?= |$)")

WIDTH = 100
_KEY_COLUMNS = 36
_FREE_GROUPS = {
    "preset": "Settings by a name that says what a user wants: see docs/choosing-density.md.",
    "experiment": "A whole run: keys of several sections.",
}
"""Groups that set keys of several sections."""


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: as the command line takes it.
        default: its value where nothing sets it.
        type: in words.
        line: the first sentence of what its dataclass says of it.
    """

    name: str
    default: Any
    type: str
    line: str


def first_sentence(text: str) -> str:
    """The text up to its first semicolon or full stop, if any; `e.g.` and `i.e.` do not count.

    Example:
        >>> first_sentence("any flag, e.g. `seed`. Not ours.")
        'any flag, e.g. `seed`.'
    """
    found = _SENTENCE.match(text)
    return text if found is None else f"{found[1]}."


def summary(section: type) -> str:
    """The first line of a dataclass' docstring."""
    return (inspect.getdoc(section) or "").partition("\n")[0]


def attributes(section: type) -> dict[str, str]:
    """Reads the section `Attributes` of a dataclass' docstring: name -> description on one line.

    Example:
        >>> sorted(attributes(Key))
        ['default', 'line', 'name', 'type']
    """
    found: dict[str, str] = {}
    name = ""
    _, _, block = (inspect.getdoc(section) or "").partition("\nAttributes:\n")
    for line in block.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif not line.startswith(" "):
            break  # an empty line, or the next part of the docstring
        else:
            found[name] += f" {line.strip()}"
    return found


def keys(section: type, prefix: str = "") -> Iterator[Key]:
    """A section's keys in the order of its fields, without those of sections nested in it.

    Their names begin with `prefix`, such as `compression.`.
    """
    texts, inner_sections = attributes(section), sections(section)
    defaults = section()
    for field in dataclasses.fields(section):
        if field.name not in inner_sections:
            yield Key(
                prefix + field.name,
                getattr(defaults, field.name),
                str(field.type).replace(" | None", " or null"),
                first_sentence(texts[field.name]),
            )


def every_key() -> dict[str, Key]:
    """Every key of a run by its name, such as `compression.density`."""
    found = list(keys(RunConfig))
    for name, section in sections(RunConfig).items():
        found += keys(section, f"{name}.")
    return {key.name: key for key in found}


def sections(section: type) -> dict[str, type]:
    """The fields of a dataclass that are dataclasses themselves: name of the field -> class."""
    hints = get_type_hints(section)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(section)
        if dataclasses.is_dataclass(hints[field.name])
    }


def groups_help(names: Sequence[str], options: Callable[[str], Sequence[str]]) -> str:
    """Two lines of `train --help` for each of Hydra's config groups: its options, its subject.

    `options` maps the name of a group to the names of its options.
    """
    summaries = _summaries() | _FREE_GROUPS
    entries = []
    for name in sorted(names):
        entries.append(f"{name}: {', '.join(options(name))}\n    {summaries[name]}")
    return _for_template("\n".join(entries))


def keys_help(values: Mapping[str, Any]) -> str:
    """The lines of `train --help` about keys: each with its value and a sentence about it.

    `values` is the composed configuration: key -> value, with a mapping for each section.
    """
    lines: list[str] = []
    for key in keys(RunConfig):
        lines += _lines_of(key, values, "")
    summaries = _summaries()
    for name, section in sections(RunConfig).items():
        lines += ["", f"{name}:", f"  # {summaries[name]}"]
        for key in keys(section):
            lines += _lines_of(key, values[name], "  ")
    # Dollar signs are doubled: Hydra's template replaces names behind a single one.
    return _for_template("\n".join(lines))


def _summaries() -> dict[str, str]:
    return {name: first_sentence(summary(section)) for name, section in sections(RunConfig).items()}


def _lines_of(key: Key, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    """A key's lines in the help: `key: value`, and its first sentence as a wrapped comment.

    `values` are those of its section, by key; `indent` is the spaces before the key.
    """
    # On one line; YAML ends a document that is a single value with `...`.
    value = yaml.safe_dump(values[key.name], default_flow_style=True, width=10**6)
    head = f"{indent}{key.name}: {value.removesuffix('...\n').strip()}"
    # A long head gets a line of its own, above the comment.
    if len(head) >= _KEY_COLUMNS:
        yield head
        head = ""
    yield from textwrap.wrap(
        key.line,
        WIDTH,
        initial_indent=f"{head:{_KEY_COLUMNS}}# ",
        subsequent_indent=f"{'':{_KEY_COLUMNS}}# ",
    )


def _for_template(text: str) -> str:
    """Hydra substitutes names behind a dollar sign."""
    return text.replace("$", "$$")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested sections to keys with dots; an empty mapping stays a value.

    Example:
        >>> flat({"scheme": {"name": "direct", "options": {}}, "name": "x"})
        {'scheme.name': 'direct', 'scheme.options': {}, 'name': 'x'}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def canonical(value: object) -> str:
    """A configuration value as text, to show or compare it: a string unchanged, else JSON.

    Example:
        >>> canonical(None), canonical([1, 2]), canonical("x")
        ('null', '[1, 2]', 'x')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)
