"""`bench prune`: pruning beside plain torch operations, then encoding and decoding.

Pruning is compared with the oracle on the whole gradient; the peer rounds to nearest where the
gradient is narrow. `encode` and `decode_add` are those of `bench codecs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from megatron_sparse.bench.codec.frame import DTYPES, KEY, Case, CodecRow, Task, measure
from megatron_sparse.bench.codec.options import PruneSweep
from megatron_sparse.bench.codec.records import Codec, make_tasks
from megatron_sparse.bench.table import local
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.reference import prune as prune_oracle

PEER = "torch ops"
_ORACLE_CHUNK = 2**20  # elements that the oracle sees at once: it works in float64


def _rows(sweep: PruneSweep) -> Iterator[CodecRow]:
    for size, density in product(sweep.sizes(), sweep.densities):
        case = Case(size, density, sweep.dtype)
        prune = _prune_task(case, DTYPES[sweep.residual_dtype])
        yield from measure(case, prune, sweep)
        # What follows prunes too, and encoding refuses a wrong count.
        for task in [] if prune.wrong else make_tasks(case):
            if task.op in ("encode", "decode_add"):
                yield from measure(case, task, sweep)


def _prune_task(case: Case, residual_dtype: torch.dtype) -> Task:
    grad_N, residual_N = case.gradient(), torch.zeros(case.numel, dtype=residual_dtype)
    before = grad_N.clone(), residual_N.clone()
    prune = partial(ops.prune_, grad_N, Codec(case).pruning(residual_N, 1.0), case.code)
    wrong = _wrong_prune(case, before, (grad_N, residual_N), prune())
    in_torch = partial(_prune_in_torch, *before, torch.empty(case.numel), case.threshold)
    # Pruning a pruned gradient does not change it, so all rounds see the same numbers.
    moved = 2 * (grad_N.nbytes + residual_N.nbytes)
    return Task("prune", "-", moved, wrong, prune, peers={PEER: in_torch})


def _prune_in_torch(
    grad_N: torch.Tensor, residual_N: torch.Tensor, sum_N: torch.Tensor, limit: float
) -> None:
    """Pruning with leak 1 in whole-tensor operations, which reuse `sum_N`."""
    torch.add(grad_N, residual_N, out=sum_N)
    grad_N.copy_(sum_N.masked_fill(sum_N.abs() <= limit, 0))
    residual_N.copy_(sum_N.sub_(grad_N))


def _wrong_prune(
    case: Case,
    before: tuple[torch.Tensor, torch.Tensor],
    after: tuple[torch.Tensor, torch.Tensor],
    nnz: torch.Tensor,
) -> int:
    """Elements of both buffers that differ from the oracle's, plus the error of the count."""
    wrong, nonzero = 0, 0
    threshold_R = torch.tensor([case.threshold])
    for start in range(0, case.numel, _ORACLE_CHUNK):
        part = slice(start, min(start + _ORACLE_CHUNK, case.numel))
        offsets = torch.tensor([0, part.stop - start])
        pruning = Pruning(before[1][part], offsets, threshold_R, 1.0, KEY)
        *expected, count = prune_oracle.prune(before[0][part], pruning, case.code, start)
        wrong += sum(_unequal(a[part], b) for a, b in zip(after, expected, strict=True))
        nonzero += int(count)
    return wrong + abs(int(nnz) - nonzero)


def _unequal(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ."""
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    return int((got.view(bits) != expected.view(bits)).sum())


run = local("CPU", _rows)
