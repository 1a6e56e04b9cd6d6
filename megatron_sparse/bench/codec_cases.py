"""What `bench codecs` measures: the codec's operations on one gradient, and others' ways to do it.

Every operation is checked against the oracle here, before anything is timed. Peers do less than we
do where they can: none of them writes a header, checks an index or rounds stochastically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.formats.header import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_NAMES,
    FORMAT_PICI,
)
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS: dict[str, dict[str, Any]] = {
    "auto": {"form": FORMAT_ADAPTIVE},
    "coo": {"form": FORMAT_COO},
    "pici": {"form": FORMAT_PICI},
    "pici_paper": {"form": FORMAT_PICI, "paper_order": True},
    "blocks": {"form": FORMAT_BLOCKS, "block_size": 256},
}
KEY = 20_250_101
EPOCH = 1
LINE_BYTES = 64
ORACLE_NUMEL = 2**18
"""Elements that are compared with the oracles, which take about a microsecond for each."""

type Action = Callable[[], object]


@dataclass
class Task:
    """An operation to time.

    Attributes:
        op: `prune_encode`, `encode` or `decode_add`.
        format: what the record became, or `pici_paper`.
        bytes_moved: read and written. A scatter-add moves whole cache lines of the accumulator.
        wrong: elements or bytes that differ from the oracle's.
        run: the operation.
        stream: reads what the op reads (encode) or writes what it writes (decode_add); or None.
        peers: the same by other means.
    """

    op: str
    format: str
    bytes_moved: int
    wrong: int
    run: Action
    stream: Action | None
    peers: dict[str, Action]


def make_tasks(size: int, density: float, dtype: str, form: str) -> Iterator[Task]:
    """The three operations on one normally distributed gradient of `size` bytes."""
    wrong = check_against_oracles(density, dtype, form)
    arguments, code = FORMS[form], list(DTYPES).index(dtype)
    grad_N = _gradient(size // DTYPES[dtype].itemsize, dtype)
    numel = grad_N.numel()
    residual_N, offsets = torch.zeros(numel), torch.tensor([0, numel])
    thresholds = _threshold(density)
    dense = torch.zeros(1, dtype=torch.uint8)
    out = torch.zeros(ops.message_capacity(offsets, code), dtype=torch.uint8)
    scratch = torch.zeros(ops.scratch_capacity(offsets, code), dtype=torch.uint8)

    # Leak 0 leaves nothing behind but rounding errors, so that all rounds see the same numbers.
    def prune_encode() -> torch.Tensor:
        sizes, _ = ops.prune_encode(
            grad_N, residual_N, offsets, thresholds, offsets, dense, 0.0, code, KEY, EPOCH, out,
            scratch, **arguments,
        )  # fmt: skip
        return sizes

    used = int(prune_encode().sum())
    limit, rest_N = float(thresholds), torch.zeros(numel)
    yield Task(
        "prune_encode", _name(out, form), grad_N.nbytes + 2 * residual_N.nbytes + used, wrong,
        prune_encode, None, {"torch ops": lambda: _prune_encode_in_torch(grad_N, rest_N, limit)},
    )  # fmt: skip

    pruned_N = grad_N.clone()
    nnz = ops.prune_(pruned_N, torch.zeros(numel), offsets, thresholds, 0.0, code, KEY)
    used = int(
        ops.encode(pruned_N, offsets, dense, nnz, code, EPOCH, out, scratch, **arguments).sum()
    )
    message, name = out[:used].clone(), _name(out, form)
    yield Task(
        "encode", name, pruned_N.nbytes + used, wrong,
        lambda: ops.encode(pruned_N, offsets, dense, nnz, code, EPOCH, out, scratch, **arguments),
        lambda: pruned_N.sum(), _encode_peers(pruned_N),
    )  # fmt: skip

    acc_N, peer_acc_N = torch.zeros(numel), torch.zeros(numel)
    touched = _touched_bytes(pruned_N, whole=name in ("dense", "blocks"))
    written = torch.zeros(touched, dtype=torch.uint8)
    yield Task(
        "decode_add", name, used + 2 * touched, wrong,
        lambda: ops.decode_add_(acc_N, message, offsets, code, EPOCH, 0, rank=0),
        lambda: written.fill_(1), _decode_peers(pruned_N, peer_acc_N),
    )  # fmt: skip


def check_against_oracles(density: float, dtype: str, form: str) -> int:
    """Bytes of message, residual and sum that differ from the oracles' on a smaller gradient."""
    arguments, code = FORMS[form], list(DTYPES).index(dtype)
    grad_N = _gradient(ORACLE_NUMEL + 17, dtype)
    offsets, thresholds = torch.tensor([0, grad_N.numel()]), _threshold(density)
    residual_N, dense = torch.zeros(grad_N.numel()), torch.zeros(1, dtype=torch.uint8)
    expected_N, expected_rest_N, nnz = prune_oracle.prune(
        grad_N, residual_N, offsets, thresholds, 0.5, code, KEY
    )
    (record,) = message_oracle.encode(expected_N, offsets, dense, nnz, code, EPOCH, **arguments)
    capacity = ops.message_capacity(offsets, code)
    wrong = 0
    for fused in (True, False):
        out = torch.full((capacity,), 0xFF, dtype=torch.uint8)
        rest_N, pruned_N = residual_N.clone(), grad_N.clone()
        if fused:
            sizes, _ = ops.prune_encode(
                grad_N, rest_N, offsets, thresholds, offsets, dense, 0.5, code, KEY, EPOCH, out,
                **arguments,
            )  # fmt: skip
        else:
            counts = ops.prune_(pruned_N, rest_N, offsets, thresholds, 0.5, code, KEY)
            sizes = ops.encode(pruned_N, offsets, dense, counts, code, EPOCH, out, **arguments)
        wrong += _differing(out[: int(sizes.sum())], record)
        wrong += _differing(rest_N.view(torch.uint8), expected_rest_N.numpy().tobytes())
    acc_N, expected_acc_N = torch.ones(grad_N.numel()), torch.ones(grad_N.numel())
    message_oracle.decode_add_(expected_acc_N, record, offsets, code, EPOCH, 0, rank=0)
    message = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    ops.decode_add_(acc_N, message, offsets, code, EPOCH, 0, rank=0)
    return wrong + _differing(acc_N.view(torch.uint8), expected_acc_N.numpy().tobytes())


