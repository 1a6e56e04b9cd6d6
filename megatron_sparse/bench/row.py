"""A bench's row, declared once: each field carries its meaning and its column of the table."""

from __future__ import annotations

import re
from dataclasses import Field, asdict, field
from typing import Any, ClassVar

_COLUMN = "column"


class Columns:
    """A table's columns, declared once: the header and every line follow from them.

    Args:
        text: `attribute format title`, columns separated by `|`; a title that is left out is the
            attribute. A format has a width, such as `>10.1f` or `<14`. `a/b` in place of an
            attribute is a ratio of two, or of one and a number.
        gap: between two columns.

    Attributes:
        header: the line above the table.

    Example:
        >>> columns = Columns("bytes >8 size(B) | time_us >9.1f time(us)")
        >>> columns.header
        '#size(B)  time(us)'
    """

    def __init__(self, text: str, gap: str = " ") -> None:
        self._gap, self._columns = gap, []
        titles = []
        for column in text.split("|"):
            attribute, spec, *title = column.split(maxsplit=2)
            found = re.match(r"([<>])[+]?(\d+)", spec)
            assert found is not None, f"{spec} has no width"
            blank = found[1] + found[2]
            self._columns.append((attribute, spec, blank))
            titles.append(format((title or [attribute])[0].strip(), blank))
        # A left-aligned first column stands behind the header's #.
        self._begin = "  " if self._columns[0][2].startswith("<") else ""
        self.header = "#" + (self._begin + gap.join(titles).rstrip())[1:]

    def line(self, row: object) -> str:
        """A row's line; `-` for None. Noisy rows say how much of the machine others took."""
        cells = []
        for attribute, spec, blank in self._columns:
            value = _value(row, attribute)
            cells.append(format("-", blank) if value is None else format(value, spec))
        noise = f"  noisy: {row.foreign_load:.0%}" if getattr(row, "noisy", False) else ""  # type: ignore[attr-defined]
        return self._begin + self._gap.join(cells).rstrip() + noise


def _value(row: object, expression: str) -> Any:
    first, *below = expression.split("/")
    value = getattr(row, first)
    for part in below:
        value = ratio(value, float(part) if part[0].isdigit() else getattr(row, part))
    return value


def ratio(above: float | None, below: float | None) -> float | None:
    """`above / below`; None where either is missing or `below` is 0."""
    return None if above is None or not below else above / below


def cell(meaning: str, column: str = "", **default: Any) -> Any:
    """A field of a `CellRow`.

    Args:
        meaning: in words, for the reader of the class; `null` stands for None.
        column: format and title, as in `Columns`; empty for a field that only JSON has. Columns
            before or after it, such as ratios, are written with their attribute and a `|`.
        default: `default`, as of `dataclasses.field`.

    Example:
        >>> cell("of a call", ">9.1f time(us) | time_us/copy_us >6.2f ratio").metadata["meaning"]
        'of a call'
    """
    return field(metadata={"meaning": meaning, _COLUMN: column}, **default)


def optional(meaning: str, column: str = "") -> Any:
    """A cell that is null unless it is given, or measured later."""
    return cell(meaning, column, default=None)


class CellRow:
    """A dataclass of cells: a line of a table, with columns in the order of the fields, and JSON.

    A class whose columns have another order declares `COLUMNS` itself.

    Args:
        gap: between two columns.
    """

    COLUMNS: ClassVar[Columns]

    def __init_subclass__(cls, gap: str = " ") -> None:
        columns = []
        for name, cell in vars(cls).items():
            text = cell.metadata.get(_COLUMN, "") if isinstance(cell, Field) else ""
            if text:
                columns.append(f"{name} {text}" if text[0] in "<>" else text)
        if columns:
            cls.COLUMNS = Columns("|".join(columns), gap)

    @property
    def bad(self) -> bool:
        """Whether the bench fails because of this row: a result is wrong, or misses its target."""
        return bool(getattr(self, "wrong", 0))

    def line(self) -> str:
        """The table's line."""
        return self.COLUMNS.line(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)  # type: ignore[call-overload] - subclasses are dataclasses
