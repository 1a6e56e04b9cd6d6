"""The cases of `bench codecs`: the codec's operations on one gradient, and peers that do the same.

A peer is another library's implementation. Every operation is checked against the oracle here,
before anything is timed. Peers do less work than the codec: none of them writes a header, checks an
index or rounds stochastically.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from megatron_sparse.bench.table import Action
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_NAMES,
    FORMAT_PICI,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS: dict[str, dict[str, Any]] = {
    "auto": {"record_format": FORMAT_ADAPTIVE},
    "coo": {"record_format": FORMAT_COO},
    "pici": {"record_format": FORMAT_PICI},
    "pici_paper": {"record_format": FORMAT_PICI, "paper_order": True},
    "blocks": {"record_format": FORMAT_BLOCKS, "block_size": 256},
}
KEY = 20_250_101
STEP = 1
LINE_BYTES = 64
ORACLE_NUMEL = 2**18
"""Elements that are compared with the oracles, which take about a microsecond an element."""


@dataclass
class Task:
    """An operation to time.

    Attributes:
        op: one of `sweep.OPS`.
        format: the format that the encoder chose, or `pici_paper`.
        bytes_moved: read and written. A scatter-add moves whole cache lines of the accumulator.
        wrong: elements or bytes that differ from the oracle's.
        run: the operation.
        stream: reads the same bytes as the op (encode) or writes the same bytes (decode_add,
            decode_sum), and does nothing else; None without such a measurement.
        peers: other implementations of the operation, by name.
    """

    op: str
    format: str
    bytes_moved: int
    wrong: int
    run: Action
    stream: Action | None = None
    peers: dict[str, Action] = field(default_factory=dict)


def make_tasks(
    size: int, density: float, dtype: str, form: str, *, peers: bool = True
) -> Iterator[Task]:
    """The three operations on one normally distributed gradient of `size` bytes.

    Without peers, this takes up to five times `size` of memory at once, in fp32, besides the
    buffers of the copy that is timed in turn with each operation.
    """
    wrong = check_against_oracles(density, dtype, form)
    grad_N, code = gradient(size // DTYPES[dtype].itemsize, dtype), list(DTYPES).index(dtype)
    case = _Case(torch.tensor([0, grad_N.numel()]), threshold_of(density), code, form, wrong, peers)
    yield _prune_encode_task(case, grad_N)
    rest_N = torch.zeros(grad_N.numel())
    nnz = ops.prune_(grad_N, Pruning(rest_N, case.offsets, case.thresholds, 0.0, KEY), code)
    del rest_N
    yield _encode_task(case, grad_N, nnz)
    yield _decode_task(case, grad_N, nnz)


@dataclass(frozen=True)
class _Case:
    """The common part of the three operations."""

    offsets: torch.Tensor
    thresholds: torch.Tensor
    code: int
    form: str
    wrong: int
    peers: bool

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of message and scratch. They are written once, so that their pages exist."""
        out = ops.message_capacity(self.offsets, self.code)
        scratch = ops.scratch_capacity(self.offsets, self.code)
        return torch.zeros(out, dtype=torch.uint8), torch.zeros(scratch, dtype=torch.uint8)


def _prune_encode_task(case: _Case, grad_N: torch.Tensor) -> Task:
    residual_N, dense = torch.zeros(grad_N.numel()), torch.zeros(1, dtype=torch.uint8)
    out, scratch = case.buffers()

    # With leak 0 only rounding errors stay in the residual, so all rounds see the same numbers.
    def prune_encode() -> torch.Tensor:
        sizes, _ = ops.prune_encode(
            grad_N,
            Pruning(residual_N, case.offsets, case.thresholds, 0.0, KEY),
            Segments(case.offsets, dense),
            RecordSpec(case.code, STEP, **FORMS[case.form]),
            out,
            scratch,
        )
        return sizes

    used = int(prune_encode().sum())
    return Task(
        "prune_encode",
        record_name(out, case.form),
        grad_N.nbytes + 2 * residual_N.nbytes + used,
        case.wrong,
        prune_encode,
        peers=_prune_encode_peers(grad_N, float(case.thresholds)) if case.peers else {},
    )


