"""`bench collectives`: every scheme beside the backend's dense collective, as nccl-tests does it.

`#wrong` counts the elements, on small integers, that differ from the exact sum of what the ranks
selected; a row that has any is not timed. The ranks are processes of this machine over loopback,
hosts of the network test bed, those of an existing launch (torchrun, srun), or virtual.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_sparse import __version__
from megatron_sparse.bench import collective_virtual
from megatron_sparse.bench.collective_ranks import RankBench
from megatron_sparse.bench.collective_row import HEADER, Row
from megatron_sparse.bench.collective_sweep import Sweep
from megatron_sparse.bench.table import write_rows
from megatron_sparse.cuda_ext import ops
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport import Link, Topology

NETBED = Path(__file__).resolve().parents[2] / "scripts" / "netbed.sh"


def run_virtual(sweep: Sweep, topology: Topology, json_path: Path | None) -> list[dict[str, Any]]:
    """Prints the table of a virtual cluster, labelled as a model.

    Raises:
        ConfigError: the JSON file cannot be written.
    """
    _print_head(sweep, topology.world_size, "virtual cluster: a MODEL, not measured")
    print(f"# nodes of {topology.node_sizes}, {_link(topology.intra)} inside, "
          f"{_link(topology.inter)} between them", flush=True)  # fmt: skip
    return _print_rows(collective_virtual.rows(sweep, topology), json_path)


def run_rank(sweep: Sweep, json_path: Path | None) -> list[dict[str, Any]]:
    """One rank's part where RANK and WORLD_SIZE are set; rank 0 prints and writes.

    Raises:
        ConfigError: the JSON file cannot be written.
        CommunicationError: a rank is gone.
    """
    torch.set_num_threads(1)
    with RankBench(sweep) as bench:
        if bench.rank:
            return [row.to_dict() for row in bench.rows()]
        _print_head(sweep, bench.world_size, f"{bench.name} on {bench.device.type}")
        return _print_rows(bench.rows(), json_path)


def launch(arguments: list[str], ranks: int, mbit: float | None) -> None:
    """Starts the ranks, each with this command line, and waits for them.

    Args:
        arguments: of `bench collectives`, without those that say where to run.
        ranks: how many.
        mbit: None for processes over loopback, else the rate of each host of the test bed.

    Raises:
        ConfigError: there is no test bed here.
        CommunicationError: a rank failed; it has said why.
    """
    command = [sys.executable, "-m", "megatron_sparse.cli", "bench", "collectives", *arguments]
    if mbit is not None:
        if not NETBED.exists():
            raise ConfigError(
                "the network test bed is not here",
                expected="a checkout with scripts/netbed.sh",
                got=f"megatron_sparse in {NETBED.parents[1]}",
                remedy="run from a checkout, or leave out --netbed",
            )
        starter = ["bash", str(NETBED), "--ranks", str(ranks), "--mbit", f"{mbit:g}", "--"]
        code = subprocess.run([*starter, *command], check=False).returncode
    else:
        code = _run_here(command, ranks)
    if code:
        raise CommunicationError(
            "the bench's ranks did not end well",
            expected="exit code 0 of every rank, no #wrong",
            got=f"exit code {code}",
            remedy="see what they printed",
        )


def _run_here(command: list[str], ranks: int) -> int:
    """Runs processes over loopback; the first that fails ends the others and gives the code."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    running = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        while running:
            for process in running:
                if process.poll():
                    return process.returncode
            running = [process for process in running if process.returncode is None]
            time.sleep(0.1)
        return 0
    finally:
        for process in running:
            process.kill()
            process.wait()


def _print_head(sweep: Sweep, ranks: int, where: str) -> None:
    machine = platform.processor() or platform.machine()
    print(
        f"# {machine}, {os.cpu_count()} cores, megatron_sparse {__version__} {_commit()}, torch "
        f"{torch.__version__}, {ops.supported_isas()[-1]}\n"
        f"# {ranks} ranks, {where}\n# {sweep}\n{HEADER}",
        flush=True,
    )


def _print_rows(rows: Iterable[Row], json_path: Path | None) -> list[dict[str, Any]]:
    """Writes the file anew after each row: a sweep that is stopped keeps what it has."""
    done: list[dict[str, Any]] = []
    for row in rows:
        print(row.line(), flush=True)
        done.append(row.to_dict())
        write_rows(json_path, done)
    if any(row["noisy"] for row in done):
        print("# noisy: other programs took more than a tenth of the machine; measure again")
    return done


def _link(link: Link) -> str:
    rate = f"{8e-9 / link.beta_s:g} Gbit/s" if link.beta_s else "no limit"
    return f"{rate} and {link.alpha_s * 1e6:g} us"


def _commit() -> str:
    git = ["git", "-C", str(NETBED.parents[1]), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
