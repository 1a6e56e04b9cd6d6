"""Writes measurements to files, mostly as one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sparse.errors import writing


def write_text(path: Path, text: str, mode: str = "w") -> None:
    """Writes a file; appends to it with mode `a`.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing("the measurements"), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def write_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes one JSON object a line; None writes nothing.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_row(path: Path | None, row: dict[str, Any]) -> None:
    """Adds one JSON object to a file of `write_rows`; None writes nothing.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        write_text(path, json.dumps(row) + "\n", "a")
