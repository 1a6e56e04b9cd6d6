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
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from megatron_sparse.config.redaction import recorded_environment, redact_command
from megatron_sparse.extras import installed_version
from megatron_sparse.version import __version__

STARTS_FILE = "starts.jsonl"
PACKAGES = ("torch", "megatron-core", "numpy", "hydra-core", "triton", "transformer-engine")
GIT_S = 20
"""Seconds that git may take: a checkout on a network disk can be slow."""


def record_start(run_dir: Path, command: str) -> None:
    """Appends a line to `starts.jsonl`, with the variables that are on the allow-list.

    Raises:
        OSError: the file cannot be written, or there is no folder `run_dir`.
    """
    checkout = Path(__file__).resolve().parents[2]
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(command),
        "megatron_sparse": __version__,
        "commit": commit(checkout),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "host": socket.gethostname(),
        "environment": recorded_environment(os.environ),  # as the ranks inherit it
    }
    with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, with `-dirty` if files are not as committed; None without git."""
    # Without the option, `git status` may write to the index while another process uses it.
    git = ["git", "--no-optional-locks", "-C", str(checkout)]
    try:
        # An installed package may lie inside another project's repository.
        if Path(output([*git, "rev-parse", "--show-toplevel"], GIT_S)) != checkout:
            return None
        changed = output([*git, "status", "--porcelain", "--untracked-files=no"], GIT_S)
        return output([*git, "rev-parse", "HEAD"], GIT_S) + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def output(command: Sequence[str], timeout_s: float) -> str:
    """Runs a command; returns what it prints.

    Raises:
        OSError: it cannot be run.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    return done.stdout.strip()
