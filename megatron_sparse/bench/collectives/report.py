"""How a bench of collectives runs a rank, prints its table and writes its JSON lines.

Rank 0 prints and writes; an error that several ranks find is told by the first of them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_sparse.bench.collectives.ranks import Progress, RankBench
from megatron_sparse.bench.collectives.sweep import Case
from megatron_sparse.bench.rank_group import as_rank
from megatron_sparse.cuda_ext import ops
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.transport import Link, Topology
from megatron_sparse.version import __version__

Rows = list[dict[str, Any]]


class TableRow(Protocol):
    """A line of a table, and its JSON object."""

    noisy: bool

    def line(self) -> str:
        """The table's line."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        ...


def run_as_rank[Bench: RankBench](
    make: Callable[[Any, int, int], Bench],
    rows: Callable[[Bench, Progress], Iterable[TableRow]],
    settings: Any,
    header: str,
    json_path: Path | None,
) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; rank 0 prints and writes.

    A typed error, such as a JSON file that cannot be written, ends the process: `as_rank`.

    Args:
        make: the bench of this process, from the store, its rank and the number of ranks.
        rows: what the bench measures.
        settings: a dataclass, printed.
        header: of the table.
        json_path: written anew after each row.
    """

    def measure(bench: Bench) -> Rows:
        if bench.rank:
            return [row.to_dict() for row in rows(bench, _show_nothing)]
        where = f"{bench.world_size} ranks, {bench.backend}, hosts: {len(bench.nodes)}"
        print_head(settings, where, header)
        return print_rows(rows(bench, show_progress), json_path)

    return as_rank(make, measure)


def print_head(settings: Any, where: str, header: str) -> None:
    """Prints the machine, the versions, the resolved settings and the table's header."""
    machine = platform.processor() or platform.machine()
    print(
        f"# {machine}, {os.cpu_count()} cores, megatron_sparse {__version__} {_commit()}, torch "
        f"{torch.__version__}, {ops.supported_isas()[-1]}\n"
        f"# {where}\n# {json.dumps(asdict(settings))}\n{header}",
        flush=True,
    )


def print_rows(rows: Iterable[TableRow], json_path: Path | None) -> Rows:
    """Writes the file anew after each row: a sweep that is stopped keeps what it has.

    Raises:
        ConfigError: it cannot be written.
    """
    done: Rows = []
    write_rows(json_path, done)
    for row in rows:
        _clear_progress()
        print(row.line(), flush=True)
        done.append(row.to_dict())
        write_rows(json_path, done)
    if any(row["noisy"] for row in done):
        print(
            "# noisy: other programs took so much of the machine in the meantime; measure again",
            flush=True,
        )
    return done


def virtual_place(topology: Topology) -> str:
    """Where virtual ranks run, in words that say that their times are a model's."""
    return (
        f"{topology.world_size} virtual ranks, MODELLED times of an alpha-beta clock without local "
        f"work; nodes of {topology.node_sizes}, {_link(topology.intra)} inside, "
        f"{_link(topology.inter)} between them"
    )


def show_progress(number: int, of: int, case: Case) -> None:
    """Says on a terminal what is being measured."""
    if sys.stderr.isatty():
        what = f"{case.op} {case.scheme} {case.density:g} {case.nbytes} B {case.dtype}"
        print(f"\r\033[K{number + 1}/{of}: {what} ...", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show_nothing(*_: object) -> None:
    pass


def _link(link: Link) -> str:
    return f"{8e-9 / link.beta_s:g} Gbit/s and {link.alpha_s * 1e6:g} us"


def _commit() -> str:
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(no git)"
    return found.stdout.strip() or "(no commit)"