def _gradient(numel: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator).to(DTYPES[dtype])


def _threshold(density: float) -> torch.Tensor:
    """The magnitude that `density` of a normal distribution exceeds."""
    limit = NormalDist().inv_cdf(1 - density / 2) if density < 1 else -1.0
    return torch.tensor([limit])


def _name(out: torch.Tensor, form: str) -> str:
    """The format that the encoder chose, which may be dense."""
    name = FORMAT_NAMES[int(out[5])]
    return form if form == "pici_paper" and name == "pici" else name


def _touched_bytes(pruned_N: torch.Tensor, *, whole: bool) -> int:
    """Bytes of the accumulator's cache lines in which there is something to add."""
    per_line = LINE_BYTES // 4
    lines = pruned_N[: pruned_N.numel() // per_line * per_line].view(-1, per_line)
    count = lines.shape[0] if whole else int((lines != 0).any(1).sum())
    return max(count, 1) * LINE_BYTES


def _prune_encode_in_torch(
    grad_N: torch.Tensor, residual_N: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    sum_N = grad_N + residual_N
    index_K = (sum_N.abs() > limit).nonzero().squeeze(1)
    values_K = sum_N[index_K].to(grad_N.dtype)
    residual_N.copy_(sum_N).index_fill_(0, index_K, 0).mul_(0.0)
    return index_K.int(), values_K


def _encode_peers(pruned_N: torch.Tensor) -> dict[str, Action]:
    def nonzero_and_index() -> tuple[torch.Tensor, torch.Tensor]:
        index_K = pruned_N.nonzero().squeeze(1)
        return index_K, pruned_N[index_K]

    peers: dict[str, Action] = {
        "torch nonzero": nonzero_and_index, "torch to_sparse": pruned_N.to_sparse,
    }  # fmt: skip
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
    """`scipy.sparse`, or None where it is not installed: it is a peer, not a dependency."""
    try:
        from scipy import sparse
    except ImportError:
        return None
    return sparse


def _differing(got: torch.Tensor, expected: bytes) -> int:
    if got.numel() != len(expected):
        return max(got.numel(), len(expected))
    return int((got != torch.frombuffer(bytearray(expected), dtype=torch.uint8)).sum())
