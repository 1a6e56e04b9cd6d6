"""Reads rank and world size from Slurm's variables; asks Slurm for host names and for a requeue.

`slurm_ranks` turns the variables of an `srun` task into the variables that torch reads. Host names
and requeues come from `scontrol`, which compute nodes have. `environment` sets variables for the
duration of a block.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_sparse.errors import ConfigError
from megatron_sparse.run.provenance import output

SCONTROL_S = 30
"""Seconds that Slurm's controller may take to answer."""
KILL_S = 120
"""Seconds that Slurm may take to end a requeued job; KillWait is 30 by default."""
FIRST_PORT, PORTS = 20_000, 10_000


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, ... as torch reads them, for a task that `srun` started.

    Empty if torchrun has set them already, or if this is no srun of several tasks. A batch job's
    script has SLURM_PROCID too, but its SLURM_STEP_NUM_TASKS is 1 or missing.

    Raises:
        ConfigError: MASTER_ADDR is not set, and Slurm does not say which node is the first.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    is_task = "SLURM_PROCID" in environment and tasks != 1
    if "RANK" in environment or not is_task:
        return {}
    address = environment.get("MASTER_ADDR")
    # From the job's number: the same port on every rank, but not for two jobs on one node.
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
        ConfigError: Slurm does not name the nodes.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        ask = ["scontrol", "show", "hostnames", nodes]
        found = output(ask, SCONTROL_S).split() if nodes else []
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
    """Asks Slurm to end this job and start it again, with the same job number and script.

    Call it on one rank, as its last action: Slurm then kills all processes of the job. This process
    waits up to `KILL_S` for that.

    Raises:
        ConfigError: this is no Slurm job, or Slurm refuses.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is not None and job == environment.get("SLURM_ARRAY_JOB_ID"):
        # The last task of a job array has the array's number, which would requeue all its tasks.
        job = f"{job}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        if job is None:
            raise FileNotFoundError("no SLURM_JOB_ID in the environment")
        output(["scontrol", "requeue", job], SCONTROL_S)
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None)
        raise ConfigError(
            "the job cannot be requeued",
            expected="a batch job of Slurm that was submitted with --requeue",
            got=(printed or str(error)).strip(),
            remedy="submit it again with resume=auto: the checkpoint is saved; or leave out "
            "cluster.requeue",
        ) from None
    # Wait to be killed: submitit, if it started this process, takes its exit for the run's end.
    time.sleep(KILL_S)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables in the block, also for child processes; then restores the environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
