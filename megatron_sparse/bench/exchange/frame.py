"""How a bench of this folder runs: starts its ranks, prints its table, writes its JSON lines.

The ranks are processes of this machine over loopback, hosts of the network test bed, those of an
existing launch (torchrun, srun), or virtual. Rank 0 prints and writes. If several ranks find an
error, the first of them reports it. On CUDA devices the backend is NCCL; that has not been run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from megatron_sparse.bench.exchange.options import CalibrationOptions, NodePlace, Place, Rounds
from megatron_sparse.bench.table import HostLoad, foreign_share, print_rows, torch_threads
from megatron_sparse.calibration.launch_check import meet, open_store
from megatron_sparse.errors import CommunicationError, MegatronSparseError
from megatron_sparse.reduction.host_state import check_kernels_of_all
from megatron_sparse.reduction.progress import progress_on
from megatron_sparse.run import local_ranks
from megatron_sparse.run.rows import CellRow
from megatron_sparse.transport import Link, ProcessGroupTransport, Topology
from megatron_sparse.transport.netbed import NETBED_MBIT, BedLinks, netbed_mbit
from megatron_sparse.transport.peer_links import check_gloo_interfaces

LINGER_S = 5.0

Turn = Callable[[int], Sequence[float]]
"""One action of a round, called with the round's number; returns this rank's figures of it."""


class Bench[Cases: Rounds | CalibrationOptions]:
    """A bench, and one rank's part of it between real ranks.

    A context manager that ends this rank's threads and its group.

    Args:
        cases: its options, the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.
        nccl_engine: `scheme.nccl_engine`.

    Raises:
        CommunicationError: the ranks cannot reach one another.
        ConfigError: the engine without a GPU, or gloo without its network interface.
        DependencyError, ExtensionError: a GPU has no kernels (`check_kernels_of_all`).
    """

    def __init__(
        self, cases: Cases, store: Any, rank: int, world_size: int, *, nccl_engine: bool = False
    ) -> None:
        self._cases, self.rank, self.world_size = cases, rank, world_size
        on_cuda = torch.cuda.is_available()
        self.backend = "nccl" if on_cuda else "gloo"
        self._device = torch.device("cpu")
        if on_cuda:
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._device)
        else:
            check_gloo_interfaces()
        dist.init_process_group(
            self.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=cases.timeout_s),
        )
        check_kernels_of_all(self._device)
        world = dist.group.WORLD
        assert world is not None, "just made"
        self._transport = ProcessGroupTransport(
            world, cases.timeout_s, self._device, nccl_engine=nccl_engine
        )
        self._progress = progress_on(self._device, cases.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.close()
        self._transport.close(broken=kind is not None)
        if kind is None:
            dist.destroy_process_group()

    def rows(self) -> Iterator[CellRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        raise NotImplementedError

    def shown_rows(self, json_path: Path | None) -> list[Any]:
        """All rows, on every rank; rank 0 prints and writes them as well."""
        if self.rank:
            return list(self.rows())
        where = f"{self.world_size} ranks, {self.backend}, hosts: {len(self.nodes)}"
        return print_rows(where, self._cases, self.rows(), json_path)

    @classmethod
    def virtual_rows(cls, cases: Cases, topology: Topology) -> Iterator[CellRow]:
        """Every case on virtual ranks.

        Raises:
            ConfigError: they do not fit into this machine's memory.
            MegatronSparseError: a collective refuses a case.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, cases: Cases, ranks: int, *, virtual: bool) -> None:
        """Raises if the ranks do not fit the cases, before anything starts."""

    @property
    def nodes(self) -> set[int]:
        """The hosts, by the first rank on each."""
        return set(self._transport.nodes)

    def _in_turn(
        self, turns: Sequence[Turn], warmup: int, iters: int
    ) -> tuple[list[torch.Tensor], float]:
        """Runs every action once a round, so that a slowdown of the machine affects all of them.

        Each round begins with another action than the round before.

        Returns:
            For each action fp64 [n, R, M]: the M figures of n ranks in the R rounds after the
            warm-up; and the share of the machine that other programs took in these rounds.
        """
        rounds: list[list[Sequence[float]]] = [[] for _ in turns]  # of each action, its figures
        load = HostLoad()
        for number in range(warmup + iters):
            if number == warmup:
                load = HostLoad()  # counts from here on
            for place in range(len(turns)):
                index = (place + number) % len(turns)
                rounds[index].append(turns[index](number))
        share = self._foreign_load(load)
        own = [torch.tensor(figures[warmup:], dtype=torch.float64) for figures in rounds]
        return [self._gather(own_RM) for own_RM in own], share

    def _timed(self, action: Callable[[], object]) -> float:
        """This rank's microseconds until its device has done the action; all begin together."""
        self._meet()
        start_s = time.perf_counter()
        action()
        self._wait_for_device()
        return (time.perf_counter() - start_s) * 1e6

    def _meet(self) -> None:
        """Returns on all ranks at about the same time, with nothing left to do."""
        self._wait_for_device()
        typed(dist.barrier)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Stacks all ranks' tensors of one shape, on the device of `own`. Collective."""
        sent = own.to(self._device).contiguous()
        gathered = sent.new_empty(self.world_size, *sent.shape)
        self._transport.all_gather(gathered.view(-1), sent.view(-1)).finish()
        return gathered.to(own.device)

    def _count(self, own: int) -> int:
        """The sum of all ranks' counts."""
        return int(self._gather(torch.tensor([own], dtype=torch.float64)).sum())

    def _foreign_load(self, load: HostLoad) -> float:
        """The share of the machines that other programs took since `load` was made."""
        spent = self._gather(torch.tensor(load.spent(), dtype=torch.float64))
        available_s, used_s, own_s = spent.unbind(1)  # each [n], in core-seconds
        # Hosts of the test bed have names of their own and are one machine all the same.
        machines = 1 if NETBED_MBIT in os.environ else len(self.nodes)
        return foreign_share(
            float(available_s.mean()) * machines,
            float(used_s.mean()) * machines,
            float(own_s.sum()),
        )


