"""How fast pruning, encoding and decoding are, next to a plain copy of the same bytes.

Every row is first checked against the oracle; `#wrong` counts elements (bytes, for a message) that
differ, and a row that has any is not timed. Operation, copy and peer are measured in turn, in the
same run, and medians are reported: what slows the machine down for a while slows all three.

`copy` is that of `bench/table.py`. The peer is the same thing in plain torch operations, rounding
to nearest where the gradient is narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch

from megatron_sparse.bench import table
from megatron_sparse.bench.table import Action, cell
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.formats import torch_codec
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.run.json_lines import write_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESIDUAL_DTYPES = ("fp32", "bf16")
PEER = "torch ops"
KEY = 20_250_101
STEP = 1
_ORACLE_CHUNK = 2**20  # elements that the oracle sees at once: it works in float64


@dataclass
class Row:
    """One line of the table and one JSON object; times are medians in microseconds."""

    op: str
    format: str
    dtype: str
    density: float
    count: int
    bytes_moved: int
    time_us: float | None
    copy_us: float | None
    peer: str
    peer_us: float | None
    device: str
    wrong: int


@dataclass
class Task:
    """An operation to time: the op itself, its peer, and how many elements it got wrong."""

    op: str
    format: str
    bytes_moved: int
    wrong: int
    run: Action
    peer: Action


def run(
    min_bytes: int = 2**20,
    max_bytes: int = 2**28,
    densities: Sequence[float] = (0.01,),
    dtype: str = "fp32",
    residual_dtype: str = "fp32",
    warmup: int = 3,
    iters: int = 20,
    json_path: Path | str | None = None,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Prints the table and returns its rows; CPU only.

    Args:
        min_bytes: size of the smallest gradient; each is four times the one before.
        max_bytes: no gradient is larger.
        densities: fractions that the threshold lets through, in (0, 1).
        dtype: of the gradient and of the values on the wire: fp32, bf16 or fp16.
        residual_dtype: fp32 or bf16.
        warmup: rounds before the first that counts.
        iters: rounds that count, each timing operation, copy and peer once.
        json_path: file for one JSON object a line; None writes none.
        threads: torch's threads while this runs; None leaves them.

    Returns:
        A dictionary for each row, with the fields of `Row`.

    Raises:
        ConfigError: an argument is out of range, or the file cannot be written.
    """
    sweep = table.SizeSweep(
        min_bytes=min_bytes, max_bytes=max_bytes, warmup=warmup, iters=iters, threads=threads
    )
    table.check_arguments(
        "bench prune",
        [
            *sweep.range_checks(),
            ("density", densities, all(0 < d < 1 for d in densities), "above 0 and below 1"),
            ("dtype", dtype, dtype in DTYPES, " | ".join(DTYPES)),
            ("residual_dtype", residual_dtype, residual_dtype in RESIDUAL_DTYPES, "fp32 | bf16"),
        ],
    )
    rows: list[Row] = []
    with table.torch_threads(threads):
        print(
            f"# {table.describe_cpu(threads)}, residual {residual_dtype}, {warmup} + {iters} "
            "rounds, medians"
        )
        print(
            f"# {'size(B)':>12} {'count':>12} {'type':>5} {'op':>11} {'format':>6} {'density':>8} "
            f"{'moved(B)':>12} {'time(us)':>10} {'copy(us)':>10} {'peer(us)':>10} {'time/copy':>9} "
            f"{'GB/s':>7} {'#wrong':>7}"
        )
        for size, density in product(sweep.sizes(), densities):
            for task in _tasks(size, density, dtype, residual_dtype):
                rows.append(_measure(task, size, density, dtype, warmup, iters))
                print(_line(rows[-1], size), flush=True)
    result = [asdict(row) for row in rows]
    write_rows(None if json_path is None else Path(json_path), result)
    return result