def _encode(
    case: _Case, grad_N: torch.Tensor, nnz: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> int:
    """Bytes of the message."""
    dense = torch.zeros(1, dtype=torch.uint8)
    sizes = ops.encode(
        grad_N,
        Segments(case.offsets, dense),
        nnz,
        RecordSpec(case.code, STEP, **FORMS[case.form]),
        out,
        scratch,
    )
    return int(sizes)


def _encode_task(case: _Case, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Task:
    out, scratch = case.buffers()
    used = _encode(case, pruned_N, nnz, out, scratch)
    return Task(
        "encode",
        record_name(out, case.form),
        pruned_N.nbytes + used,
        case.wrong,
        lambda: _encode(case, pruned_N, nnz, out, scratch),
        lambda: pruned_N.sum(),
        _encode_peers(pruned_N) if case.peers else {},
    )


def _decode_task(case: _Case, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Task:
    out, scratch = case.buffers()
    used = _encode(case, pruned_N, nnz, out, scratch)
    message, name = out[:used].clone(), record_name(out, case.form)
    acc_N = torch.zeros(pruned_N.numel())
    touched = touched_bytes(pruned_N, whole=name in ("dense", "blocks"))
    written = torch.zeros(touched, dtype=torch.uint8)
    return Task(
        "decode_add",
        name,
        used + 2 * touched,
        case.wrong,
        lambda: ops.decode_add_(acc_N, message, Expected(case.offsets, case.code, STEP, rank=0), 0),
        lambda: written.fill_(1),
        _decode_peers(pruned_N, torch.zeros(pruned_N.numel())) if case.peers else {},
    )


def check_against_oracles(density: float, dtype: str, form: str) -> int:
    """Bytes of message, residual and sum that differ from the oracles' on a smaller gradient."""
    arguments, code = FORMS[form], list(DTYPES).index(dtype)
    grad_N = gradient(ORACLE_NUMEL + 17, dtype)
    offsets, thresholds = torch.tensor([0, grad_N.numel()]), threshold_of(density)
    residual_N, dense = torch.zeros(grad_N.numel()), torch.zeros(1, dtype=torch.uint8)
    expected_N, expected_rest_N, nnz = prune_oracle.prune(
        grad_N, Pruning(residual_N, offsets, thresholds, 0.5, KEY), code
    )
    (record,) = message_oracle.encode(
        expected_N, Segments(offsets, dense), nnz, RecordSpec(code, STEP, **arguments)
    )
    capacity = ops.message_capacity(offsets, code)
    wrong = 0
    for fused in (True, False):
        out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
        rest_N, pruned_N = residual_N.clone(), grad_N.clone()
        if fused:
            sizes, _ = ops.prune_encode(
                grad_N,
                Pruning(rest_N, offsets, thresholds, 0.5, KEY),
                Segments(offsets, dense),
                RecordSpec(code, STEP, **arguments),
                out,
            )
        else:
            counts = ops.prune_(pruned_N, Pruning(rest_N, offsets, thresholds, 0.5, KEY), code)
            sizes = ops.encode(
                pruned_N,
                Segments(offsets, dense),
                counts,
                RecordSpec(code, STEP, **arguments),
                out,
            )
        wrong += differing(out[: int(sizes.sum())], record)
        wrong += differing(rest_N.view(torch.uint8), expected_rest_N.numpy().tobytes())
    acc_N, expected_acc_N = torch.ones(grad_N.numel()), torch.ones(grad_N.numel())
    message_oracle.decode_add_(expected_acc_N, record, Expected(offsets, code, STEP, rank=0), 0)
    message = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    ops.decode_add_(acc_N, message, Expected(offsets, code, STEP, rank=0), 0)
    return wrong + differing(acc_N.view(torch.uint8), expected_acc_N.numpy().tobytes())


def gradient(numel: int, dtype: str) -> torch.Tensor:
    """Normally distributed elements."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator).to(DTYPES[dtype])


def threshold_of(density: float) -> torch.Tensor:
    """The magnitude that `density` of a normal distribution exceeds."""
    limit = NormalDist().inv_cdf(1 - density / 2) if density < 1 else -1.0
    return torch.tensor([limit])


def record_name(out: torch.Tensor, form: str) -> str:
    """The format that the encoder chose, which may be dense."""
    name = FORMAT_NAMES[int(out[5])]
    return form if form == "pici_paper" and name == "pici" else name


def touched_bytes(pruned_N: torch.Tensor, *, whole: bool, line_bytes: int = LINE_BYTES) -> int:
    """Bytes of the fp32 accumulator's cache lines to which values are added."""
    per_line = line_bytes // 4
    lines = pruned_N[: pruned_N.numel() // per_line * per_line].view(-1, per_line)
    count = lines.shape[0] if whole else int((lines != 0).any(1).sum())
    return max(count, 1) * line_bytes


def prune_encode_in_torch(
    grad_N: torch.Tensor, residual_N: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selection with error feedback, leak 0, in whole-tensor operations."""
    sum_N = grad_N + residual_N
    index_K = (sum_N.abs() > limit).nonzero().squeeze(1)
    values_K = sum_N[index_K].to(grad_N.dtype)
    residual_N.copy_(sum_N).index_fill_(0, index_K, 0).mul_(0.0)
    return index_K.int(), values_K


def _prune_encode_peers(grad_N: torch.Tensor, limit: float) -> dict[str, Action]:
    rest_N = torch.zeros(grad_N.numel())
    return {"torch ops": lambda: prune_encode_in_torch(grad_N, rest_N, limit)}


def torch_encode_peers(pruned_N: torch.Tensor) -> dict[str, Action]:
    """Torch's ways to get indices and values, on any device."""

    def nonzero_and_index() -> tuple[torch.Tensor, torch.Tensor]:
        index_K = pruned_N.nonzero().squeeze(1)
        return index_K, pruned_N[index_K]

    return {"torch nonzero": nonzero_and_index, "torch to_sparse": pruned_N.to_sparse}


def _encode_peers(pruned_N: torch.Tensor) -> dict[str, Action]:
    peers = torch_encode_peers(pruned_N)
    if pruned_N.dtype != torch.bfloat16:  # numpy has none
        array = pruned_N.numpy()

        def numpy() -> tuple[np.ndarray, np.ndarray]:
            index = np.flatnonzero(array)
            return index, array[index]

        peers["numpy"] = numpy
    scipy = _scipy_sparse()
    if scipy is not None and pruned_N.dtype == torch.float32:
        peers["scipy coo_array"] = lambda: scipy.coo_array(pruned_N.numpy())
    return peers


def _decode_peers(pruned_N: torch.Tensor, acc_N: torch.Tensor) -> dict[str, Action]:
    index_K = pruned_N.nonzero().squeeze(1)
    values_K = pruned_N[index_K].float()
    sparse = pruned_N.float().to_sparse()
    index, values, array = index_K.numpy(), values_K.numpy(), acc_N.numpy()

    def numpy() -> None:
        array[index] += values

    peers: dict[str, Action] = {
        "torch index_add_": lambda: acc_N.index_add_(0, index_K, values_K),
        "torch add_ sparse": lambda: acc_N.add_(sparse),
        "numpy": numpy,
    }
    scipy = _scipy_sparse()
    if scipy is not None:
        matrix = scipy.coo_array((values, (index,)), shape=(pruned_N.numel(),))
        peers["scipy coo_array"] = lambda: np.add(array, matrix.toarray(), out=array)
    return peers


def _scipy_sparse():
    """`scipy.sparse`, or None if it is not installed: it is a peer, not a dependency."""
    try:
        from scipy import sparse
    except ImportError:
        return None
    return sparse


def differing(got: torch.Tensor, expected: bytes) -> int:
    """The number of bytes that differ; all bytes if the lengths differ."""
    if got.numel() != len(expected):
        return max(got.numel(), len(expected))
    return int((got != torch.frombuffer(bytearray(expected), dtype=torch.uint8)).sum())
