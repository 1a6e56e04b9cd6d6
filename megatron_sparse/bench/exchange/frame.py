"""How a bench of this folder runs: starts its ranks, prints its table, writes its JSON lines.

The ranks are processes of this machine over loopback, hosts of the network test bed, those of an
existing launch (torchrun, srun), or virtual. Rank 0 prints and writes. If several ranks find an
error, the first of them reports it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from megatron_sparse.bench.exchange.options import Place, Rounds
from megatron_sparse.bench.rank_group import as_rank
from megatron_sparse.bench.table import (
    Columns,
    Progress,
    TableRow,
    print_table,
    show_progress,
    torch_threads,
)
from megatron_sparse.cuda_ext import ops
from megatron_sparse.errors import ConfigError
from megatron_sparse.run import local_ranks
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.transport import Link, Topology
from megatron_sparse.transport.netbed import netbed_mbit
from megatron_sparse.version import __version__

type Rows = list[Any]
"""`TableRow`s; every bench knows its own."""


class Ranks(Protocol):
    """One rank's part of a bench: a `RankGroup` with rows."""

    rank: int
    world_size: int
    backend: str

    @property
    def nodes(self) -> set[int]:
        """See `RankGroup`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def rows(self, progress: Progress) -> Iterator[TableRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        ...


def _any_ranks(ranks: int) -> None:
    """Every number of ranks fits."""


def _not_virtual(topology: Topology, progress: Progress) -> Iterator[TableRow]:
    raise ConfigError("this bench has no virtual ranks", expected="real ones", got="--virtual")


def _not_wrong(rows: Rows) -> bool:
    return not any(row.wrong for row in rows)


def _nothing(rows: Rows) -> None:
    """No picture, no verdict."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What tells one bench from another.

    Attributes:
        name: of the command.
        columns: of the table.
        options: the cases; printed, and given to each rank that is started.
        ranks: makes one rank's part, from the store, its rank and the number of ranks.
        virtual: the rows of virtual ranks.
        check: raises if the number of ranks does not fit, before anything starts.
        right: whether the rows are as they should be; the exit code says so.
        after: called with the rows where they were printed, to draw or judge them.
        arguments: of each rank's command line, beside those of `options`.
    """

    name: str
    columns: Columns
    options: Any
    ranks: Callable[[Any, int, int], Ranks]
    virtual: Callable[[Topology, Progress], Iterable[TableRow]] = _not_virtual
    check: Callable[[int], object] = _any_ranks
    right: Callable[[Rows], bool] = _not_wrong
    after: Callable[[Rows], object] = _nothing
    arguments: Sequence[str] = ()


def with_rate[Options: Rounds](options: Options) -> Options:
    """The options with the test bed's rate, where they are read in one of its hosts."""
    return replace(options, mbit=options.mbit or netbed_mbit())


def run(bench: Bench, place: Place, json_path: Path | None) -> int:
    """Starts the ranks that are missing, or does one rank's part; returns the exit code.

    Raises:
        ConfigError: flags contradict one another, or an option does not fit.
        MegatronSparseError: a collective failed.
    """
    started, mbit = local_ranks.started_ranks(), bench.options.mbit
    local_ranks.check_place(
        netbed=place.netbed, virtual=place.virtual, mbit=mbit, ranks=place.ranks, started=started
    )
    ranks = place.ranks or started or 4
    bench.check(ranks)
    if not started:
        write_rows(json_path, [])
    if place.virtual or started:
        virtual = place.virtual
        rows = (
            run_virtual(bench, place.topology(ranks), json_path)
            if virtual
            else run_rank(bench, json_path)
        )
        return 0 if bench.right(rows) else 1
    output = [] if json_path is None else [f"--json={json_path}"]
    command = ["bench", bench.name, *bench.options.arguments(), *bench.arguments, *output]
    of_rank = local_ranks.command_line(command)
    if place.netbed:
        return local_ranks.run_netbed(of_rank, ranks, mbit or 0, place.nodes(ranks))
    return local_ranks.run_loopback(of_rank, ranks)


def run_virtual(bench: Bench, topology: Topology, json_path: Path | None) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model; returns its rows.

    Raises:
        ConfigError: the JSON file cannot be written, or an option does not fit.
        MegatronSparseError: a collective refuses a case.
    """
    where = (
        f"{topology.world_size} virtual ranks, MODELLED times of an alpha-beta clock without local "
        f"work; nodes of {topology.node_sizes}, {_link(topology.intra)} inside, "
        f"{_link(topology.inter)} between them"
    )
    with torch_threads(1):
        return print_rows(bench, where, bench.virtual(topology, _progress), json_path)


def run_rank(bench: Bench, json_path: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; see `as_rank` for errors."""

    def measure(group: Ranks) -> Rows:
        if group.rank:
            return list(group.rows(lambda *_: None))
        where = f"{group.world_size} ranks, {group.backend}, hosts: {len(group.nodes)}"
        return print_rows(bench, where, group.rows(_progress), json_path)

    return as_rank(bench.ranks, measure)  # type: ignore[type-var] - `Ranks` are RankGroups


def print_rows(bench: Bench, where: str, rows: Iterable[TableRow], json_path: Path | None) -> Rows:
    """Prints machine, versions, settings and table, and what comes `after`."""
    print_head(bench.options, where)
    done = print_table(bench.columns, rows, json_path)
    bench.after(done)
    return done


def print_head(settings: Any, where: str) -> None:
    """Prints the machine, the versions and the resolved settings."""
    machine = platform.processor() or platform.machine()
    print(
        f"# {machine}, {os.cpu_count()} cores, megatron_sparse {__version__} {_commit()}, torch "
        f"{torch.__version__}, {ops.supported_isas()[-1]}\n"
        f"# {where}\n# {json.dumps(asdict(settings), default=str)}",
        flush=True,
    )


def each_case[Case: Any](cases: Sequence[Case], progress: Progress) -> Iterator[Case]:
    """The cases, each shown before it begins."""
    for number, case in enumerate(cases):
        progress(number, len(cases), case.title)
        yield case


def _progress(number: int, of: int, case: str) -> None:
    show_progress(f"{number + 1}/{of}: {case}")


def _link(link: Link) -> str:
    return f"{8e-9 / link.beta_s:g} Gbit/s and {link.alpha_s * 1e6:g} us"


def _commit() -> str:
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(no git)"
    return found.stdout.strip() or "(no commit)"
