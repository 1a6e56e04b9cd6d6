"""How a bench of this folder runs: starts its ranks, prints its table, writes its JSON lines.

The ranks are processes of this machine over loopback, hosts of the network test bed, those of an
existing launch (torchrun, srun), or virtual. Rank 0 prints and writes. If several ranks find an
error, the first of them reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_sparse.bench.exchange.options import Place, Rounds
from megatron_sparse.bench.rank_group import RankGroup, as_rank
from megatron_sparse.bench.row import CellRow
from megatron_sparse.bench.table import print_rows, show_progress, torch_threads
from megatron_sparse.errors import ConfigError
from megatron_sparse.run import local_ranks
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.transport import Link, Topology
from megatron_sparse.transport.netbed import BedLinks, netbed_mbit


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

    def __init__(
        self, cases: Cases, store: Any, rank: int, world_size: int, *, nccl_engine: bool = False
    ) -> None:
        self._cases = cases
        super().__init__(cases.timeout_s, store, rank, world_size, nccl_engine=nccl_engine)

    def rows(self) -> Iterator[CellRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        raise NotImplementedError

    @classmethod
    def virtual_rows(cls, cases: Cases, topology: Topology) -> Iterator[CellRow]:
        """Every case on virtual ranks.

        Raises:
            ConfigError: the bench has none, or they do not fit into this machine's memory.
            MegatronSparseError: a collective refuses a case.
        """
        raise ConfigError(f"{cases.NAME} --virtual", expected="real ranks", got="virtual ones")

    @classmethod
    def check(cls, cases: Cases, ranks: int, *, virtual: bool) -> None:
        """Raises if the ranks do not fit the cases, before anything starts."""


def run[Cases: Rounds](
    bench: type[Bench[Cases]], sweep: Cases, place: Place, json_path: Path | None = None
) -> int:
    """Starts the ranks that are missing, or does one rank's part; returns the exit code.

    Args:
        bench: what is measured.
        sweep: its options.
        place: of the ranks.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: flags contradict one another, or an option does not fit.
        MegatronSparseError: a collective failed.
    """
    cases, started = replace(sweep, mbit=sweep.mbit or netbed_mbit()), local_ranks.started_ranks()
    local_ranks.check_place(
        netbed=place.netbed,
        virtual=place.virtual,
        mbit=cases.mbit,
        ranks=place.ranks,
        started=started,
    )
    ranks = place.ranks or started or 4
    bench.check(cases, ranks, virtual=place.virtual)
    if place.virtual:
        return _code(run_virtual(bench, cases, place.topology(ranks), json_path))
    if started:
        return _code(run_rank(bench, cases, json_path))
    write_rows(json_path, [])
    flags = [] if json_path is None else [f"--json={json_path}"]
    command = [*cases.NAME.split(), *cases.arguments(), *flags]
    return start_ranks(command, place, ranks, cases.mbit)


def start_ranks(command: Sequence[str], place: Place, ranks: int, mbit: int | None) -> int:
    """Runs a command of `megatron-sparse` as every rank; returns the exit code.

    Args:
        command: its words.
        place: loopback, or the test bed.
        ranks: how many.
        mbit: rate of the test bed's links.

    Raises:
        ConfigError: there is no test bed.
        CommunicationError: a signal killed a rank.
    """
    of_rank = local_ranks.command_line(command)
    if place.netbed:
        return local_ranks.run_netbed(of_rank, ranks, BedLinks(mbit or 0), place.nodes(ranks))
    return local_ranks.run_loopback(of_rank, ranks)


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
    with torch_threads(1):
        return print_rows(where, cases, bench.virtual_rows(cases, topology), json_path)


def run_rank[Cases: Rounds](
    bench: type[Bench[Cases]], cases: Cases, json_path: Path | None
) -> list[Any]:
    """One rank's part where RANK and WORLD_SIZE are set; see `as_rank` for errors."""

    def measure(group: Bench[Cases]) -> list[Any]:
        if group.rank:
            return list(group.rows())
        where = f"{group.world_size} ranks, {group.backend}, hosts: {len(group.nodes)}"
        return print_rows(where, cases, group.rows(), json_path)

    return as_rank(lambda *where: bench(cases, *where), measure)


def each_case[Case: Any](cases: Sequence[Case], rank: int = 0) -> Iterator[Case]:
    """The cases; rank 0 shows each before it begins."""
    for number, case in enumerate(cases, 1):
        if rank == 0:
            show_progress(f"{number}/{len(cases)}: {case.title}")
        yield case


def _code(rows: Sequence[Any]) -> int:
    return int(any(row.bad for row in rows))


def _link(link: Link) -> str:
    return f"{8e-9 / link.beta_s:g} Gbit/s and {link.alpha_s * 1e6:g} us"
