"""The work of one rank: `main` if our launcher started it (`rank`), else `run_started`.

If torchrun or srun started the ranks, no launcher prepares the run. Rank 0 does, and passes the
folder on to the other ranks in torch's key-value store; srun's is in rank 0's process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import CommunicationError, ConfigError, MegatronSparseError, first_line
from megatron_sparse.run import composition, launchers, preparation, resume
from megatron_sparse.run.full_disk import naming_full_disk
from megatron_sparse.run.interrupt import (
    SIGINT,
    after_ctrl_c,
    end_with_parent,
    ending_where_stuck,
    reported_by_first_rank,
)
from megatron_sparse.run.rank_log import rank_log, write_report
from megatron_sparse.transport.membership import node_of_cluster

_MEETING_TIMEOUT = timedelta(minutes=10)
_NOTHING_LEFT = "-"
"""The answer of rank 0, instead of a folder, where the checkpoint is the last one already."""
_ANSWER, _READERS = "megatron_sparse/run_dir", "megatron_sparse/readers"
_READERS_S = 60


def main(path: Path) -> int:
    """Runs a rank that the launcher started; `path` is the run's `config.yaml`.

    Returns the exit code. If the rank failed, the launcher prints the error from the rank's report.
    """
    try:
        with naming_full_disk(path.parent):
            from megatron_sparse.megatron import training

            # torch is imported: from here on Ctrl-C raises KeyboardInterrupt (see `rank`).
            signal.signal(signal.SIGINT, signal.default_int_handler)
            config = composition.load(path)
            _survive_early_signals(config)
            stopped_at = training.train(config, path.parent)
            _report_early_stop(config, stopped_at, int(os.environ["RANK"]))
    except MegatronSparseError as error:
        write_report(str(error), typed=True)
        return error.exit_code
    except KeyboardInterrupt:
        after_ctrl_c.set()
        return 128 + signal.SIGINT  # the launcher passes Ctrl-C on and reports it
    except SystemExit:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        write_report(f"{type(error).__name__}: {error}", typed=False)
        raise
    return 0


@ending_where_stuck()
def run_started(config: RunConfig, command: str) -> int:
    """Runs a rank that torchrun or srun started; rank 0 makes the run's folder.

    Every rank has the same `config` and `command` (the command line).

    Returns:
        0; 130 after Ctrl-C; or the exit code of an error that another rank has printed already.

    Raises:
        MegatronSparseError: on the first rank that fails.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent
        end_with_parent()
    _survive_early_signals(config)
    with reported_by_first_rank():
        _check_size(config)
    store, rank = _meet()
    run_dir = None
    lock_stack = ExitStack()  # on rank 0 receives the lock of the run's folder
    try:
        config = preparation.decide(config)
        _set_environment(preparation.rank_environment(config))
        # If one machine models several nodes, a variable names the node that this rank is on.
        nodes, ranks_per_node = config.cluster.nodes, config.cluster.ranks_per_node
        os.environ.update(node_of_cluster(os.environ, nodes, ranks_per_node))
        agreed = _agree_on_folder(config, command, store, rank, lock_stack)
        if agreed is None:
            return 0
        config, run_dir = agreed
        from megatron_sparse.megatron import training

        with naming_full_disk(run_dir):
            with rank_log(run_dir, rank, config.cluster.world_size):
                stopped_at = training.train(config, run_dir, store)
            _report_early_stop(config, stopped_at, rank)
    except MegatronSparseError as error:
        if _is_reported(store):
            return error.exit_code
        raise
    except KeyboardInterrupt:
        if rank == 0 and run_dir is not None:
            print(resume.go_on(config, run_dir, command), file=sys.stderr)
        after_ctrl_c.set()
        return 128 + signal.SIGINT
    finally:
        lock_stack.close()
    return 0


def _check_size(config: RunConfig) -> None:
    """Raises a `ConfigError` if WORLD_SIZE is not the configuration's number of ranks."""
    started = int(os.environ["WORLD_SIZE"])
    if started == config.cluster.world_size:
        return
    raise ConfigError(
        "the number of ranks is not the configuration's",
        expected=f"cluster.nodes * cluster.ranks_per_node = {config.cluster.world_size}",
        got=f"{started} ranks were started",
        remedy="set cluster.nodes and cluster.ranks_per_node to what was started",
    )