def _tasks(size: int, density: float, dtype: str, residual_dtype: str) -> Iterator[Task]:
    """The operations on one gradient of normally distributed elements, checked."""
    code, itemsize = list(DTYPES).index(dtype), DTYPES[dtype].itemsize
    numel = size // itemsize
    generator = torch.Generator().manual_seed(numel)
    grad_N = torch.randn(numel, generator=generator).to(DTYPES[dtype])
    residual_N = torch.zeros(numel, dtype=DTYPES[residual_dtype])
    offsets = torch.tensor([0, numel])
    # The magnitude that `density` of a normal distribution exceeds.
    limit = NormalDist().inv_cdf(1 - density / 2)
    thresholds = torch.tensor([limit])

    before = grad_N.clone(), residual_N.clone()
    nnz = ops.prune_(grad_N, residual_N, offsets, thresholds, 1.0, code, KEY)
    wrong = _wrong_prune(before, (grad_N, residual_N), nnz, limit, code)
    peer_grad_N, peer_residual_N = before
    peer_sum_N = torch.empty(numel)
    # What is pruned already is pruned to itself again, so the rounds see the same numbers.
    yield Task(
        "prune",
        "-",
        2 * numel * (itemsize + residual_N.element_size()),
        wrong,
        lambda: ops.prune_(grad_N, residual_N, offsets, thresholds, 1.0, code, KEY),
        lambda: _prune_in_torch(peer_grad_N, peer_residual_N, peer_sum_N, limit),
    )

    nnz = torch.count_nonzero(grad_N).view(1)  # right, even where prune_'s own count is not
    dense = torch.zeros(1, dtype=torch.uint8)
    capacity = ops.message_capacity(offsets, code)
    out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
    peer_out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
    used = int(ops.encode(grad_N, Segments(offsets, dense), nnz, RecordSpec(code, STEP), out).sum())
    message = out[:used]
    records = message_oracle.encode(grad_N, Segments(offsets, dense), nnz, RecordSpec(code, STEP))
    wrong = _wrong_bytes(message, b"".join(records))
    form = ("dense", "coo")[int(out[5])]
    yield Task(
        "encode",
        form,
        size + used,
        wrong,
        lambda: ops.encode(grad_N, Segments(offsets, dense), nnz, RecordSpec(code, STEP), out),
        lambda: torch_codec.encode(
            grad_N, Segments(offsets, dense), nnz, RecordSpec(code, STEP), peer_out
        ),
    )

    acc_N, expected_N = torch.zeros(numel), torch.zeros(numel)
    ops.decode_add_(acc_N, message, Expected(offsets, code, STEP, rank=0), 0)
    message_oracle.decode_add_(
        expected_N, b"".join(records), Expected(offsets, code, STEP, rank=0), 0
    )
    # Each entry is read and written in the fp32 accumulator.
    touched = numel if form == "dense" else int(nnz)
    yield Task(
        "decode_add",
        form,
        used + 8 * touched,
        _differing(acc_N, expected_N),
        lambda: ops.decode_add_(acc_N, message, Expected(offsets, code, STEP, rank=0), 0),
        lambda: torch_codec.decode_add_(
            expected_N, message, Expected(offsets, code, STEP, rank=0), 0
        ),
    )


def _prune_in_torch(
    grad_N: torch.Tensor, residual_N: torch.Tensor, sum_N: torch.Tensor, limit: float
) -> None:
    """Pruning with leak 1 in whole-tensor operations, which reuse `sum_N`."""
    torch.add(grad_N, residual_N, out=sum_N)
    grad_N.copy_(sum_N.masked_fill(sum_N.abs() <= limit, 0))
    residual_N.copy_(sum_N.sub_(grad_N))


def _measure(task: Task, size: int, density: float, dtype: str, warmup: int, iters: int) -> Row:
    row = Row(
        op=task.op,
        format=task.format,
        dtype=dtype,
        density=density,
        count=size // DTYPES[dtype].itemsize,
        bytes_moved=task.bytes_moved,
        time_us=None,
        copy_us=None,
        peer=PEER,
        peer_us=None,
        device="cpu",
        wrong=task.wrong,
    )
    if task.wrong:
        return row
    actions = (task.run, table.copy_action(task.bytes_moved), task.peer)
    times_us = table.time_in_turn(actions, warmup, iters)
    row.time_us, row.copy_us, row.peer_us = map(median, times_us)
    return row


def _wrong_prune(
    before: tuple[torch.Tensor, torch.Tensor],
    after: tuple[torch.Tensor, torch.Tensor],
    nnz: torch.Tensor,
    limit: float,
    code: int,
) -> int:
    """Elements of both buffers that the oracle disagrees with, and how far the count is off."""
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


def _wrong_bytes(got: torch.Tensor, expected: bytes) -> int:
    if got.numel() != len(expected):
        return max(got.numel(), len(expected))
    return int((got != torch.frombuffer(bytearray(expected), dtype=torch.uint8)).sum())


def _line(row: Row, size: int) -> str:
    ratio = bandwidth = None
    if row.time_us is not None and row.copy_us is not None:
        ratio = row.time_us / row.copy_us
        bandwidth = row.bytes_moved / row.time_us / 1e3
    return (
        f"  {size:>12} {row.count:>12} {row.dtype:>5} {row.op:>11} {row.format:>6} "
        f"{row.density:>8g} {row.bytes_moved:>12} {cell(row.time_us, 10, 1)} "
        f"{cell(row.copy_us, 10, 1)} {cell(row.peer_us, 10, 1)} {cell(ratio, 9, 2)} "
        f"{cell(bandwidth, 7, 2)} {row.wrong:>7}"
    )
