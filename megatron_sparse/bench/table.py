"""What every bench has in common: rows, threads, a copy to compare with, the table, others' load.

A row is declared once: each field carries its meaning and its column of the table. `copy` copies
half the bytes that an operation moves: it reads as many as it writes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import Field, asdict, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from megatron_sparse.bench.options import Options
from megatron_sparse.cuda_ext import ops
from megatron_sparse.extras import require
from megatron_sparse.run.json_lines import append_row, write_rows
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.version import __version__

MOST_FOREIGN_LOAD = 0.1
"""Share of the machine; if other programs use more, a measurement is marked as noisy."""
_COLUMN = "column"

type Action = Callable[[], object]


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
        divisor = float(part) if part[0].isdigit() else getattr(row, part)
        value = None if value is None or not divisor else value / divisor
    return value


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


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within it, torch's threads are `count`; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_cpu(threads: int | None = None) -> str:
    """The machine and the versions, for a table's first line; with torch's threads by default."""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{threads or torch.get_num_threads()} threads, megatron_sparse {__version__} {_commit()}, "
        f"torch {torch.__version__}, {ops.supported_isas()[-1]}"
    )


def _commit() -> str:
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(no git)"
    return found.stdout.strip() or "(no commit)"


def copy_action(bytes_moved: int, device: torch.device | str = "cpu") -> Action:
    """The ceiling: a plain copy that reads and writes `bytes_moved` in all."""
    source = torch.ones(max(bytes_moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written, so that its pages exist
    return lambda: target.copy_(source)


def local[Sweep: Options, Row: CellRow](
    where: str | Callable[[Sweep], str], rows: Callable[[Sweep], Iterable[Row]]
) -> Callable[..., list[Row]]:
    """Makes `run` of a bench that is this process alone.

    Args:
        where: describes the place and the method, for the table's head.
        rows: every case of a sweep; each is measured when it is asked for.

    Returns:
        A function of the sweep and of a file for JSON lines (None writes none). It prints the
        table, with the sweep's threads, and returns the rows. It raises a `ConfigError` if the
        file cannot be written.
    """

    def run(sweep: Sweep, json_path: Path | None = None) -> list[Row]:
        with torch_threads(getattr(sweep, "threads", None)):
            head = where if isinstance(where, str) else where(sweep)
            return print_rows(head, sweep, rows(sweep), json_path)

    return run


def print_rows[Row: CellRow](
    where: str, sweep: Options, rows: Iterable[Row], json_path: Path | None
) -> list[Row]:
    """Prints machine, versions, place and settings, then the table; see `print_table`."""
    resolved = json.dumps(asdict(sweep), default=str)  # type: ignore[call-overload] - a dataclass
    print(f"# {describe_cpu()}\n# {where}\n# {resolved}", flush=True)
    return print_table(rows, json_path)


def print_table[Row: CellRow](rows: Iterable[Row], json_path: Path | None) -> list[Row]:
    """Prints rows as they come and writes one JSON object a line; returns them.

    A row of another kind than the one before begins a table. A sweep that is stopped keeps its
    rows.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_rows(json_path, [])
    done: list[Row] = []
    for row in rows:
        clear_progress()
        if not done or type(row) is not type(done[-1]):
            print(row.COLUMNS.header)
        print(row.line(), flush=True)
        done.append(row)
        append_row(json_path, row.to_dict())
    if any(getattr(row, "noisy", False) for row in done):
        print(
            "# noisy: other programs took so much of the machine in the meantime; measure again",
            flush=True,
        )
    return done


def show_progress(text: str) -> None:
    """Shows on a terminal which case is being measured."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    """Removes the line of `show_progress`."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


class HostLoad:
    """Counts processor time from its construction on.

    Leaves out the kernel's work on interrupts: the ranks' network traffic causes it, but no
    process's account includes it.

    Raises:
        DependencyError: psutil is not installed.
    """

    def __init__(self) -> None:
        self._psutil = _psutil()
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        machine, own = self._psutil.cpu_times(), self._psutil.Process().cpu_times()
        worked = machine.user + machine.nice + machine.system + getattr(machine, "steal", 0.0)
        cores = self._psutil.cpu_count() or 1
        spent = own.user + own.system + own.children_user + own.children_system
        return time.monotonic() * cores, worked, spent

    def spent(self) -> tuple[float, float, float]:
        """Core-seconds since the construction: available, used, and used by this process.

        Children count once they have ended and the process has waited for them.
        """
        there_were, worked, own = (
            now - then for now, then in zip(self._now(), self._begin, strict=True)
        )
        return there_were, worked, own


def foreign_share(there_were_s: float, worked_s: float, own_s: float) -> float:
    """The share of the machine, 0 to 1, that other programs used."""
    return min(max(worked_s - own_s, 0.0) / there_were_s, 1.0)


def free_memory_bytes() -> int:
    """Memory that is available without swapping.

    Raises:
        DependencyError: psutil is not installed.
    """
    return int(_psutil().virtual_memory().available)


def _psutil() -> ModuleType:
    require("psutil", "sees the machine's load and memory", "train")
    import psutil

    return psutil
