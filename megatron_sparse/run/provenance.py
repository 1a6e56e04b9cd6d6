"""The provenance of a run: commit, versions, machine, environment, in the run's folder.

`starts.jsonl` has one line for each start of the run, so that a job that Slurm requeued shows on
which nodes and with which variables it continued. Only variables of an allow-list are written, and
secrets in the command are hidden, see `redaction`.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_sparse.config.redaction import recorded_environment, redact_command
from megatron_sparse.extras import installed_version
from megatron_sparse.version import __version__

STARTS_FILE = "starts.jsonl"
PACKAGES = ("torch", "megatron-core", "numpy", "hydra-core", "triton", "transformer-engine")
GIT_S = 20
"""Seconds that git may take: a checkout on a network disk can be slow."""


def record_start(run_dir: Path, command: str) -> None:
    """Appends a line to `starts.jsonl`; of the environment what is on the allow-list.

    Args:
        run_dir: the run's folder, which exists.
        command: the command line.

    Raises:
        OSError: the file cannot be written.
    """
    environment = os.environ  # as the ranks inherit it
    checkout = Path(__file__).resolve().parents[2]
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(command),
        "megatron_sparse": __version__,
        **git_state(checkout),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "host": socket.gethostname(),
        "slurm_job": environment.get("SLURM_JOB_ID"),
        "slurm_restarts": int(environment.get("SLURM_RESTART_COUNT", "0")),
        "environment": recorded_environment(environment),
    }
    with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def git_state(checkout: Path) -> dict[str, Any]:
    """`commit` of the checkout, and `changed_files` that are not as committed; None without git."""
    try:
        # A checkout inside another repository is not that repository's commit.
        top = _git(checkout, "rev-parse", "--show-toplevel").strip()
        if Path(top) != checkout:
            return {"commit": None, "changed_files": None}
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no").splitlines()
        return {
            "commit": _git(checkout, "rev-parse", "HEAD").strip(),
            "changed_files": [line[3:] for line in changed],  # without git's two status letters
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed_files": None}


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        # Otherwise `status` may write to the index while another process uses it.
        ["git", "--no-optional-locks", "-C", str(checkout), *arguments],
        capture_output=True,
        text=True,
        timeout=GIT_S,
        check=True,
    ).stdout
