"""Runs a function on several gloo ranks, each in its own process."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S

START_METHOD = "spawn"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEADLINE_S,
    linger_s: float = 5.0,
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on every rank, inside a gloo world.

    Args:
        function: can be pickled.
        world_size: ranks.
        args: of the function.
        timeout_s: for all of them.
        linger_s: how long ranks may take to end when all have answered. After a failure gloo holds
            threads until its own timeout, and waiting for them shows nothing.

    Returns:
        The ranks' results, in rank order; they must pickle.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or on a timeout.
    """
    context = mp.get_context(START_METHOD)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank_main, args=(function, rank, world_size, store, results, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(linger_s)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    collected: dict[int, Any] = {}
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
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCHDYNAMO_DISABLE="1")
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


def error_text(call: Callable[[], Any], kind: type[Exception]) -> str:
    """The text of the error of this kind that a call raises; `no error` if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"
