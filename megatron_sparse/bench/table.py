"""What every bench has in common: threads, a copy to compare with, the table and its file.

`copy` copies half the bytes that an operation moves: it reads as many as it writes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_sparse.bench.options import Options
from megatron_sparse.bench.row import CellRow
from megatron_sparse.cuda_ext import ops
from megatron_sparse.run.json_lines import append_row, write_rows
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.version import __version__

type Action = Callable[[], object]


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
