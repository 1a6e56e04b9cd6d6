"""Starts ranks on this machine: over loopback, or on the network test bed (`scripts/netbed.sh`).

The test bed gives each host its own network namespace, and limits the rate of the links between
them. Each rank is the same command line with RANK and WORLD_SIZE in its environment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport.netbed import BedLinks

CHECKOUT = Path(__file__).resolve().parents[2]
NETBED = CHECKOUT / "scripts" / "netbed.sh"
"""Makes the test bed."""
GRACE_S = 10.0
"""Seconds that the other ranks get, after a rank has failed, to print why they end."""
POLL_S = 0.05


def started_ranks() -> int | None:
    """How many ranks torchrun, the test bed or the like has started; None where this is no rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def check_place(
    *, netbed: bool, virtual: bool, mbit: int | None, ranks: int | None, started: int | None
) -> None:
    """Refuses flags that contradict each other about where ranks run.

    `mbit` is the rate of the test bed's links. `ranks`: as many as the user asks for; None: any.
    `started`: as many as a launcher has started, see `started_ranks`; None: no launcher.

    Raises:
        ConfigError: the flags contradict each other.
    """
    fits_netbed = mbit is not None and not (virtual or started)
    if netbed and not fits_netbed:
        raise ConfigError(
            "--netbed does not fit the rest",
            expected="--netbed --mbit R, without --virtual, not started by torchrun or the like",
            got="no --mbit" if mbit is None else "--virtual" if virtual else "RANK is set",
            remedy="leave out one of the two, or give the links' rate with --mbit",
        )
    if started and not virtual and ranks not in (None, started):
        raise ConfigError(
            "--ranks is not the number of ranks that were started",
            expected=started,
            got=ranks,
            remedy="leave out --ranks",
        )


def run_netbed(
    command: Sequence[str], ranks: int, links: BedLinks, nodes: int, log: IO[str] | None = None
) -> int:
    """Runs a command as every rank of the network test bed; returns the exit code.

    `links` connect the `nodes` (hosts) or sites. `log` receives the command's output; None: the
    terminal does.

    Raises:
        ConfigError: there is no test bed, because the package is not in a checkout.
    """
    if not NETBED.is_file():
        raise ConfigError(
            "the network test bed is not here",
            expected="megatron_sparse in a checkout, which has scripts/netbed.sh",
            got=f"megatron_sparse in {CHECKOUT}",
            remedy="run from a checkout, or leave out --netbed",
        )
    options = {"ranks": ranks, "mbit": links.mbit, "delay-ms": links.delay_ms}
    options |= {"sites": links.sites, "nodes": nodes}
    # A year, so that the script never ends a long run: operations have timeouts of their own.
    options["timeout"] = 365 * 24 * 3600
    flags: list[str] = []
    for name, value in options.items():
        flags += [f"--{name}", str(value)]
    return run(["bash", str(NETBED), *flags, "--", *command], log)


def run(command: Sequence[str], log: IO[str] | None = None) -> int:
    """Runs a command that can import this package; returns its exit code. Ctrl-C ends both.

    `log` receives the command's output; None: the terminal does.
    """
    return subprocess.run(
        command, env=_environment(), stdout=log, stderr=log, check=False
    ).returncode


def run_loopback(command: Sequence[str], ranks: int, log: IO[str] | None = None) -> int:
    """Runs a command as every rank, over loopback; returns the first exit code that is not 0.

    When a rank has failed, the other ranks are killed after `GRACE_S`. Ctrl-C ends all ranks. `log`
    receives the ranks' output; None: the terminal does.

    Raises:
        CommunicationError: a signal killed a rank.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # the system chooses a free port
        port = probe.getsockname()[1]
    variables = _environment() | {
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = []
    for rank in map(str, range(ranks)):
        rank_variables = variables | {"RANK": rank, "LOCAL_RANK": rank}
        processes.append(subprocess.Popen(command, env=rank_variables, stdout=log, stderr=log))
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def package_path() -> dict[str, str]:
    """The variable PYTHONPATH with which child processes import the package of this checkout.

    Empty if the package is installed: child processes find it without PYTHONPATH.
    """
    if not (CHECKOUT / "pyproject.toml").is_file():
        return {}
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(CHECKOUT) + (os.pathsep + path if path else "")}


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} | os.environ | package_path()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks, but at most `GRACE_S` after a failure; returns the first failure's code.

    Raises:
        CommunicationError: a signal killed a rank, whose exit code is then negative.
    """
    failed, deadline_s = 0, float("inf")
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        if not failed and any(codes):
            failed = next(code for code in codes if code)  # later failures may follow from this one
            deadline_s = time.monotonic() + GRACE_S
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    failed = failed or next((p.returncode for p in processes if p.returncode), 0)
    if failed < 0:
        raise CommunicationError(
            "a rank was killed",
            expected="every rank ends by itself",
            got=f"signal {signal.Signals(-failed).name}",
            remedy="look at the machine's free memory, and at what the rank printed",
        )
    return failed


def command_line(arguments: Sequence[str]) -> list[str]:
    """`megatron-sparse ARGUMENTS` as a process of its own."""
    return [sys.executable, "-m", "megatron_sparse.cli.main", *arguments]
