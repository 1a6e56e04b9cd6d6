"""Runs other programs, as a user would from the checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
SMALL_RUN = (
    "data=mock",
    "data.vocab_size=512",
    "megatron.num_workers=0",
    "megatron.log_interval=1",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.seq_length=32",
    "training.lr_warmup_iters=1",
)
"""Overrides for a training that takes seconds."""
Done = subprocess.CompletedProcess[str]


def ended(
    command: Sequence[str | Path],
    limit_s: float | None = DEADLINE_S,
    cwd: Path | str = ROOT,
    **options: Any,
) -> Done:
    """A program that has ended, with whatever code, and what it printed.

    Without `limit_s` pytest's own limit holds; `options` are those of `subprocess.run`.
    """
    return subprocess.run(
        command, cwd=cwd, timeout=limit_s, text=True, capture_output=True, **options
    )


def output_of(
    command: Sequence[str | Path], limit_s: float | None = DEADLINE_S, **options: Any
) -> str:
    """What a program prints that must end with 0, errors included."""
    done = ended(command, limit_s, **options)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def with_variables(**variables: str) -> dict[str, str]:
    """This process's environment with these changes."""
    return os.environ | variables


def why_no_bed(name: str, tools: Sequence[str], tried: Sequence[str], path: str) -> str | None:
    """The reason why this machine cannot have a test bed in namespaces; None if it can.

    `tried`: a command in such namespaces. `path`: where the programs are.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"{name} needs root on Linux"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        return f"{name} needs {', '.join(missing)}: bash scripts/system_packages.sh"
    done = ended(tried)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None
