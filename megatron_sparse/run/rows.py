"""Rows of measurements, which are printed as lines of a table and written as JSON objects.

A row's class (`CellRow`) declares each field once, by `cell`: its meaning, and its column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import Field, asdict, field
from pathlib import Path
from typing import Any, ClassVar

from megatron_sparse.errors import writing

_COLUMN = "column"
MOST_FOREIGN_LOAD = 0.1
"""Share of the machine; if other programs use more, a measurement is marked as noisy."""


class Columns:
    """A table's columns, declared once: the header and every line follow from them.

    Args:
        text: `attribute format title`, columns separated by `|`. Without a title, the attribute is
            the title. A format has a width, such as `>10.1f` or `<14`. In place of an attribute,
            `a/b` is the ratio of two attributes, or of an attribute and a number.

    Attributes:
        header: the line above the table; it begins with `#`.

    Example:
        >>> columns = Columns("bytes >8 size(B) | time_us >9.1f time(us)")
        >>> columns.header
        '#size(B)  time(us)'
    """

    def __init__(self, text: str) -> None:
        self._columns = []
        titles = []
        for column in text.split("|"):
            attribute, spec, *title = column.split(maxsplit=2)
            found = re.match(r"([<>])[+]?(\d+)", spec)  # + prints a number's sign
            assert found is not None, f"{spec} has no width"
            text_spec = found[1] + found[2]  # alignment and width, for a title or a `-`
            self._columns.append((attribute, spec, text_spec))
            titles.append(format((title or [attribute])[0].strip(), text_spec))
        # The # replaces the header's first character: a left-aligned first title is indented.
        self._indent = "  " if self._columns[0][2].startswith("<") else ""
        self.header = "#" + (self._indent + " ".join(titles).rstrip())[1:]

    def line(self, row: object) -> str:
        """The line of a row, indented like the header; a value of None is printed as `-`."""
        cells = []
        for attribute, spec, text_spec in self._columns:
            value = _value(row, attribute)
            cells.append(format("-", text_spec) if value is None else format(value, spec))
        return self._indent + " ".join(cells).rstrip()


def _value(row: object, expression: str) -> Any:
    """A row's attribute, or the ratio `a/b`; None if one of the two is None or `b` is 0."""
    first, *divisors = expression.split("/")
    value = getattr(row, first)
    for name in divisors:
        divisor = float(name) if name[0].isdigit() else getattr(row, name)
        value = None if value is None or not divisor else value / divisor
    return value


def cell(meaning: str, column: str = "", **default: Any) -> Any:
    """Declares a field of a `CellRow`.

    Args:
        meaning: what the field is, in words; `null` stands for None.
        column: the column's `format title`, see `Columns`; empty for a field that only JSON has.
            Further columns, such as ratios, follow after `|`: `attribute format title`.
        default: none, or the argument `default` of `dataclasses.field`.

    Example:
        >>> cell("of a call", ">9.1f time(us) | time_us/copy_us >6.2f ratio").metadata["meaning"]
        'of a call'
    """
    return field(metadata={"meaning": meaning, _COLUMN: column}, **default)


def optional(meaning: str, column: str = "") -> Any:
    """A cell that is null unless it is given, or measured later."""
    return cell(meaning, column, default=None)


class CellRow:
    """A dataclass of cells: a line of a table, columns in the order of the fields, and JSON."""

    COLUMNS: ClassVar[Columns]

    def __init_subclass__(cls) -> None:
        """Makes `COLUMNS` from the cells that the subclass itself declares, if it has any.

        A cell's text that begins with a format lacks the attribute, which is the field's name.
        """
        columns = []
        for name, cell in vars(cls).items():
            text = cell.metadata.get(_COLUMN, "") if isinstance(cell, Field) else ""
            if text:
                columns.append(f"{name} {text}" if text[0] in "<>" else text)
        if columns:
            cls.COLUMNS = Columns("|".join(columns))

    @property
    def bad(self) -> bool:
        """Whether the bench fails because of this row: a result is wrong, or misses its target."""
        return bool(getattr(self, "wrong", 0))

    @property
    def load_note(self) -> str:
        """How much of the machine other programs took, if that was too much; else empty."""
        share = getattr(self, "foreign_load", None) or 0.0
        return f"  noisy: {share:.0%}" if share > MOST_FOREIGN_LOAD else ""

    def line(self) -> str:
        """The table's line."""
        return self.COLUMNS.line(self) + self.load_note

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)  # type: ignore[call-overload] - subclasses are dataclasses


def print_table[Row: CellRow](rows: Iterable[Row], json_path: Path | None) -> list[Row]:
    """Prints each row and appends it to a JSON lines file as soon as it is measured; returns all.

    So a sweep that is stopped leaves the rows that it has measured.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_rows(json_path, [])  # empties the file
    done: list[Row] = []
    for row in rows:
        if not done:
            print(row.COLUMNS.header)
        print(row.line(), flush=True)
        done.append(row)
        write_rows(json_path, [row.to_dict()], "a")
    if any(row.load_note for row in done):
        print(
            "# noisy: other programs used so much of the machine meanwhile; measure again",
            flush=True,
        )
    return done


def write_rows(path: Path | None, rows: Iterable[dict[str, Any]], mode: str = "w") -> None:
    """Writes one JSON object a line; a `path` of None writes nothing; mode `a` appends.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        with writing("the measurements"), path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
