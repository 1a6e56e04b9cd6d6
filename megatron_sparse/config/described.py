"""Every key of a run with its default and its meaning, from the docstrings of the dataclasses.

`train --help` shows a line of each; docs/reference/configuration.md the whole.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

_ENTRY = re.compile(r"^    (\w+): (.*)")
_SENTENCE = re.compile(r"(.+?)(?:(?<!e\.g)(?<!i\.e)\.|;)(?= |$)")


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: as the command line takes it.
        default: its value where nothing sets it.
        text: what its dataclass says of it.
    """

    name: str
    default: Any
    text: str

    @property
    def line(self) -> str:
        """The first sentence of `text`."""
        return first_sentence(self.text)


def first_sentence(text: str) -> str:
    """Up to the first full stop or semicolon; all of a text without one.

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
    """What a dataclass' docstring says of each attribute, each in one line.

    Example:
        >>> sorted(attributes(Key))
        ['default', 'name', 'text']
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
            break
        else:
            found[name] += f" {line.strip()}"
    return found


def keys(section: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a section, in its order, without those of sections in it.

    Args:
        section: a dataclass of the configuration.
        prefix: such as `compression.`.
    """
    texts, inner = attributes(section), sections(section)
    made = section()
    for field in dataclasses.fields(section):
        if field.name not in inner:
            yield Key(prefix + field.name, getattr(made, field.name), texts[field.name])


def sections(section: type) -> dict[str, type]:
    """The dataclasses in a dataclass, by their names in it."""
    hints = get_type_hints(section)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(section)
        if dataclasses.is_dataclass(hints[field.name])
    }
