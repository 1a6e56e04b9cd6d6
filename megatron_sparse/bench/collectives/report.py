"""How a bench of collectives runs a rank, prints its table and writes its JSON lines.

Rank 0 prints and writes. If several ranks find an error, the first of them reports it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.collectives.sweep import Place
from megatron_sparse.bench.rank_group import RankGroup, as_rank
from megatron_sparse.bench.table import Columns, Progress, TableRow, print_table, show_progress
from megatron_sparse.cuda_ext import ops
from megatron_sparse.run import local_ranks
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.transport import Link, Topology
from megatron_sparse.version import __version__

Rows = list[dict[str, Any]]


def run_as_rank[Bench: RankGroup](
    make: Callable[[Any, int, int], Bench],
    rows: Callable[[Bench, Progress], Iterable[TableRow]],
    settings: Any,
    columns: Columns,
    json_path: Path | None,
) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; rank 0 prints and writes.

    A typed error, such as a JSON file that cannot be written, ends the process: `as_rank`.

    Args:
        make: the bench of this process, from the store, its rank and the number of ranks.
        rows: what the bench measures.
        settings: a dataclass, printed.
        columns: of the table.
        json_path: gets a line after each row; None writes none.
    """

    def measure(bench: Bench) -> Rows:
        if bench.rank:
            return [row.to_dict() for row in rows(bench, _show_nothing)]
        where = f"{bench.world_size} ranks, {bench.backend}, hosts: {len(bench.nodes)}"
        print_head(settings, where)
        return dicts(print_table(columns, rows(bench, progress_of), json_path))

    return as_rank(make, measure)


def run_anywhere(
    place: Place,
    mbit: int | None,
    json_path: Path | None,
    *,
    check: Callable[[int], object],
    virtual: Callable[[Topology], Rows],
    rank: Callable[[], Rows],
    command: Sequence[str],
) -> int:
    """Starts the ranks that are missing, or does one rank's part; returns the exit code.

    Args:
        place: where the ranks are.
        mbit: rate of the test bed's links.
        json_path: for one JSON object a line; None writes none.
        check: raises if the number of ranks does not fit, before anything starts.
        virtual: measures virtual ranks.
        rank: measures as one of the ranks that were started.
        command: arguments of `megatron-sparse` for each rank, without `--json`.

    Raises:
        ConfigError: flags contradict one another, or an option does not fit.
        MegatronSparseError: a collective failed.
    """
    started = local_ranks.started_ranks()
    local_ranks.check_place(
        netbed=place.netbed, virtual=place.virtual, mbit=mbit, ranks=place.ranks, started=started
    )
    ranks = place.ranks or started or 4
    check(ranks)
    if not started:
        write_rows(json_path, [])
    if place.virtual or started:
        rows = virtual(place.topology(ranks)) if place.virtual else rank()
        return 1 if any(row["wrong"] for row in rows) else 0
    output = [] if json_path is None else [f"--json={json_path}"]
    of_rank = local_ranks.command_line([*command, *output])
    if place.netbed:
        return local_ranks.run_netbed(of_rank, ranks, mbit or 0, place.nodes(ranks))
    return local_ranks.run_loopback(of_rank, ranks)


def dicts(rows: Iterable[TableRow]) -> Rows:
    """The JSON objects of rows."""
    return [row.to_dict() for row in rows]


def print_head(settings: Any, where: str) -> None:
    """Prints the machine, the versions and the resolved settings."""
    machine = platform.processor() or platform.machine()
    print(
        f"# {machine}, {os.cpu_count()} cores, megatron_sparse {__version__} {_commit()}, torch "
        f"{torch.__version__}, {ops.supported_isas()[-1]}\n"
        f"# {where}\n# {json.dumps(asdict(settings))}",
        flush=True,
    )


def virtual_place(topology: Topology) -> str:
    """The place of virtual ranks, in words that mark their times as a model's."""
    return (
        f"{topology.world_size} virtual ranks, MODELLED times of an alpha-beta clock without local "
        f"work; nodes of {topology.node_sizes}, {_link(topology.intra)} inside, "
        f"{_link(topology.inter)} between them"
    )


def progress_of(number: int, of: int, case: str) -> None:
    """Shows on a terminal which case is being measured."""
    show_progress(f"{number + 1}/{of}: {case}")


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
