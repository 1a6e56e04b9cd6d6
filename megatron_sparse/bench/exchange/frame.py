"""How a bench of this folder runs: starts its ranks, prints its table, writes its JSON lines.

The ranks are processes of this machine over loopback or on hosts of the network test bed (network
namespaces with limited links), those that torchrun or srun has started, or virtual: simulated in
this process. Rank 0 prints and writes. If several ranks find an error, the first of them reports
it. On CUDA devices the backend is NCCL; that has not been run.
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
from megatron_sparse.errors import CommunicationError, MegatronSparseError, first_line
from megatron_sparse.reduction.host_state import check_kernels_of_all
from megatron_sparse.reduction.progress import progress_on
from megatron_sparse.run import local_ranks
from megatron_sparse.run.rows import CellRow
from megatron_sparse.transport import Link, ProcessGroupTransport, Topology
from megatron_sparse.transport.netbed import NETBED_MBIT, BedLinks, netbed_mbit
from megatron_sparse.transport.peer_links import check_gloo_interfaces

LINGER_S = 5.0
"""How long a failing rank 0 stays at most, so that other ranks can read the first exit code."""

Turn = Callable[[int], Sequence[float]]
"""One action of a round, called with the round's number; returns this rank's figures of it."""


class Bench[Cases: Rounds | CalibrationOptions]:
    """One rank of a bench between real ranks; class methods measure virtual ranks instead.

    A context manager that ends this rank's threads and its process group.

    `cases` are the bench's options, the same on every rank; `store` is torch's, for
    `init_process_group`.

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
        assert world is not None, "`init_process_group` has made it"
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
        """Measures every case and yields its row. Collective; the rows are the same on all ranks.

        Raises:
            CommunicationError: a rank is gone or does something else.
            MegatronSparseError: a collective refuses a case.
        """
        raise NotImplementedError

    def shown_rows(self, json_path: Path | None) -> list[Any]:
        """Measures and returns all rows; rank 0 also prints them and writes the JSON file."""
        if self.rank:
            return list(self.rows())
        where = f"{self.world_size} ranks, {self.backend}, hosts: {len(self.nodes)}"
        return print_rows(where, self._cases, self.rows(), json_path)

    @classmethod
    def virtual_rows(cls, cases: Cases, topology: Topology) -> Iterator[CellRow]:
        """Measures every case on virtual ranks and yields its row.

        Raises:
            ConfigError: the ranks do not fit into this machine's memory.
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
        rounds: list[list[Sequence[float]]] = [[] for _ in turns]  # by action and round
        load = HostLoad()
        for number in range(warmup + iters):
            if number == warmup:
                load = HostLoad()  # counts from here on
            for offset in range(len(turns)):
                index = (number + offset) % len(turns)
                rounds[index].append(turns[index](number))
        share = self._foreign_load(load)
        own = [torch.tensor(figures[warmup:], dtype=torch.float64) for figures in rounds]
        return [self._gather(own_RM) for own_RM in own], share

    def _timed(self, action: Callable[[], object]) -> float:
        """Runs an action on all ranks at once; returns microseconds until this device is idle."""
        self._barrier()
        start_s = time.perf_counter()
        action()
        self._wait_for_device()
        return (time.perf_counter() - start_s) * 1e6

    def _barrier(self) -> None:
        """Returns on all ranks at about the same time, when their devices are idle."""
        self._wait_for_device()
        with_typed_errors(dist.barrier)

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
        spent_n3 = self._gather(torch.tensor(load.spent(), dtype=torch.float64))
        # All hosts of the test bed are on one machine, although `nodes` counts each by its name.
        machines = 1 if NETBED_MBIT in os.environ else len(self.nodes)
        # Each rank has measured its whole machine; the mean stands for one machine.
        available_s, used_s, _ = spent_n3.mean(0).tolist()
        own_s = float(spent_n3[:, 2].sum())  # of the processes of all ranks
        return foreign_share(available_s * machines, used_s * machines, own_s)


def with_typed_errors(operation: Callable[[], object]) -> None:
    """Runs one of torch's own collectives; its error becomes one of this package's types.

    Raises:
        CommunicationError: a rank is gone, or time is up.
    """
    try:
        operation()
    except RuntimeError as error:
        raise CommunicationError(
            "the bench's ranks lost one another",
            expected="every rank takes part within --timeout",
            got=first_line(error),
            remedy="look at what the other ranks have printed",
        ) from error


def as_rank[Made: Bench[Any], Result](
    make: Callable[[Any, int, int], Made],
    action: Callable[[Made], Result],
    *,
    timeout_s: float = default_pg_timeout.total_seconds(),
) -> Result:
    """Makes this process a rank of a bench and runs an action there; returns the action's result.

    RANK, WORLD_SIZE and the like must be set. An error of this package ends the process with its
    exit code. If several ranks fail, only the first of them prints its error.

    `make` gets the store, this rank and the number of ranks; `timeout_s` is how long to wait for
    all ranks.

    Raises:
        CommunicationError: rank 0 cannot be reached.
    """
    torch.set_num_threads(1)
    store, rank, world_size = open_store(timeout_s)
    try:
        meet(store, rank, world_size, timeout_s)
        with make(store, rank, world_size) as made:
            return action(made)
    except MegatronSparseError as error:
        code = _first_exit_code(store, rank, world_size, error.exit_code)
        if code is None:  # this rank is the first to fail
            print(f"error: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not `sys.exit`: the traceback keeps the bench's threads alive, which at exit would abort.
        os._exit(error.exit_code if code is None else code)


def _first_exit_code(store: Any, rank: int, world_size: int, own_code: int) -> int | None:
    """Returns the exit code of the rank that failed first; None if this rank is the first.

    One rank's error makes all others fail, mostly with another error: they end with the first one's
    code. Rank 0 hosts the store, so it waits until all ranks have called this, `LINGER_S` at most.
    """
    key = "megatron_sparse/bench_failed"
    code = None
    try:
        if store.add(key, 1) == 1:  # counts the calls of all ranks
            store.set(f"{key}/code", str(own_code))
        else:
            code = int(store.get(f"{key}/code"))
        deadline_s = time.monotonic() + (LINGER_S if rank == 0 else 0.0)
        # Adding 0 reads the count.
        while store.add(key, 0) < world_size and time.monotonic() < deadline_s:
            time.sleep(0.05)
    except RuntimeError:
        return own_code  # the store has ended with rank 0, which printed its error or was killed
    return code


def run[Cases: Rounds](
    bench: type[Bench[Cases]], sweep: Cases, place: NodePlace, json_path: Path | None = None
) -> int:
    """Runs one rank if a launcher started this process, else all ranks; returns the exit code.

    `sweep` has the options; on the test bed an `mbit` of None becomes the rate of its links.
    `json_path` gets one JSON object a line; None writes none.

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
        rows = as_rank(partial(bench, cases), lambda made: made.shown_rows(json_path))
    else:
        flags = [] if json_path is None else [f"--json={json_path}"]
        command = [*cases.NAME.split(), *cases.arguments(), *flags]
        return start_ranks(command, place, ranks, cases.mbit)
    return int(any(row.bad for row in rows))  # 1 if a result is wrong


def start_ranks(command: Sequence[str], place: Place, ranks: int, mbit: int | None) -> int:
    """Runs a command of `megatron-sparse` in a process for each rank, on loopback or the test bed.

    `command` are its words, with its options; `place` chooses loopback or the test bed, whose links
    an `mbit` of None does not limit.

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
