"""The encoded bucket: one record for each wire segment, back to back in one buffer.

A record is a 48-byte header and 16-byte aligned sections (`formats/header.py`). Records of one
shard are adjacent, so a bucket is encoded once and each shard's bytes can be sent apart.

The compiled codec of `cuda_ext` does the work, on the CPU and on CUDA: the same bytes. On CUDA each
call waits once for the device: record sizes must be known before records can be sent, and a bad
record before its sum is used. In capacity mode sizes are known beforehand, and the calls of a
bucket leave what they report in its message's `Reports`, read once at the end. Where the extension
has no CUDA part it is `torch_codec` that works on CUDA tensors (`codec_choice`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats import torch_codec
from megatron_sparse.formats.codec_choice import is_compiled
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
)

VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in VALUE_DTYPES.items()}
WIRE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2}
FORMAT_CODES = {
    "auto": FORMAT_ADAPTIVE,
    "coo": FORMAT_COO,
    "pici": FORMAT_PICI,
    "dense": FORMAT_DENSE,
    "blocks": FORMAT_BLOCKS,
}
"""What `scheme.format` may name, and the blocks of `scheme.name=omnireduce`."""


def wire_dtype_of(grad_dtype: torch.dtype, wire_dtype: str | None) -> str:
    """The dtype in which values travel: the configured one, never wider than the gradient."""
    own = _NAME_OF[grad_dtype]
    return own if wire_dtype is None or own != "fp32" else wire_dtype


@dataclass
class Message:
    """One rank's encoded bucket.

    Attributes:
        buffer: uint8; the first `nbytes` of it are records, what follows is workspace.
        layout: how the bucket was cut.
        segment_bytes: bytes of each record, or of its place where there are slots.
        value_dtype: fp32, bf16 or fp16.
        epoch: the step, checked by the receiver.
        counted: `nnz`, None until the reports have been read.
        slots: where the records lie in capacity mode; None for back to back.
        reports: in capacity mode of all codec calls on the bucket; None where each is looked at.
        counted_pruned: `pruned_nnz`, None until the reports have been read.
    """

    buffer: torch.Tensor
    layout: Layout
    segment_bytes: list[int]
    value_dtype: str
    epoch: int
    counted: int | None
    slots: Slots | None = None
    reports: Reports | None = None
    counted_pruned: int | None = None

    @property
    def nnz(self) -> int:
        """Non-zero elements, kept ones included. Reads the reports where they have not been."""
        self._read_counts()
        assert self.counted is not None, "the encoder's count is one of the reports"
        return self.counted

    @property
    def pruned_nnz(self) -> int:
        """Those of them in segments that are pruned. Reads the reports as `nnz` does."""
        self._read_counts()
        assert self.counted_pruned is not None, "counted together with nnz"
        return self.counted_pruned

    def _read_counts(self) -> None:
        if self.counted is None:
            assert self.reports is not None, "what counts later reports"
            self.reports.read()

    def take_counts(self, nnz_S: torch.Tensor) -> None:
        """Is told the non-zero elements of each segment, on the CPU."""
        counts = nnz_S.numpy()
        self.counted = int(counts.sum())
        self.counted_pruned = int(counts[self.layout.pruned_S].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(self.segment_bytes)

    def shard_bytes(self) -> list[int]:
        """Bytes of the records of each shard, in shard order."""
        cuts = self.layout.shard_segments
        return [sum(self.segment_bytes[a:b]) for a, b in itertools.pairwise(cuts)]


class MessageBuffers:
    """Reuses encode and receive buffers: fresh pages cost more than the copy that fills them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def take(
        self, purpose: str, numel: int, device: torch.device, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """A 1-D buffer of `numel` elements with undefined content, grown when needed."""
        key = (purpose, device, dtype)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            held = self._buffers[key] = torch.empty(numel, device=device, dtype=dtype)
        return held[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._buffers.values())


def encode(
    bucket: Bucket,
    layout: Layout,
    nnz_R: torch.Tensor,
    value_dtype: str,
    epoch: int,
    buffers: MessageBuffers,
    form: str = "coo",
    block_size: int = ops.DEFAULT_BLOCK_SIZE,
) -> Message:
    """Encodes the pruned bucket, each segment as asked for or, where that is not smaller, dense.

    Args:
        bucket: its gradient holds zeros wherever nothing is sent; it is only read.
        layout: the cut that `nnz_R` was counted for.
        nnz_R: int64 non-zero counts of the layout's ranges.
        value_dtype: dtype of the values in the message.
        epoch: the step.
        buffers: where the message's memory comes from.
        form: one of `FORMAT_CODES`.
        block_size: of blocks.

    Raises:
        ExtensionError: counts that are not the gradient's; Pici or blocks where `torch_codec`
            works.
    """
    segment_count = layout.segment_keep.numel()
    nnz_R = nnz_R.cpu()
    nnz_S = torch.zeros(segment_count, dtype=torch.int64)
    nnz_S.index_add_(0, layout.range_segment, nnz_R)
    out = _take_message(bucket, layout, value_dtype, buffers)
    sizes = encode_segments(
        bucket.grad_N,
        layout.segment_offsets,
        layout.segment_keep,
        nnz_S,
        value_dtype,
        epoch,
        out,
        buffers,
        form=FORMAT_CODES[form],
        block_size=block_size,
    )
    return _counted(Message(out, layout, sizes.tolist(), value_dtype, epoch, None), nnz_S)


def encode_segments(
    values_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz_S: torch.Tensor | None,
    value_dtype: str,
    epoch: int,
    out: torch.Tensor,
    buffers: MessageBuffers,
    *,
    form: int,
    block_size: int = ops.DEFAULT_BLOCK_SIZE,
    slots_S: torch.Tensor | None = None,
    reports: Reports | None = None,
) -> torch.Tensor:
    """Encodes any pruned vector; `ops.encode` describes the arguments.

    Args:
        values_N: only read.
        segment_offsets: S+1 offsets from 0 to N.
        segment_dense: uint8, 1 for segments that are always dense.
        nnz_S: int64 counts, on any device; None has them counted.
        value_dtype: dtype of the values in the records.
        epoch: the step.
        out: uint8 of `ops.message_capacity` bytes. Mutated.
        buffers: where scratch memory comes from.
        form: one of the values of `FORMAT_CODES`.
        block_size: of blocks.
        slots_S: where the records begin; None for back to back.
        reports: takes what the call reports, which is then not waited for.

    Returns:
        int64 bytes, of each record or, with slots, of each slot: on the CPU, but for records on
        CUDA with `reports`.

    Raises:
        ExtensionError: slots where `torch_codec` works, or too small ones.
    """
    device, code = values_N.device, WIRE_CODES[value_dtype]
    compiled = is_compiled(device)
    if nnz_S is None and not (compiled and device.type == "cuda"):
        nnz_S = _count(values_N, segment_offsets)
    if not compiled:
        assert nnz_S is not None, "counted above"
        _refuse_slots(slots_S)
        return torch_codec.encode(
            values_N, segment_offsets, segment_dense, nnz_S, code, epoch, out, form=form
        )
    sizes = ops.encode(
        values_N,
        segment_offsets,
        segment_dense,
        nnz_S,
        code,
        epoch,
        out,
        _take_scratch(segment_offsets, value_dtype, buffers, device),
        form=form,
        block_size=block_size,
        slots_S=slots_S,
        reports=reports,
    )
    return sizes if slots_S is None else slots_S.diff()


def prune_encode(
    bucket: Bucket,
    layout: Layout,
    residual_N: torch.Tensor,
    thresholds_R: torch.Tensor,
    leak: float,
    value_dtype: str,
    key: int,
    epoch: int,
    buffers: MessageBuffers,
    form: str,
    block_size: int,
    capacity_S: torch.Tensor | None = None,
) -> Message:
    """Selects from a bucket and encodes what was selected, in one pass.

    Args:
        bucket: its gradient is only read; where `torch_codec` works it becomes what is sent, and
            there are two passes.
        layout: the cut that the thresholds are of.
        residual_N: fp32 or bf16. Mutated.
        thresholds_R: fp32 thresholds of the layout's ranges.
        leak: factor on what is not selected.
        value_dtype: dtype of the values in the message.
        key: of stochastic rounding.
        epoch: the step.
        buffers: where the message's memory comes from.
        form: one of `FORMAT_CODES`.
        block_size: of blocks.
        capacity_S: int64, the most elements that each segment of the layout may send, which fixes
            the message's size; None for no limit.

    Raises:
        ExtensionError: Pici, blocks or a capacity where `torch_codec` works.
    """
    grad_N, code = bucket.grad_N, WIRE_CODES[value_dtype]
    slots = reports = None
    if capacity_S is not None:
        reports = Reports()
        slots = Slots.of(
            layout.segment_offsets, layout.segment_keep, capacity_S, code, FORMAT_CODES[form]
        )
    slots_S = None if slots is None else slots.offsets
    if not is_compiled(grad_N.device):
        _refuse_slots(slots_S)
        nnz_R = ops.prune_(grad_N, residual_N, layout.range_offsets, thresholds_R, leak, code, key)
        return encode(bucket, layout, nnz_R, value_dtype, epoch, buffers, form, block_size)
    out = _take_message(bucket, layout, value_dtype, buffers)
    sizes, nnz_S = ops.prune_encode(
        grad_N,
        residual_N,
        layout.range_offsets,
        thresholds_R,
        layout.segment_offsets,
        layout.segment_keep,
        leak,
        code,
        key,
        epoch,
        out,
        _take_scratch(layout.segment_offsets, value_dtype, buffers, grad_N.device),
        form=FORMAT_CODES[form],
        block_size=block_size,
        capacity_S=capacity_S,
        slots_S=slots_S,
        reports=reports,
    )
    if slots is None or reports is None:
        return _counted(Message(out, layout, sizes.tolist(), value_dtype, epoch, None), nnz_S)
    message = Message(out, layout, list(slots.sizes), value_dtype, epoch, None, slots, reports)
    reports.add(nnz_S, message.take_counts, is_status=False)
    return message


def _counted(message: Message, nnz_S: torch.Tensor) -> Message:
    message.take_counts(nnz_S)
    return message


def _refuse_slots(slots_S: torch.Tensor | None) -> None:
    if slots_S is not None:
        raise ExtensionError(
            "capacity mode needs the compiled codec",
            expected="the extension's CUDA part",
            got="torch operations",
            remedy="build the CUDA part, or leave scheme.capacity out",
        )


def _take_message(
    bucket: Bucket, layout: Layout, value_dtype: str, buffers: MessageBuffers
) -> torch.Tensor:
    capacity = ops.message_capacity(layout.segment_offsets, WIRE_CODES[value_dtype])
    return buffers.take(f"message:{bucket.name}", capacity, bucket.grad_N.device)


def _take_scratch(
    segment_offsets: torch.Tensor, value_dtype: str, buffers: MessageBuffers, device: torch.device
) -> torch.Tensor | None:
    """Shared by all buckets: it is free again when the encoder returns. None on CUDA."""
    if device.type == "cuda":
        return None
    return buffers.take(
        "scratch", ops.scratch_capacity(segment_offsets, WIRE_CODES[value_dtype]), device
    )


def _count(values_N: torch.Tensor, segment_offsets: torch.Tensor) -> torch.Tensor:
    pieces = values_N.split(segment_offsets.diff().tolist())
    if values_N.device.type == "cpu":
        # On a CPU torch takes ten times as long for it as numpy where a third is not zero.
        return torch.tensor([_nonzero(piece) for piece in pieces], dtype=torch.int64)
    counts = [piece.count_nonzero() for piece in pieces]
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)


