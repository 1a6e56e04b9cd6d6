"""Runs a function on several gloo ranks, each in its own process.

Ranks are forked from a server that has imported torch and the package, or Megatron too, in tenths
of a second; to import them takes each of them seconds. A test that needs ranks with a Python of
their own starts programs (`tests.programs`).
"""

import inspect
import multiprocessing as mp
import os
import pickle
import queue
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, wraps
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.waiting import DEADLINE_S

CONTEXT = mp.get_context("forkserver")
PACKAGE, MEGATRON = "tests.imported_package", "tests.megatron.imported_megatron"
"""Modules with all that a server imports."""
_starting = threading.Lock()


@cache
def _server(imported: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([imported])
    return server


def start_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
    imported: str = PACKAGE,
) -> Any:
    """Starts one rank, in this process's environment; returns its process.

    The ranks meet at the file `store`. The queue `results` gets the rank, its pickled result, and a
    traceback or None. `imported`: what its server has imported, `PACKAGE` or `MEGATRON`.
    """
    given = dict(os.environ), function, rank, world_size, store, results, args
    return fork(_rank_main, given, imported)


def fork(target: Callable[..., None], args: tuple[Any, ...], imported: str = PACKAGE) -> Any:
    """Calls a function in a process that is forked from a server; returns the process."""
    process = CONTEXT.Process(target=target, args=args)
    connect = _server(imported).connect_to_new_process
    with _starting, mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()
    return process


def run_command(
    words: Sequence[str],
    world_size: int,
    output: Path,
    imported: str = PACKAGE,
    timeout_s: float = DEADLINE_S,
) -> list[int]:
    """Runs a Python script, or `megatron-sparse`, as each rank, with torchrun's variables.

    `output` gets what the ranks print. Returns their exit codes; that of a rank that was killed at
    the limit of `timeout_s` is -9.
    """
    # Not above: each rank imports this module.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # As torchrun's agent does: a port that was found free could be taken before rank 0 listens.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    given = dict(os.environ) | meeting, words, output
    processes = [fork(command_main, (rank, *given), imported) for rank in range(world_size)]
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + 60)  # the others may wait for it
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def command_main(
    rank: int, environment: dict[str, str], words: Sequence[str], output: Path
) -> None:
    """What `run_command` calls in each rank's process."""
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    with output.open("a") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    mp.set_start_method("fork", force=True)  # as in a process of its own
    program, *others = words
    if program.endswith(".py"):
        sys.argv = list(words)
        runpy.run_path(program, run_name="__main__")
    else:
        import_module("megatron_sparse.cli.main").main(others)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEADLINE_S,
    linger_s: float = 5.0,
    imported: str = PACKAGE,
    lost: Sequence[int] = (),
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on every rank, inside a gloo world.

    Returns the ranks' results; they and the function must pickle. `timeout_s` is for all ranks.
    `linger_s`: how long ranks may take to end when all have answered: after a failure gloo holds
    threads until its own timeout, and waiting for them shows nothing. `imported`: see `start_rank`.
    The function kills the ranks `lost`: their results are None.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or on a timeout.
    """
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            start_rank(function, rank, world_size, store, results, args, imported)
            for rank in range(world_size)
        ]
        try:
            return _collect(processes, results, time.monotonic() + timeout_s, lost)
        finally:
            for process in processes:
                process.join(linger_s)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(processes: list[Any], results: Any, deadline: float, lost: Sequence[int]) -> list[Any]:
    collected: dict[int, Any] = dict.fromkeys(lost)
    while len(collected) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            late = time.monotonic() > deadline
            dead = [
                i
                for i, p in enumerate(processes)
                if p.exitcode not in (None, 0) and i not in collected
            ]
            if late or dead:
                missing = sorted(set(range(len(processes))) - set(collected))
                codes = [p.exitcode for p in processes]
                raise AssertionError(
                    f"no answer from ranks {missing}; exit codes {codes}"
                ) from None
            continue
        if error is not None:
            raise AssertionError(f"rank {rank} failed:\n{error}")
        collected[rank] = pickle.loads(value)
    return [collected[rank] for rank in range(len(processes))]


def _rank_main(
    environment: dict[str, str],
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment | {"GLOO_SOCKET_IFNAME": "lo"})
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        # Bytes, not tensors: a queue shares a tensor's memory, which dies with the rank.
        results.put((rank, pickle.dumps(function(rank, world_size, *args)), None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def on_ranks(
    world_size: int | str, before: Callable[[], None] | None = None, **options: Any
) -> Callable[..., Any]:
    """Makes a test of a function, which then runs on each of so many ranks.

    The function's first argument is the rank; pytest gives the others, which must pickle. One of
    them may be the number of ranks: `world_size` is then its name. `before` is called first on each
    rank.
    """

    def test_of(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(**given: Any) -> None:
            size = given[world_size] if isinstance(world_size, str) else world_size
            # Pickled by its name, which is the test's; the ranks take the function out of it.
            run_ranks(_body_of_test, size, test, given, before, **options)

        signature = inspect.signature(body)
        _, *others = signature.parameters.values()
        vars(test)["__signature__"] = signature.replace(parameters=others)
        return test

    return test_of


def _body_of_test(
    rank: int,
    world_size: int,
    test: Any,
    given: Mapping[str, Any],
    before: Callable[[], None] | None,
) -> None:
    if before is not None:
        before()
    test.__wrapped__(rank, **given)
