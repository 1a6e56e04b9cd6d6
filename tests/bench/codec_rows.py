"""What the tests of `bench prune` and `bench codecs` ask of rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

type Row = dict[str, Any]


def is_timed(row: Row, *more: str) -> bool:
    """It is right, and its times are positive; `more` names further ones."""
    fields = ("time_us", "copy_us", "ratio", *more)
    return row["wrong"] == 0 and all(row[f] > 0 and math.isfinite(row[f]) for f in fields)


def printed_and_written(
    run: Callable[[Path], list[Row]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[Row]:
    """The rows of a bench, which are also printed and in its file; torch's threads stay."""
    path, threads = folder / "rows.jsonl", torch.get_num_threads()
    rows = run(path)
    assert torch.get_num_threads() == threads
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    printed = capsys.readouterr().out.splitlines()
    assert "#wrong" in printed[1]
    assert len(printed) == 2 + len(rows)
    return rows