def _meet() -> tuple[Any, int]:
    """Waits for all ranks; returns their common key-value store, and the number of this rank.

    Raises:
        ConfigError: MASTER_ADDR and MASTER_PORT do not name a free port of rank 0's machine.
    """
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, _ = next(rendezvous("env://", timeout=_MEETING_TIMEOUT))
    except (DistError, ValueError) as error:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ConfigError(
            "the ranks cannot meet",
            expected="the host of rank 0 in MASTER_ADDR, and a free port of it in MASTER_PORT",
            got=f"{address}: {first_line(error)}",
            remedy="set MASTER_PORT to another port, the same on every rank",
        ) from None
    return store, rank


def _set_environment(chosen: dict[str, str]) -> None:
    """Sets variables, and torch's number of threads: torch has read the old OMP_NUM_THREADS."""
    import torch

    threads = chosen["OMP_NUM_THREADS"]
    if threads != os.environ.get("OMP_NUM_THREADS") and threads.isdecimal():
        torch.set_num_threads(int(threads))
    os.environ.update(chosen)


def _survive_early_signals(config: RunConfig) -> None:
    """Ignores `training.save_signal`, which would kill the process, until Megatron handles it."""
    if config.training.save_signal not in (None, SIGINT):
        signal.signal(signal.Signals[config.training.save_signal], signal.SIG_IGN)


def _report_early_stop(config: RunConfig, stopped_at: int | None, rank: int) -> None:
    """On rank 0, prints that a signal has stopped the run, and requeues the job if configured.

    `stopped_at` is the iteration of the checkpoint, or None if no signal stopped the run.
    """
    if stopped_at is None or rank != 0:
        return
    print(
        f"{config.training.save_signal} has ended the run after iteration {stopped_at}; "
        "the checkpoint is saved, and resume=auto continues from it",
        flush=True,
    )
    if config.cluster.requeue:
        launchers.requeue(os.environ)


def _is_reported(store: Any) -> bool:
    """Whether another rank has called this before, and so reports the error that all ranks have."""
    try:
        return store.add("megatron_sparse/failed", 1) > 1  # counts the calls of all ranks
    except RuntimeError:
        return False  # rank 0 has ended, and the store with it


def _agree_on_folder(
    config: RunConfig, command: str, store: Any, rank: int, lock_stack: ExitStack
) -> tuple[RunConfig, Path] | None:
    """Rank 0 makes the run's folder and decides the schedule; the other ranks wait for its answer.

    The other ranks cannot read a resumed run's schedule, because rank 0 replaces its `config.yaml`.

    Returns:
        The run with its schedule, and its folder; None if the checkpoint is the run's last one.
        On rank 0, `lock_stack` receives the folder's lock.

    Raises:
        CommunicationError: rank 0 has ended, or is stopped.
    """
    if rank == 0:
        return _begin_for_all(config, command, store, lock_stack)
    try:
        answer = store.get(_ANSWER).decode()
    except RuntimeError as error:
        raise CommunicationError(
            "rank 0 has not named the run's folder",
            expected=f"its answer within {_MEETING_TIMEOUT.total_seconds():g} s",
            got=first_line(error),
            remedy="look at what rank 0 printed: it has ended, or is stopped",
        ) from None
    if not answer:
        sys.exit(ConfigError.exit_code)  # rank 0 prints the error
    if answer == _NOTHING_LEFT:
        store.add(_READERS, 1)  # rank 0 keeps the store alive until all have read the answer
        return None
    warmup, ramp, folder = json.loads(answer)
    run_dir = Path(folder)
    run_dir.mkdir(parents=True, exist_ok=True)  # nodes may not share a disk
    compression = dataclasses.replace(config.compression, warmup_iters=warmup, ramp_iters=ramp)
    return dataclasses.replace(config, compression=compression), run_dir


def _begin_for_all(
    config: RunConfig, command: str, store: Any, lock_stack: ExitStack
) -> tuple[RunConfig, Path] | None:
    """Begins the run on rank 0, and puts the answer for the other ranks into the store.

    The answer is the run's schedule and folder; empty after an error: the others then exit.
    """
    answer = ""
    try:
        begun = preparation.begin(config, command, lock_stack, in_rank=True)
        answer = _NOTHING_LEFT
        if begun is not None:
            schedule = begun[0].compression
            # With density=auto the ramp is null until a preset is chosen.
            answer = json.dumps([schedule.warmup_iters, schedule.ramp_iters, str(begun[1])])
    finally:
        store.set(_ANSWER, answer)
    if begun is None:  # srun's store ends with rank 0: wait until all others have read the answer
        others, deadline_s = config.cluster.world_size - 1, time.monotonic() + _READERS_S
        while store.add(_READERS, 0) < others and time.monotonic() < deadline_s:
            time.sleep(0.05)
    return begun
