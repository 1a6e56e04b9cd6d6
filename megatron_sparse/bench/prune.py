"""How fast pruning, encoding and decoding are, next to a plain copy of the same bytes.

Every row is first checked against the oracle; `#wrong` counts elements (bytes, for a message) that
differ, and a row that has any is not timed. Operation, copy and peer are measured in turn, in the
same run, and medians are reported: a temporary slowdown of the machine affects all three.

`copy` is that of `bench/table.py`. The peer is the same thing in plain torch operations, rounding
to nearest where the gradient is narrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_sparse.bench import table
from megatron_sparse.bench.codecs.cases import (
    DTYPES,
    KEY,
    STEP,
    Task,
    differing,
    gradient,
    threshold_of,
)
from megatron_sparse.bench.codecs.row import OperationRow
from megatron_sparse.bench.codecs.sweep import PruneSweep
from megatron_sparse.bench.table import Columns, print_table
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.formats import torch_codec
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle

PEER = "torch ops"
_ORACLE_CHUNK = 2**20  # elements that the oracle sees at once: it works in float64


class Row(OperationRow):
    """See `OperationRow`."""

    COLUMNS = Columns(
        "size >14 size(B) | count >12 | dtype >5 type | op >11 | format >6 | density >8g | "
        "bytes_moved >12 moved(B) | time_us >10.1f time(us) | copy_us >10.1f copy(us) | "
        "peer_us >10.1f peer(us) | time_us/copy_us >9.2f time/copy | "
        "bytes_moved/time_us/1000 >7.2f GB/s | wrong >7 #wrong"
    )


def run(sweep: PruneSweep, json_path: Path | None = None) -> list[dict[str, Any]]:
    """Prints the table and returns its rows; CPU only.

    Args:
        sweep: what to measure.
        json_path: file for one JSON object a line; None writes none.

    Raises:
        ConfigError: the file cannot be written.
    """
    with table.torch_threads(sweep.threads):
        print(
            f"# {table.describe_cpu(sweep.threads)}, residual {sweep.residual_dtype}, "
            f"{sweep.warmup} + {sweep.iters} rounds, medians"
        )
        return [row.to_dict() for row in print_table(Row.COLUMNS, _rows(sweep), json_path)]


def _rows(sweep: PruneSweep) -> Iterator[Row]:
    for size, density in product(sweep.sizes(), sweep.densities):
        for task in _tasks(size, density, sweep.dtype, sweep.residual_dtype):
            row = Row.of(task, size, density, sweep.dtype)
            row.peer = PEER
            if not task.wrong:
                copy = table.copy_action(task.bytes_moved)
                times_us = table.time_in_turn(
                    (task.run, copy, task.peers[PEER]), sweep.warmup, sweep.iters
                )
                row.time_us, row.copy_us, row.peer_us = map(median, times_us)
            yield row


def _tasks(size: int, density: float, dtype: str, residual_dtype: str) -> Iterator[Task]:
    """The operations on one gradient of normally distributed elements, checked."""
    code, itemsize = list(DTYPES).index(dtype), DTYPES[dtype].itemsize
    numel = size // itemsize
    grad_N = gradient(numel, dtype)
    residual_N = torch.zeros(numel, dtype=DTYPES[residual_dtype])
    offsets = torch.tensor([0, numel])
    thresholds = threshold_of(density)
    limit = float(thresholds)

    before = grad_N.clone(), residual_N.clone()
    pruning = Pruning(residual_N, offsets, thresholds, 1.0, KEY)
    nnz = ops.prune_(grad_N, pruning, code)
    wrong = _wrong_prune(before, (grad_N, residual_N), nnz, limit, code)
    peer_grad_N, peer_residual_N = before
    peer_sum_N = torch.empty(numel)
    # Pruning a pruned gradient does not change it, so all rounds see the same numbers.
    yield Task(
        "prune",
        "-",
        2 * numel * (itemsize + residual_N.element_size()),
        wrong,
        lambda: ops.prune_(grad_N, pruning, code),
        peers={PEER: lambda: _prune_in_torch(peer_grad_N, peer_residual_N, peer_sum_N, limit)},
    )

    nnz = torch.count_nonzero(grad_N).view(1)  # right, even where prune_'s own count is not
    dense = torch.zeros(1, dtype=torch.uint8)
    capacity = ops.message_capacity(offsets, code)
    out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
    peer_out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
    given = (Segments(offsets, dense), nnz, RecordSpec(code, STEP))
    used = int(ops.encode(grad_N, *given, out).sum())
    message = out[:used]
    records = message_oracle.encode(grad_N, *given)
    wrong = differing(message, b"".join(records))
    form = ("dense", "coo")[int(out[5])]
    yield Task(
        "encode",
        form,
        size + used,
        wrong,
        lambda: ops.encode(grad_N, *given, out),
        peers={PEER: lambda: torch_codec.encode(grad_N, *given, peer_out)},
    )

    acc_N, expected_N = torch.zeros(numel), torch.zeros(numel)
    expected = Expected(offsets, code, STEP, rank=0)
    ops.decode_add_(acc_N, message, expected, 0)
    message_oracle.decode_add_(expected_N, b"".join(records), expected, 0)
    # Each entry is read and written in the fp32 accumulator.
    touched = numel if form == "dense" else int(nnz)
    yield Task(
        "decode_add",
        form,
        used + 8 * touched,
        _differing(acc_N, expected_N),
        lambda: ops.decode_add_(acc_N, message, expected, 0),
        peers={PEER: lambda: torch_codec.decode_add_(expected_N, message, expected, 0)},
    )


def _prune_in_torch(
    grad_N: torch.Tensor, residual_N: torch.Tensor, sum_N: torch.Tensor, limit: float
) -> None:
    """Pruning with leak 1 in whole-tensor operations, which reuse `sum_N`."""
    torch.add(grad_N, residual_N, out=sum_N)
    grad_N.copy_(sum_N.masked_fill(sum_N.abs() <= limit, 0))
    residual_N.copy_(sum_N.sub_(grad_N))


def _wrong_prune(
    before: tuple[torch.Tensor, torch.Tensor],
    after: tuple[torch.Tensor, torch.Tensor],
    nnz: torch.Tensor,
    limit: float,
    code: int,
) -> int:
    """Elements of both buffers that differ from the oracle's, plus the error of the count."""
    wrong, nonzero = 0, 0
    numel = before[0].numel()
    for start in range(0, numel, _ORACLE_CHUNK):
        part = slice(start, min(start + _ORACLE_CHUNK, numel))
        offsets = torch.tensor([0, part.stop - start])
        expected = prune_oracle.prune(
            before[0][part],
            Pruning(before[1][part], offsets, torch.tensor([limit]), 1.0, KEY),
            code,
            start,
        )
        wrong += sum(_differing(a[part], b) for a, b in zip(after, expected[:2], strict=True))
        nonzero += int(expected[2])
    return wrong + abs(int(nnz) - nonzero)


def _differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ."""
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    return int((got.view(bits) != expected.view(bits)).sum())
