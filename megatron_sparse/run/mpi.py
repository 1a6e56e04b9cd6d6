"""Reads a rank's place from the variables of mpirun: Open MPI's, or MPICH's and Intel MPI's."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from megatron_sparse.errors import ConfigError
from megatron_sparse.run.slurm import FIRST_PORT, PORTS

_NAMES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, ranks, and the same on this host."""
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_JOBID")
"""What names the job, the same for all of its ranks; the first that is set."""


def ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads, for a process that mpirun started.

    Empty if they are set already, for a single process, and for a task of srun. On one host the
    ranks meet over loopback, at a port that follows from the job, or from the process that started
    them all.

    Raises:
        ConfigError: ranks are on several hosts and nobody says where to meet, or a variable is
            missing.
    """
    for rank, size, local_rank, local_size in _NAMES:
        if "RANK" in environment or int(environment.get(size, "1")) == 1:
            continue
        missing = [name for name in (rank, local_rank) if name not in environment]
        if missing and "SLURM_PROCID" in environment:
            continue  # srun sets those of PMI, too
        if missing:
            raise ConfigError(
                f"mpirun has set {size} and not {', '.join(missing)}",
                expected=f"{rank} and {local_rank} for each rank",
                got=f"{size}={environment[size]}",
                remedy="start the ranks with torchrun or srun, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each",
            )
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(environment)}
        if environment.get(local_size) != environment[size]:
            if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
                raise ConfigError(
                    "the ranks do not know where to meet",
                    expected="MASTER_ADDR and MASTER_PORT, the same for all ranks of mpirun",
                    got=f"{environment[size]} ranks on several hosts",
                    remedy="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (Open MPI), or -genv",
                )
            meeting = {}
        return {
            "RANK": environment[rank],
            "WORLD_SIZE": environment[size],
            "LOCAL_RANK": environment[local_rank],
            **{name: environment.get(name, value) for name, value in meeting.items()},
        }
    return {}


def _port(environment: Mapping[str, str]) -> str:
    named = [environment[name] for name in _JOBS if name in environment]
    job = named[0] if named else str(os.getppid())
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)
