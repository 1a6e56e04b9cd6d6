"""`bench prune`: pruning, encoding and decoding, beside plain torch operations.

The whole gradient is compared with the oracles. The peer rounds to nearest where the gradient is
narrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.codec.frame import (
    DTYPES,
    KEY,
    Case,
    Row,
    Task,
    differing,
    measure,
    print_rows,
)
from megatron_sparse.bench.codec.options import PruneSweep
from megatron_sparse.bench.codec.records import Codec
from megatron_sparse.bench.table import Action, describe_cpu
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.formats import torch_codec
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle

PEER = "torch ops"
_ORACLE_CHUNK = 2**20  # elements that the oracle sees at once: it works in float64


def run(sweep: PruneSweep, json_path: Path | None = None) -> list[dict[str, Any]]:
    """Prints the table and returns its rows; CPU only.

    Args:
        sweep: what to measure.
        json_path: file for one JSON object a line; None writes none.

    Raises:
        ConfigError: the file cannot be written.
    """
    head = f"{describe_cpu(sweep.threads)}, residual {sweep.residual_dtype}"
    return [row.to_dict() for row in print_rows(head, sweep, _rows(sweep), json_path)]


def _rows(sweep: PruneSweep) -> Iterator[Row]:
    for size, density in product(sweep.sizes(), sweep.densities):
        case = Case(size, density, sweep.dtype)
        for task in _tasks(case, DTYPES[sweep.residual_dtype]):
            yield from measure(case, task, sweep)


def _tasks(case: Case, residual_dtype: torch.dtype) -> Iterator[Task]:
    codec, grad_N = Codec(case), case.gradient()
    residual_N = torch.zeros(case.numel, dtype=residual_dtype)
    before = grad_N.clone(), residual_N.clone()
    pruning = codec.pruning(residual_N, 1.0)
    nnz = ops.prune_(grad_N, pruning, case.code)
    peer_sum_N = torch.empty(case.numel)
    wrong = _wrong_prune(case, before, (grad_N, residual_N), nnz)
    moved, in_torch = 2 * (grad_N.nbytes + residual_N.nbytes), (*before, peer_sum_N, case.threshold)
    peers: dict[str, Action] = {PEER: lambda: _prune_in_torch(*in_torch)}
    # Pruning a pruned gradient does not change it, so all rounds see the same numbers.
    prune = partial(ops.prune_, grad_N, pruning, case.code)
    yield Task("prune", "-", moved, wrong, prune, peers=peers)

    nnz = torch.count_nonzero(grad_N).view(1)  # right, even where prune_'s own count is not
    given = codec.segments, nnz, codec.spec
    peer_out = torch.full_like(codec.out, 0xFF)
    codec.out.fill_(0xFF)
    encode = codec.encode(grad_N, nnz)
    message = codec.out[: int(encode())]
    record, form = b"".join(message_oracle.encode(grad_N, *given)), codec.record_name()
    moved, wrong = grad_N.nbytes + message.nbytes, differing(message, record)
    peers = {PEER: lambda: torch_codec.encode(grad_N, *given, peer_out)}
    yield Task("encode", form, moved, wrong, encode, peers=peers)

    acc_N, expected_N = torch.zeros(case.numel), torch.zeros(case.numel)
    decode_add = codec.decode_add(acc_N, message)
    decode_add()
    message_oracle.decode_add_(expected_N, record, codec.expected, 0)
    # Each entry is read and written in the fp32 accumulator.
    moved = message.nbytes + 8 * (case.numel if form == "dense" else int(nnz))
    wrong = _unequal(acc_N, expected_N)
    peers = {PEER: lambda: torch_codec.decode_add_(expected_N, message, codec.expected, 0)}
    yield Task("decode_add", form, moved, wrong, decode_add, peers=peers)


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
