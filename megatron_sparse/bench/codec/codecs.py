"""`bench codecs`: the speed of encoding and adding messages, beside a copy and beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from megatron_sparse.bench.codec import hashing, records
from megatron_sparse.bench.codec.frame import Case, CodecRow, measure
from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.table import local


def _where(sweep: CodecSweep) -> str:
    if sweep.device != "cuda":
        return "CPU, medians"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, medians of events' times"


def _rows(sweep: CodecSweep) -> Iterator[CodecRow]:
    """Measures the chosen operations of every case that the sweep asks for; yields their rows."""
    device = torch.device(sweep.device)
    combinations = product(sweep.sizes(), sweep.dtypes, sweep.densities, sweep.forms)
    # `dense_q4` holds every element, so its density is 1; `fromkeys` below drops repeated cases.
    cases = [
        Case(size, 1.0 if form == "dense_q4" else density, dtype, form, device)
        for size, dtype, density, form in combinations
    ]
    for case in dict.fromkeys(cases):
        if case.form in hashing.MAKERS:
            tasks = hashing.MAKERS[case.form](case)
        else:
            tasks = records.make_tasks(case, with_peers=sweep.peers)
        for task in tasks:
            if task.op in sweep.ops:
                yield from measure(case, task, sweep)


run = local(_where, _rows)
