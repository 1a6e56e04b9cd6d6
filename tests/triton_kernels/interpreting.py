"""Runs Triton's kernels on a machine without a GPU."""

from __future__ import annotations

import sys

from tests.programs import ended, with_variables


def run_interpreted(module: str) -> str:
    """The output of a module of this folder in a process that interprets Triton's kernels.

    A process of its own: Triton reads the variable when it is imported.
    """
    command = [sys.executable, "-m", f"tests.triton_kernels.{module}"]
    variables = with_variables(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = ended(command, 200, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
