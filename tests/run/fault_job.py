"""A run whose ranks only write into its folder, started in each way that a run can be.

`start` is for a process of its own. Everything but Megatron is the product's: the folder's lock,
torch's agent, the ranks' meeting. srun is a stand-in that sets its variables.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.megatron import arguments, checkpoint_fit, checkpoint_folder, training
from megatron_sparse.run import launch, rank
from megatron_sparse.run.composition import compose
from megatron_sparse.run.interrupt import end_at_once
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
MARKS = "writers"
"""In a run's folder: a line of START, rank and process for each time a rank has written."""
START = "FAULT_JOB_START"
FIRST = "first"
RANKS = 2


def checkpoint(run_dir: Path, iteration: int = 10) -> Path:
    """A complete one of the format torch, without anything in it."""
    folder = run_dir / arguments.CHECKPOINTS
    saved = checkpoint_folder.checkpoint(folder, iteration) / "mp_rank_00"
    saved.mkdir(parents=True)
    torch.save({}, saved / "model_optim_rng.pt")
    checkpoint_folder.track(folder, iteration)
    return saved.parent


def train(config: Any, run_dir: Path, store: Any = None) -> None:
    """In place of Megatron's loop. The first start saves a checkpoint and goes on for ever."""
    name, own = os.environ[START], os.environ["RANK"]
    if name == FIRST and own == "0":
        checkpoint(run_dir, 1)
    for _ in range(10**9 if name == FIRST else 3):
        with (run_dir / MARKS).open("a") as marks:
            marks.write(f"{name} {own} {os.getpid()}\n")
        time.sleep(0.01)
    if store is not None:
        # Rank 0's process is the store, where the others may still have to read their folder.
        ended = store.add("ended", 1)
        if own == "0" and ended < RANKS:
            until(lambda: store.add("ended", 0) == RANKS)


def _run(overrides: list[str]) -> int:
    try:
        return launch.run(compose(overrides), "megatron-sparse train")
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _torchrun(overrides: list[str]) -> int:
    from torch.distributed.run import main

    main(["--standalone", f"--nproc-per-node={RANKS}", "-m", __name__, *overrides])
    return 0


def _tasks(variables: Callable[[int], dict[str, str]], overrides: list[str]) -> int:
    """Forks the ranks, hands INT and TERM on to them, and waits for them."""
    tasks = []
    for number in range(RANKS):
        task = os.fork()
        if task == 0:
            os.environ.update(variables(number))
            code = _run(overrides)
            sys.stdout.flush()
            end_at_once(code)
        tasks.append(task)

    def hand_on(received: int, frame: object) -> None:
        for task in tasks:
            os.kill(task, received)

    signal.signal(signal.SIGINT, hand_on)
    signal.signal(signal.SIGTERM, hand_on)
    return max(os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) % 256 for task in tasks)


def _srun(overrides: list[str]) -> int:
    step = {"SLURM_STEP_NUM_TASKS": str(RANKS), "SLURM_JOB_ID": str(os.getpid())}
    step["MASTER_ADDR"] = "127.0.0.1"
    return _tasks(lambda n: step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}, overrides)


LAUNCHERS = {"local": _run, "torchrun": _torchrun, "srun": _srun}


def start(launcher: str, name: str, overrides: list[str], output: str) -> None:
    """Starts the run and exits with its code.

    `launcher`: of `LAUNCHERS`. `name`: `FIRST`, or of a start that ends by itself; empty for a run
    that really trains. The run's output is appended to `output`.
    """
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    if name:
        os.environ[START] = name
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _stand_in()
    sys.exit(LAUNCHERS[launcher](overrides))


def _stand_in() -> None:
    if START not in os.environ:
        return
    launch.RANK = __name__
    training.train = train
    checkpoint_fit.check = lambda *_: None  # it imports Megatron


if __name__ == "__main__":
    # A rank that torch's agent has started: the launcher's, or torchrun's.
    from tests.run import fault_job

    fault_job._stand_in()
    if sys.argv[1].endswith(".yaml"):
        rank.main()
    sys.exit(fault_job._run(sys.argv[1:]))
