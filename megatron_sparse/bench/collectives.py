"""`bench collectives`: every scheme beside the backend's dense collective, as nccl-tests does it.

`#wrong` counts the elements, on small integers, that differ from the exact sum of what the ranks
selected; a row that has any is not timed. The ranks are processes of this machine over loopback,
hosts of the network test bed, those of an existing launch (torchrun, srun), or virtual.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_sparse import __version__
from megatron_sparse.bench import collective_virtual
from megatron_sparse.bench.collective_launch import CHECKOUT
from megatron_sparse.bench.collective_ranks import RankBench
from megatron_sparse.bench.collective_row import HEADER, Row
from megatron_sparse.bench.collective_sweep import Case, Sweep
from megatron_sparse.bench.table import torch_threads, write_rows
from megatron_sparse.cuda_ext import ops
from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.transport import Link, Topology

Rows = list[dict[str, Any]]
LINGER_S = 5.0


def run_virtual(sweep: Sweep, topology: Topology, json_path: Path | None) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model.

    Raises:
        ConfigError: the JSON file cannot be written, or the ranks do not fit into memory.
        MegatronSparseError: a collective refuses a case.
    """
    where = (
        f"{topology.world_size} virtual ranks, MODELLED times of an alpha-beta clock without local "
        f"work; nodes of {topology.node_sizes}, {_link(topology.intra)} inside, "
        f"{_link(topology.inter)} between them"
    )
    with torch_threads(1):
        _print_head(sweep, where)
        return _print_rows(collective_virtual.rows(sweep, topology, _show_progress), json_path)


def run_rank(sweep: Sweep, json_path: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; rank 0 prints and writes.

    Raises:
        ConfigError: the JSON file cannot be written.
        CommunicationError: a rank is gone.
        SystemExit: an error that another rank has told of already; with its exit code.
    """
    from torch.distributed.rendezvous import rendezvous

    torch.set_num_threads(1)
    store, rank, world_size = next(rendezvous("env://"))
    try:
        with RankBench(sweep, store, rank, world_size) as bench:
            if rank:
                return [row.to_dict() for row in bench.rows(_show_nothing)]
            _print_head(sweep, f"{world_size} ranks, {bench.backend}, hosts: {len(bench.nodes)}")
            return _print_rows(bench.rows(_show_progress), json_path)
    except MegatronSparseError as error:
        if _said_already(store, rank, world_size):
            sys.exit(error.exit_code)
        raise


def _said_already(store: Any, rank: int, world_size: int) -> bool:
    """Whether another rank has an error to print: what one finds makes all fail.

    Rank 0, where the store is, stays until all have asked or `LINGER_S` are over.
    """
    key = "megatron_sparse/bench_failed"
    try:
        said = store.add(key, 1) > 1
        deadline_s = time.monotonic() + (LINGER_S if rank == 0 else 0.0)
        while store.add(key, 0) < world_size and time.monotonic() < deadline_s:
            time.sleep(0.05)
    except RuntimeError:
        return True  # the store went with rank 0, which said so or was killed
    return said


def _print_head(sweep: Sweep, where: str) -> None:
    machine = platform.processor() or platform.machine()
    print(
        f"# {machine}, {os.cpu_count()} cores, megatron_sparse {__version__} {_commit()}, torch "
        f"{torch.__version__}, {ops.supported_isas()[-1]}\n"
        f"# {where}\n# {json.dumps(asdict(sweep))}\n{HEADER}",
        flush=True,
    )


def _print_rows(rows: Iterable[Row], json_path: Path | None) -> Rows:
    """Writes the file anew after each row: a sweep that is stopped keeps what it has."""
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


def _show_progress(number: int, of: int, case: Case) -> None:
    if sys.stderr.isatty():
        what = f"{case.form} {case.scheme} {case.density:g} {case.nbytes} B {case.dtype}"
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