def _nonzero(values_N: torch.Tensor) -> int:
    if values_N.dtype == torch.float32:
        return int(np.count_nonzero(values_N.numpy()))
    # numpy knows no bf16: what is left without the sign bit is zero for 0.0 and -0.0 alone.
    return int(np.count_nonzero(values_N.view(torch.int16).numpy() << 1))


def decode_add_(
    acc_M: torch.Tensor,
    records: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: str,
    epoch: int,
    *,
    rank: int,
    fresh: bool = False,
    slots_S: torch.Tensor | None = None,
    reports: Reports | None = None,
) -> None:
    """Adds one peer's records to `acc_M`. On CUDA this waits for the records' check.

    Args:
        acc_M: fp32; element 0 is the first element of the first segment. Mutated.
        records: uint8, exactly the records of the given segments, or their slots.
        segment_offsets: offsets in the bucket of the segments that the records must hold.
        value_dtype: dtype of the values.
        epoch: the step.
        rank: the sender, for the error's text.
        fresh: take the segments' part of `acc_M` for zero, whatever it holds.
        slots_S: where the records begin, the first one at 0; None for back to back.
        reports: takes what the call reports: nothing is waited for, and the error is raised when
            they are read.

    Raises:
        WireFormatError: the records are not what was announced; `acc_M` is as it was.
    """
    code, base = WIRE_CODES[value_dtype], int(segment_offsets[0])
    if not is_compiled(acc_M.device):
        _refuse_slots(slots_S)
        torch_codec.decode_add_(
            acc_M, records, segment_offsets, code, epoch, base, rank=rank, fresh=fresh
        )
        return
    ops.decode_add_(
        acc_M,
        records,
        segment_offsets,
        code,
        epoch,
        base,
        rank=rank,
        fresh=fresh,
        slots_S=slots_S,
        reports=reports,
    )
