"""The console and the tables of the doctor: they show every remedy whole."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

UNBOUNDED = 10_000
"""Columns where there is no terminal; no cell is that wide."""


def console() -> Console:
    """A console on standard output.

    Without a terminal, lines are as long as their texts: a pipe or a file has no width, and rich
    would assume 80 columns. COLUMNS in the environment sets another width.
    """
    made = Console()
    if made.is_terminal or "COLUMNS" in os.environ:
        return made
    return Console(width=UNBOUNDED)


def table(title: str, *headers: str) -> Table:
    """An empty table that breaks long words and cuts none.

    Example:
        >>> [column.overflow for column in table("found", "part", "remedy").columns]
        ['fold', 'fold']
    """
    made = Table(title=title)
    for header in headers:
        made.add_column(header, overflow="fold")
    return made
