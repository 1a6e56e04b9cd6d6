"""`bench codecs`: the speed of encoding and adding messages, beside a copy and beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench import table
from megatron_sparse.bench.codec import baseline, hashing, records
from megatron_sparse.bench.codec.frame import Case, Row, measure
from megatron_sparse.bench.codec.options import BUCKET_FORMS, RICE_FORMS, CodecSweep
from megatron_sparse.run.json_lines import write_rows
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
    runs = [_measure(sweep) for _ in range(1 if save_baseline is None else 3)]
    rows = runs[-1]
    write_rows(json_path, rows)
    if save_baseline is not None:
        baseline.save(save_baseline, runs, header(sweep))
    if expected is not None:
        baseline.compare(rows, expected, margin)
    return rows


def _measure(sweep: CodecSweep) -> list[dict[str, Any]]:
    with table.torch_threads(sweep.threads):
        print(f"# {header(sweep)}")
        return [row.to_dict() for row in table.print_table(Row.COLUMNS, _rows(sweep), None)]


def header(sweep: CodecSweep) -> str:
    """The machine, the versions and the method of measurement."""
    place = table.describe_cpu(sweep.threads)
    if sweep.device == "cuda":
        place = (
            f"{torch.cuda.get_device_name()}, megatron_sparse {__version__}, "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, events"
        )
    return f"{place}, {sweep.warmup} + {sweep.iters} rounds, medians"


def _rows(sweep: CodecSweep) -> Iterator[Row]:
    device = torch.device(sweep.device)
    for size, dtype, density, form in product(
        sweep.sizes(), sweep.dtypes, sweep.densities, sweep.forms
    ):
        case = Case(size, density, dtype, form, device)
        if form in (*BUCKET_FORMS, *RICE_FORMS):
            tasks = records.make_tasks(case, with_peers=sweep.peers)
        else:
            tasks = hashing.make_tasks(case)
        for task in tasks:
            if task.op in sweep.ops:
                yield from measure(case, task, sweep, peers=sweep.peers)
