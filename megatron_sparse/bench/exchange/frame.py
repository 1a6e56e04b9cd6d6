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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_sparse.bench.exchange.options import Place, Rounds
from megatron_sparse.bench.rank_group import RankGroup, as_rank
from megatron_sparse.bench.table import (
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


class Bench[Cases: Rounds](RankGroup):
    """A bench, and one rank's part of it between real ranks.

    Args:
        cases: its options, the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.
        nccl_engine: `scheme.nccl_engine`.

    Raises:
        CommunicationError: the ranks cannot reach one another.
    """

    NAME: ClassVar[str]
    """Of the command."""
    ROW: ClassVar[type[TableRow]]

    def __init__(
        self, cases: Cases, store: Any, rank: int, world_size: int, *, nccl_engine: bool = False
    ) -> None:
        self._cases = cases
        super().__init__(cases.timeout_s, store, rank, world_size, nccl_engine=nccl_engine)

    def rows(self, progress: Progress) -> Iterator[TableRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        raise NotImplementedError

    @classmethod
    def virtual_rows(
        cls, cases: Cases, topology: Topology, progress: Progress
    ) -> Iterable[TableRow]:
        """Every case on virtual ranks.

        Raises:
            ConfigError: the bench has none, or they do not fit into this machine's memory.
            MegatronSparseError: a collective refuses a case.
        """
        raise ConfigError(f"bench {cls.NAME} --virtual", expected="real ranks", got="virtual ones")

    @classmethod
    def check(cls, cases: Cases, ranks: int, *, virtual: bool) -> None:
        """Raises if the ranks do not fit the cases, before anything starts."""

    @classmethod
    def right(cls, rows: Sequence[Any]) -> bool:
        """Whether the rows are as they should be; the exit code says so."""
        return not any(row.wrong for row in rows)

    @classmethod
    def show(cls, cases: Cases, rows: Sequence[Any]) -> None:
        """Draws or judges the rows, where they were printed."""


def run[Cases: Rounds](
    bench: type[Bench[Cases]], cases: Cases, place: Place, json_path: Path | None
) -> int:
    """Starts the ranks that are missing, or does one rank's part; returns the exit code.

    Raises:
        ConfigError: flags contradict one another, or an option does not fit.
        MegatronSparseError: a collective failed.
    """
    cases, started = replace(cases, mbit=cases.mbit or netbed_mbit()), local_ranks.started_ranks()
    local_ranks.check_place(
        netbed=place.netbed,
        virtual=place.virtual,
        mbit=cases.mbit,
        ranks=place.ranks,
        started=started,
    )
    ranks = place.ranks or started or 4
    bench.check(cases, ranks, virtual=place.virtual)
    if not started:
        write_rows(json_path, [])
    if place.virtual:
        return _exit_code(bench, run_virtual(bench, cases, place.topology(ranks), json_path))
    if started:
        return _exit_code(bench, run_rank(bench, cases, json_path))
    output = [] if json_path is None else [f"--json={json_path}"]
    of_rank = local_ranks.command_line(["bench", bench.NAME, *cases.arguments(), *output])
    if place.netbed:
        return local_ranks.run_netbed(of_rank, ranks, cases.mbit or 0, place.nodes(ranks))
    return local_ranks.run_loopback(of_rank, ranks)


def _exit_code(bench: type[Bench[Any]], rows: Sequence[TableRow]) -> int:
    return 0 if bench.right(rows) else 1


def run_virtual[Cases: Rounds](
    bench: type[Bench[Cases]], cases: Cases, topology: Topology, json_path: Path | None
) -> list[Any]:
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
    rows = bench.virtual_rows(cases, topology, _progress)
    with torch_threads(1):
        return print_rows(bench, cases, where, rows, json_path)


def run_rank[Cases: Rounds](
    bench: type[Bench[Cases]], cases: Cases, json_path: Path | None
) -> list[Any]:
    """One rank's part where RANK and WORLD_SIZE are set; see `as_rank` for errors."""

    def measure(group: Bench[Cases]) -> list[Any]:
        if group.rank:
            return list(group.rows(lambda *_: None))
        where = f"{group.world_size} ranks, {group.backend}, hosts: {len(group.nodes)}"
        return print_rows(bench, cases, where, group.rows(_progress), json_path)

    return as_rank(lambda *where: bench(cases, *where), measure)


def print_rows[Cases: Rounds](
    bench: type[Bench[Cases]],
    cases: Cases,
    where: str,
    rows: Iterable[TableRow],
    json_path: Path | None,
) -> list[Any]:
    """Prints machine, versions, settings and table, and what the bench shows of the rows."""
    print_head(cases, where)
    done = print_table(bench.ROW.COLUMNS, rows, json_path)
    bench.show(cases, done)
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
