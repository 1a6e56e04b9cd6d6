"""What every bench has in common: threads, a copy to compare with, the table, the machine's load.

`copy` copies half the bytes that an operation moves: it reads as many as it writes.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from megatron_sparse.bench.options import Options
from megatron_sparse.cuda_ext import ops
from megatron_sparse.extras import require
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.run.provenance import commit
from megatron_sparse.run.rows import CellRow, print_table
from megatron_sparse.version import __version__

type Action = Callable[[], object]


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Sets the number of torch's threads within the context; None does not change it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_cpu(threads: int | None = None) -> str:
    """Describes machine and versions for a table's first line; `threads` are torch's by default."""
    short_hash = (commit(CHECKOUT) or "(no commit)")[:11]
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{threads or torch.get_num_threads()} threads, "
        f"megatron_sparse {__version__} {short_hash}, "
        f"torch {torch.__version__}, {ops.supported_isas()[-1]}"  # the fastest instruction set
    )


def copy_action(bytes_moved: int, device: torch.device | str = "cpu") -> Action:
    """Makes a plain copy that reads and writes `bytes_moved` in all: no operation can be faster."""
    source = torch.ones(max(bytes_moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written, so that its pages exist
    return lambda: target.copy_(source)


def local[Sweep: Options, Row: CellRow](
    where: Callable[[Sweep], str], rows: Callable[[Sweep], Iterable[Row]]
) -> Callable[..., list[Row]]:
    """Makes the function `run` of a bench that needs no other process.

    Args:
        where: describes device and method, for the lines above the table.
        rows: measures a sweep; yields its rows one by one.

    Returns:
        A function of the sweep and of a file for JSON lines (None writes none). It measures with
        the sweep's number of torch threads, if it has one, prints the table and returns the rows.
        It raises a `ConfigError` if the file cannot be written.
    """

    def run(sweep: Sweep, json_path: Path | None = None) -> list[Row]:
        with torch_threads(getattr(sweep, "threads", None)):
            return print_rows(where(sweep), sweep, rows(sweep), json_path)

    return run


def print_rows[Row: CellRow](
    where: str, sweep: Options, rows: Iterable[Row], json_path: Path | None
) -> list[Row]:
    """Prints machine, versions, place and settings, then the table; see `print_table`."""
    resolved = json.dumps(asdict(sweep), default=str)  # type: ignore[call-overload] - a dataclass
    print(f"# {describe_cpu()}\n# {where}\n# {resolved}", flush=True)
    return print_table(rows, json_path)


class HostLoad:
    """Counts the machine's processor time from its construction on.

    It leaves out the kernel's work on interrupts, which the ranks' network traffic causes: no
    process is charged with that work, so it would be taken for the work of other programs.

    Raises:
        DependencyError: psutil is not installed.
    """

    def __init__(self) -> None:
        self._psutil = _psutil()
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Core-seconds so far: available; used by all programs; by this one and its children."""
        machine, own = self._psutil.cpu_times(), self._psutil.Process().cpu_times()
        used_s = machine.user + machine.nice + machine.system + getattr(machine, "steal", 0.0)
        cores = self._psutil.cpu_count() or 1
        own_s = own.user + own.system + own.children_user + own.children_system
        return time.monotonic() * cores, used_s, own_s

    def spent(self) -> tuple[float, float, float]:
        """Core-seconds since the construction: available, used, and used by this process.

        Children count once they have ended and the process has waited for them.
        """
        now_s, begin_s = self._now(), self._begin
        return now_s[0] - begin_s[0], now_s[1] - begin_s[1], now_s[2] - begin_s[2]


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