def typed(operation: Callable[[], object]) -> None:
    """Runs one of torch's own collectives.

    Raises:
        CommunicationError: a rank is gone, or time is up.
    """
    try:
        operation()
    except RuntimeError as error:
        raise CommunicationError(
            "the bench's ranks lost one another",
            expected="every rank takes part within --timeout",
            got=str(error).splitlines()[0],
            remedy="look at what the other ranks have printed",
        ) from error


def as_rank[Group: Bench[Any], Result](
    make: Callable[[Any, int, int], Group],
    action: Callable[[Group], Result],
    *,
    timeout_s: float = default_pg_timeout.total_seconds(),
) -> Result:
    """Runs one rank's part; RANK and WORLD_SIZE must be set.

    A typed error ends the process with its exit code. If several ranks find it, only the first of
    them prints it.

    Args:
        make: the group of this process, from the store, its rank and the number of ranks.
        action: what to do in it.
        timeout_s: for all ranks to meet.

    Raises:
        CommunicationError: rank 0 cannot be reached.
    """
    torch.set_num_threads(1)
    store, rank, world_size = open_store(timeout_s)
    try:
        meet(store, rank, world_size, timeout_s)
        with make(store, rank, world_size) as group:
            return action(group)
    except MegatronSparseError as error:
        code = _said_already(store, rank, world_size, error.exit_code)
        if code is None:
            print(f"error: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # The error holds on to the group, whose threads abort a process that ends in the usual way.
        os._exit(error.exit_code if code is None else code)


def _said_already(store: Any, rank: int, world_size: int, own_code: int) -> int | None:
    """The exit code of the first rank that failed; None if this rank is the first.

    One rank's error makes all others fail, mostly with another error: they leave with the same
    code. Rank 0 holds the store, so it stays until all have asked or `LINGER_S` are over.
    """
    key = "megatron_sparse/bench_failed"
    code = None
    try:
        if store.add(key, 1) == 1:  # counts the ranks that ask
            store.set(f"{key}/code", str(own_code))
        else:
            code = int(store.get(f"{key}/code"))
        deadline_s = time.monotonic() + (LINGER_S if rank == 0 else 0.0)
        # Adding 0 reads the count.
        while store.add(key, 0) < world_size and time.monotonic() < deadline_s:
            time.sleep(0.05)
    except RuntimeError:
        return own_code  # the store went with rank 0, which said so or was killed
    return code


def run[Cases: Rounds](
    bench: type[Bench[Cases]], sweep: Cases, place: NodePlace, json_path: Path | None = None
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
        rows = run_virtual(bench, cases, place.topology(ranks), json_path)
    elif started:
        rows = as_rank(partial(bench, cases), lambda group: group.shown_rows(json_path))
    else:
        flags = [] if json_path is None else [f"--json={json_path}"]
        command = [*cases.NAME.split(), *cases.arguments(), *flags]
        return start_ranks(command, place, ranks, cases.mbit)
    return int(any(row.bad for row in rows))


def start_ranks(command: Sequence[str], place: Place, ranks: int, mbit: int | None) -> int:
    """Runs a command of `megatron-sparse` in a process for each rank, on loopback or the test bed.

    Args:
        command: with its options.
        place: says which of the two.
        ranks: how many.
        mbit: rate of the test bed's links; None for no limit.

    Returns:
        The exit code of the first rank that failed, or 0.

    Raises:
        ConfigError: there is no test bed.
        CommunicationError: a signal killed a rank.
    """
    command_line = local_ranks.command_line(command)
    if place.netbed:
        return local_ranks.run_netbed(command_line, ranks, BedLinks(mbit or 0), place.nodes(ranks))
    return local_ranks.run_loopback(command_line, ranks)


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


def _link(link: Link) -> str:
    return f"{8e-9 / link.beta_s:g} Gbit/s and {link.alpha_s * 1e6:g} us"
