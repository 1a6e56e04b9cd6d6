"""`bench codecs`: the speed of encoding and adding messages, beside a copy and beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.codec import baseline, hashing, records
from megatron_sparse.bench.codec.frame import Case, Row, measure, print_rows
from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.table import describe_cpu
from megatron_sparse.version import __version__


def run(
    sweep: CodecSweep,
    json_path: Path | None = None,
    check: Path | None = None,
    margin: float = 1.0,
    save_baseline: Path | None = None,
) -> list[dict[str, Any]]:
    """Prints the table and returns its rows.

    Args:
        sweep: the options.
        json_path: file for one JSON object a line; None writes none.
        check: a baseline to compare with, as `save_baseline` writes it.
        margin: a row may exceed its baseline by this many times the noise stated there.
        save_baseline: measures three times and writes ratios and noise to this file.

    Returns:
        A dictionary for each row, with the fields of `Row`.

    Raises:
        ConfigError: an argument is out of range, or a file cannot be read or written.
        MegatronSparseError: a row is slower than the baseline allows.
    """
    expected = None if check is None else baseline.read(check)
    head = describe(sweep)
    runs = [
        [row.to_dict() for row in print_rows(head, sweep, _rows(sweep), json_path)]
        for _ in range(1 if save_baseline is None else 3)
    ]
    rows = runs[-1]
    if save_baseline is not None:
        method = f"{head}, {sweep.warmup} + {sweep.iters} rounds, medians"
        baseline.save(save_baseline, runs, method)
    if expected is not None:
        baseline.compare(rows, expected, margin)
    return rows


def describe(sweep: CodecSweep) -> str:
    """The machine and the versions."""
    if sweep.device != "cuda":
        return describe_cpu(sweep.threads)
    return (
        f"{torch.cuda.get_device_name()}, megatron_sparse {__version__}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, events"
    )


def _rows(sweep: CodecSweep) -> Iterator[Row]:
    device, swept = torch.device(sweep.device), (sweep.dtypes, sweep.densities, sweep.forms)
    cases = (
        Case(size, 1.0 if form == "dense_q4" else density, dtype, form, device)
        for size, dtype, density, form in product(sweep.sizes(), *swept)
    )
    for case in dict.fromkeys(cases):
        if case.form in hashing.MAKERS:
            tasks = hashing.MAKERS[case.form](case)
        else:
            tasks = records.make_tasks(case, with_peers=sweep.peers)
        for task in tasks:
            if task.op in sweep.ops:
                yield from measure(case, task, sweep, peers=sweep.peers)
