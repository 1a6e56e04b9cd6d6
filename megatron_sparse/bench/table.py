"""What every bench has in common: checked arguments, threads, taking turns, cells and files.

Rows are timed in turn: each round runs the operation, the copy and the peers once, so that what
slows the machine down for a while slows all of them. `copy` copies half the bytes that an operation
moves: it reads as many as it writes.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.run.json_lines import append_row, write_rows
from megatron_sparse.version import __version__

type Action = Callable[[], object]

Progress = Callable[[int, int, str], None]
"""Called with the number of the case that begins, the number of cases, and the case in words."""


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


def describe_cpu(threads: int | None) -> str:
    """The machine and the versions, for a table's first line."""
    return (
        f"{platform.processor() or platform.machine()}, megatron_sparse {__version__}, "
        f"torch {torch.__version__}, {threads or torch.get_num_threads()} threads, "
        f"{ops.supported_isas()[-1]}"
    )


def copy_action(bytes_moved: int, device: torch.device | str = "cpu") -> Action:
    """The ceiling: a plain copy that reads and writes `bytes_moved` in all."""
    source = torch.ones(max(bytes_moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written, so that its pages exist
    return lambda: target.copy_(source)


def time_in_turn(actions: Sequence[Action], warmup: int, iters: int) -> list[list[float]]:
    """Microseconds of each action in each round that counts; on the host's clock."""
    times_us: list[list[float]] = [[] for _ in actions]
    for round_index in range(warmup + iters):
        for action, kept in zip(actions, times_us, strict=True):
            start_s = time.perf_counter()
            action()
            if round_index >= warmup:
                kept.append((time.perf_counter() - start_s) * 1e6)
    return times_us


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


class TableRow:
    """A dataclass that is a line of a table and a JSON object."""

    COLUMNS: ClassVar[Columns]

    def line(self) -> str:
        """The table's line."""
        return self.COLUMNS.line(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)  # type: ignore[call-overload] - subclasses are dataclasses


def print_table[Row: TableRow](
    columns: Columns, rows: Iterable[Row], json_path: Path | None
) -> list[Row]:
    """Prints rows as they come and writes one JSON object a line; returns them.

    A sweep that is stopped keeps its rows.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_rows(json_path, [])
    print(columns.header, flush=True)
    done: list[Row] = []
    for row in rows:
        clear_progress()
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


def ratio(above: float | None, below: float | None) -> float | None:
    """`above / below`; None where either is missing or `below` is 0."""
    return None if above is None or not below else above / below
