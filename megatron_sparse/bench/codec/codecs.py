"""`bench codecs`: the speed of encoding and adding messages, beside a copy and beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from megatron_sparse.bench.codec import baseline, hashing, records
from megatron_sparse.bench.codec.frame import Case, CodecRow, measure
from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.table import describe_cpu, local


def run(
    sweep: CodecSweep,
    json_path: Path | None = None,
    check: Path | None = None,
    margin: float = 1.0,
    save_baseline: Path | None = None,
) -> list[CodecRow]:
    """Prints the table and returns its rows.

    Args:
        sweep: the options.
        json_path: file for one JSON object a line; None writes none.
        check: a baseline to compare with, as `save_baseline` writes it.
        margin: a row may exceed its baseline by this many times the noise stated there.
        save_baseline: measures three times and writes ratios and noise to this file.

    Raises:
        ConfigError: an argument is out of range, or a file cannot be read or written.
        MegatronSparseError: a row is slower than the baseline allows.
    """
    expected = None if check is None else baseline.read(check)
    runs = [_measure(sweep, json_path) for _ in range(1 if save_baseline is None else 3)]
    if save_baseline is not None:
        method = f"{describe_cpu(sweep.threads)}, {sweep.warmup} + {sweep.iters} rounds, medians"
        baseline.save(save_baseline, runs, method)
    if expected is not None:
        baseline.compare(runs[-1], expected, margin)
    return runs[-1]


def _where(sweep: CodecSweep) -> str:
    if sweep.device != "cuda":
        return "CPU, medians"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, medians of events' times"


def _rows(sweep: CodecSweep) -> Iterator[CodecRow]:
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


_measure = local(_where, _rows)
