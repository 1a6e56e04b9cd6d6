"""The encoded bucket: one record for each wire segment, back to back in one buffer.

A record is a 48-byte header and 16-byte aligned sections (`formats/header.py`). Records of one
shard are adjacent, so a bucket is encoded once and each shard's bytes can be sent apart.

On CPU tensors the compiled codec of `cuda_ext` does the work, and `prune_encode` selects and
encodes in one pass; on CUDA tensors it is `torch_codec`, which writes dense and COO records only,
needs their sizes on the host and therefore synchronises once for each bucket.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.cuda_ext import ops
from megatron_sparse.formats import torch_codec
from megatron_sparse.formats.header import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
)

VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in VALUE_DTYPES.items()}
WIRE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2}
FORMAT_CODES = {
    "auto": FORMAT_ADAPTIVE, "coo": FORMAT_COO, "pici": FORMAT_PICI, "dense": FORMAT_DENSE,
}  # fmt: skip
"""What `scheme.format` may name."""


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
        segment_bytes: bytes of each record.
        value_dtype: fp32, bf16 or fp16.
        epoch: the step, checked by the receiver.
        nnz: non-zero elements, kept ones included.
    """

    buffer: torch.Tensor
    layout: Layout
    segment_bytes: list[int]
    value_dtype: str
    epoch: int
    nnz: int

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

    Raises:
        ExtensionError: Pici on a CUDA device.
    """
    segment_count = layout.segment_keep.numel()
    range_segment = layout.range_segment.to(nnz_R.device)
    nnz_S = torch.zeros(segment_count, dtype=torch.int64, device=nnz_R.device)
    nnz_S.index_add_(0, range_segment, nnz_R)
    out = _take_message(bucket, layout, value_dtype, buffers)
    arguments = (
        bucket.grad_N, layout.segment_offsets, layout.segment_keep, nnz_S, WIRE_CODES[value_dtype],
        epoch, out,
    )  # fmt: skip
    if bucket.grad_N.device.type == "cpu":
        scratch = _take_scratch(layout, value_dtype, buffers)
        sizes = ops.encode(*arguments, scratch, form=FORMAT_CODES[form])
    else:
        sizes = torch_codec.encode(*arguments, form=FORMAT_CODES[form])
    return Message(out, layout, sizes.tolist(), value_dtype, epoch, int(nnz_S.sum()))


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
) -> Message:
    """Selects from a bucket on the CPU and encodes what was selected, in one pass.

    Args:
        bucket: its gradient is only read.
        layout: the cut that the thresholds are of.
        residual_N: fp32 or bf16. Mutated.
        thresholds_R: fp32 thresholds of the layout's ranges.
        leak: factor on what is not selected.
        value_dtype: dtype of the values in the message.
        key: of stochastic rounding.
        epoch: the step.
        buffers: where the message's memory comes from.
        form: one of `FORMAT_CODES`.
    """
    out = _take_message(bucket, layout, value_dtype, buffers)
    sizes, nnz_S = ops.prune_encode(
        bucket.grad_N, residual_N, layout.range_offsets, thresholds_R, layout.segment_offsets,
        layout.segment_keep, leak, WIRE_CODES[value_dtype], key, epoch, out,
        _take_scratch(layout, value_dtype, buffers), form=FORMAT_CODES[form],
    )  # fmt: skip
    return Message(out, layout, sizes.tolist(), value_dtype, epoch, int(nnz_S.sum()))


def _take_message(
    bucket: Bucket, layout: Layout, value_dtype: str, buffers: MessageBuffers
) -> torch.Tensor:
    capacity = ops.message_capacity(layout.segment_offsets, WIRE_CODES[value_dtype])
    return buffers.take(f"message:{bucket.name}", capacity, bucket.grad_N.device)


def _take_scratch(layout: Layout, value_dtype: str, buffers: MessageBuffers) -> torch.Tensor:
    """Shared by all buckets: it is free again when the encoder returns."""
    needed = ops.scratch_capacity(layout.segment_offsets, WIRE_CODES[value_dtype])
    return buffers.take("scratch", needed, torch.device("cpu"))


def decode_add_(
    acc_M: torch.Tensor,
    records: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: str,
    epoch: int,
    *,
    rank: int,
    fresh: bool = False,
) -> None:
    """Adds one peer's records to `acc_M`.

    Args:
        acc_M: fp32; element 0 is the first element of the first segment. Mutated.
        records: uint8, exactly the records of the given segments.
        segment_offsets: offsets in the bucket of the segments that the records must hold.
        value_dtype: dtype of the values.
        epoch: the step.
        rank: the sender, for the error's text.
        fresh: take the segments' part of `acc_M` for zero, whatever it holds.

    Raises:
        WireFormatError: the records are not what was announced; `acc_M` may be partly changed.
    """
    base = int(segment_offsets[0])
    arguments = (acc_M, records, segment_offsets, WIRE_CODES[value_dtype], epoch, base)
    if acc_M.device.type == "cpu":
        ops.decode_add_(*arguments, rank=rank, fresh=fresh)
        return
    if fresh:
        acc_M[: int(segment_offsets[-1]) - base].zero_()
    torch_codec.decode_add_(*arguments, rank=rank)
