"""`bench overhead`: the plugin's own cost, dense through it beside Megatron alone, in pairs.

`megatron.overhead` measures in the ranks, which this starts over loopback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_sparse.bench.study.options import OverheadOptions
from megatron_sparse.run import local_ranks


def run(sweep: OverheadOptions, json_path: Path | None = None) -> int:
    """Starts the ranks, which measure and print the table; returns their exit code."""
    # As `train` on CPUs: compiling Megatron's fusions takes half a minute and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    options = [f"--warmup={sweep.warmup}", f"--iters={sweep.iters}"]
    options += [] if json_path is None else [f"--json={json_path}"]
    command = [sys.executable, "-m", "megatron_sparse.megatron.overhead", *options]
    return local_ranks.run_loopback(command, sweep.ranks)
