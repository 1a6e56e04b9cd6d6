"""Reads a rank's place from Slurm's variables, and asks Slurm for hosts and for a requeue.

`slurm_ranks` turns those of an `srun` task into those that torch reads. Everything else comes from
`scontrol`, which compute nodes have. `environment` sets variables for a while.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_sparse.errors import ConfigError

SCONTROL_S = 30
"""Seconds that Slurm's controller may take to answer."""
KILL_S = 120
"""Seconds that Slurm may take to end a requeued job; KillWait is 30 by default."""
FIRST_PORT, PORTS = 20_000, 10_000
"""The port follows from the job's number, because jobs that share a node must not share a port."""


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads, for a task that `srun` started.

    Empty if torchrun has set them already, and outside an srun of several tasks. The script of a
    batch job has SLURM_PROCID too, but SLURM_STEP_NUM_TASKS is 1 or missing there.

    Raises:
        ConfigError: MASTER_ADDR is not set, and Slurm does not say which node is the first.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    is_task = "SLURM_PROCID" in environment and tasks != 1
    if "RANK" in environment or not is_task:
        return {}
    address = environment.get("MASTER_ADDR")
    port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": address or _first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _first_host(environment: Mapping[str, str]) -> str:
    """The first node of this task's step, where rank 0 is.

    Raises:
        ConfigError: Slurm does not say.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        found = _scontrol("show", "hostnames", nodes).split() if nodes else []
        reason = "no nodes"
    except (OSError, subprocess.SubprocessError) as error:
        found, reason = [], str(error)
    if not found:
        raise ConfigError(
            "the ranks do not know where to meet",
            expected="MASTER_ADDR in the environment of srun, or an answer of scontrol",
            got=reason,
            remedy="export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)",
        )
    return found[0]


def requeue(environment: Mapping[str, str]) -> None:
    """Asks Slurm to end this job and start it again, with the same number and script.

    Call it on one rank, at its very end: Slurm kills the job's processes, and this one waits up to
    `KILL_S` to be killed.

    Raises:
        ConfigError: this is no Slurm job, or Slurm refuses.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is not None and job == environment.get("SLURM_ARRAY_JOB_ID"):
        # An array's last task has the array's number, which stands for all of its tasks.
        job = f"{job}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        if job is None:
            raise FileNotFoundError("no SLURM_JOB_ID in the environment")
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        raise ConfigError(
            "the job cannot be requeued",
            expected="a batch job of Slurm that was submitted with --requeue",
            got=(said or str(error)).strip(),
            remedy="submit it again with resume=auto: the checkpoint is saved; or leave out "
            "cluster.requeue",
        ) from None
    # If this rank ended first, its starter (submitit) would take that for the end of the run.
    time.sleep(KILL_S)


def _scontrol(*arguments: str) -> str:
    """Runs `scontrol`; returns its output.

    Raises:
        OSError: it is not on PATH.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    return subprocess.run(
        ["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_S, check=True
    ).stdout


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for this process and its children; then the whole environment is as before."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
