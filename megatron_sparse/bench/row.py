"""A bench's row, declared once: each field carries its meaning and its column of the table."""

from __future__ import annotations

from dataclasses import Field, field
from typing import Any

from megatron_sparse.bench.table import Columns, TableRow

_COLUMN = "column"


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


class CellRow(TableRow):
    """A dataclass of cells: a line of a table, with columns in the order of the fields, and JSON.

    Args:
        gap: between two columns.
    """

    def __init_subclass__(cls, gap: str = " ") -> None:
        columns = []
        for name, cell in vars(cls).items():
            text = cell.metadata.get(_COLUMN, "") if isinstance(cell, Field) else ""
            if text:
                columns.append(f"{name} {text}" if text[0] in "<>" else text)
        cls.COLUMNS = Columns("|".join(columns), gap)
