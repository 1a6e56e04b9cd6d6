"""`train` of `scripts/slurm_job.sh`: which failed jobs are started again. Stand-ins for Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands import stand_in
from tests.programs import ended, with_variables


@pytest.mark.parametrize(
    ("code", "gone", "restarts", "state", "requeued"),
    [
        (0, "n1", 0, "RUNNING", False),
        (2, "n1", 0, "RUNNING", False),  # the user's mistake
        (3, "n1", 0, "RUNNING", True),
        (1, "none", 0, "RUNNING", False),  # all nodes answer, so the run failed by itself
        (1, "n1", 3, "RUNNING", False),  # the limit of restarts is reached
        (143, "n1", 0, "COMPLETING", False),  # a rank has asked for the restart already
    ],
)
def test_only_a_lost_node_starts_a_job_again(
    tmp_path: Path, code: int, gone: str, restarts: int, state: str, requeued: bool
) -> None:
    stand_ins = {
        "scontrol": f'[ "$1" = show ] && echo n0 n1 || echo "$*" >>{tmp_path}/asked',
        "srun": f'case "$*" in *nodelist={gone}*) exit 1;; esac',
        "squeue": f"echo {state}",
        "sleep": ":",
    }
    for name, text in stand_ins.items():
        stand_in(tmp_path / name, text)
    variables = with_variables(
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[0-1]",
        SLURM_RESTART_COUNT=str(restarts),
    )
    script = f". scripts/slurm_job.sh; train sh -c 'exit {code}'"
    done = ended(["bash", "-euo", "pipefail", "-c", script], env=variables)
    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeued else "")
    assert ("no longer answer: n1" in done.stderr) is (requeued or restarts == 3)
