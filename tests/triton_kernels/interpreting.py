"""Runs Triton's kernels on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(module: str) -> str:
    """The output of a module of this folder in a process that interprets Triton's kernels.

    A process of its own: Triton reads the variable when it is imported.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.triton_kernels.{module}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
