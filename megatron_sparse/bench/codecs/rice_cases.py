"""The cases of `bench codecs` for records of format Rice, on the CPU.

`rice` has values in the gradient's dtype, `rice_q8` to `rice_q2` in few bits. Peers of the encoder:
torch's, and zstd (level 3) on the indices and values of a COO record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_sparse.bench.codecs import cases
from megatron_sparse.bench.codecs.cases import KEY, STEP, Task
from megatron_sparse.bench.table import Action
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.extras import is_installed
from megatron_sparse.formats.message import QUANTISED, WIRE_CODES
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import rice_message as rice_oracle
from megatron_sparse.wire import FORMAT_RICE, rice_span

FORMS = {"rice": None, **{f"rice_{name}": name for name in QUANTISED.values()}}
"""The value dtype of each; None for the gradient's."""
SUMMED = 4
"""Messages that `decode_sum` adds up."""


@dataclass(frozen=True)
class _Case:
    """The common part of the operations."""

    numel: int
    threshold: torch.Tensor
    spec: RecordSpec

    @property
    def segments(self) -> Segments:
        """One, which is not kept."""
        return Segments(torch.tensor([0, self.numel]), torch.zeros(1, dtype=torch.uint8))

    def pruning(self, residual_N: torch.Tensor, leak: float) -> Pruning:
        """Of the whole gradient."""
        return Pruning(residual_N, self.segments.offsets, self.threshold, leak, KEY)

    def expected(self) -> Expected:
        """What a decoder expects of the message."""
        return Expected(self.segments.offsets, self.spec.value_dtype, STEP, rank=0)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of message and scratch; written once, so that their pages exist."""
        offsets, code = self.segments.offsets, self.spec.value_dtype
        sizes = ops.rice_capacity(offsets, code), ops.rice_scratch_capacity(offsets, code)
        out, scratch = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
        return out, scratch


def make_tasks(
    size: int, density: float, dtype: str, form: str, *, peers: bool = True
) -> Iterator[Task]:
    """The operations on one normally distributed gradient of `size` bytes.

    `prune_encode`, `decode_add`, and `decode_sum` of several messages.
    """
    spec = RecordSpec(
        WIRE_CODES[FORMS[form] or dtype], STEP, FORMAT_RICE, log2_span=rice_span(density)
    )
    threshold = cases.threshold_of(density)
    small_N = cases.gradient(cases.ORACLE_NUMEL + 17, dtype)
    wrong = _differences(_Case(small_N.numel(), threshold, spec), small_N)
    grad_N = cases.gradient(size // cases.DTYPES[dtype].itemsize, dtype)
    case = _Case(grad_N.numel(), threshold, spec)
    residual_N, (out, scratch) = torch.zeros(grad_N.numel()), case.buffers()
    pruning = case.pruning(residual_N, leak=0.0)

    # With leak 0 only rounding errors stay in the residual, so all rounds see almost the same.
    def prune_encode() -> torch.Tensor:
        return ops.rice_prune_encode(grad_N, pruning, case.segments, spec, out, scratch)[0]

    used = int(prune_encode())
    yield Task(
        "prune_encode",
        form,
        grad_N.nbytes + 2 * residual_N.nbytes + used,
        wrong,
        prune_encode,
        peers=_peers(grad_N, threshold) if peers else {},
    )
    pruned_N = torch.where(grad_N.abs() > threshold, grad_N, 0)
    used = int(ops.rice_encode(pruned_N, case.segments, spec, out, scratch)[0])
    message, acc_N = out[:used].clone(), torch.zeros(grad_N.numel())
    touched = cases.touched_bytes(pruned_N, whole=False)
    written = torch.zeros(touched, dtype=torch.uint8)
    yield Task(
        "decode_add",
        form,
        used + 2 * touched,
        wrong,
        lambda: ops.decode_add_(acc_N, message, case.expected(), 0),
        lambda: written.fill_(1),
    )
    yield _sum_task(form, case, pruned_N, wrong)


def _sum_task(form: str, case: _Case, pruned_N: torch.Tensor, wrong: int) -> Task:
    """Several ranks' messages in one pass; the peer adds one after another."""
    messages = []
    for rank in range(SUMMED):
        out, scratch = case.buffers()
        moved_N = pruned_N.roll(rank * pruned_N.numel() // SUMMED)
        used = ops.rice_encode(moved_N, case.segments, case.spec, out, scratch)[0]
        messages.append(out[: int(used)].clone())
    sum_N, other_N = torch.zeros(case.numel), torch.zeros(case.numel)

    def in_one_pass() -> None:
        ops.decode_sum_(sum_N, messages, case.expected(), 0, range(SUMMED))

    def one_by_one() -> None:
        for rank, message in enumerate(messages):
            ops.decode_add_(other_N, message, case.expected(), 0, fresh=rank == 0)

    in_one_pass()
    one_by_one()
    wrong += cases.differing(sum_N.view(torch.uint8), other_N.numpy().tobytes())
    moved = sum(message.nbytes for message in messages) + sum_N.nbytes
    stream = torch.zeros(case.numel)
    return Task(
        "decode_sum",
        form,
        moved,
        wrong,
        in_one_pass,
        lambda: stream.fill_(1),
        {"one by one": one_by_one},
    )


def _differences(case: _Case, grad_N: torch.Tensor) -> int:
    """Bytes of message, residual and sum that differ from the oracle's."""
    residual_N = torch.zeros(grad_N.numel())
    (record,), rest_N = rice_oracle.prune_encode(
        grad_N, case.pruning(residual_N, 0.5), case.segments, case.spec
    )
    out, scratch = case.buffers()
    pruning = case.pruning(residual_N, 0.5)
    sizes, _ = ops.rice_prune_encode(grad_N, pruning, case.segments, case.spec, out, scratch)
    wrong = cases.differing(out[: int(sizes)], record)
    wrong += cases.differing(residual_N.view(torch.uint8), rest_N.numpy().tobytes())
    acc_N, expected_N = torch.ones(grad_N.numel()), torch.ones(grad_N.numel())
    message_oracle.decode_add_(expected_N, record, case.expected(), 0)
    message = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    ops.decode_add_(acc_N, message, case.expected(), 0)
    return wrong + cases.differing(acc_N.view(torch.uint8), expected_N.numpy().tobytes())


def _peers(grad_N: torch.Tensor, threshold: torch.Tensor) -> dict[str, Action]:
    rest_N, limit = torch.zeros(grad_N.numel()), float(threshold)

    def in_torch() -> tuple[torch.Tensor, torch.Tensor]:
        return cases.prune_encode_in_torch(grad_N, rest_N, limit)

    if not is_installed("zstandard"):
        return {"torch ops": in_torch}
    import zstandard

    compressor = zstandard.ZstdCompressor(level=3)

    def in_torch_and_zstd() -> list[bytes]:
        return [
            compressor.compress(memoryview(part.view(torch.uint8).numpy())) for part in in_torch()
        ]

    return {"torch ops": in_torch, "torch ops, zstd": in_torch_and_zstd}
