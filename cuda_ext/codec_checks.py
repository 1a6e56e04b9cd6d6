"""The checks of the codec's ops, and the sizes that follow from a plan alone.

The compiled ops check a CPU call themselves. For a CUDA call, this module checks the arguments that
lie on the host: kernels rely on them, and a refusal must come before any launch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from megatron_sparse.cuda_ext.arguments import CPU, check_code, check_flat, check_offsets, refusal
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import TABLES, Slots
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_DENSE,
    FORMAT_HASH_BITMAP,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RECORD_ALIGNMENT,
    VALUE_BYTES,
)

_TILE, _CHUNK = 4096, 8 * 4096
_PAPER_ORDER = 16  # beside the format code, for the native op


def message_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes: dense values, headers, padding.

    Example:
        >>> message_capacity(torch.tensor([0, 5, 8]), 0)  # 48 + 32 and 48 + 16
        144
    """
    check_flat("message_capacity", "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
    check_code("message_capacity", "value_dtype", value_dtype)
    return _message_capacity(segment_offsets.numpy().tobytes(), value_dtype)


@lru_cache(TABLES)
def _message_capacity(segment_offsets: bytes, value_dtype: int) -> int:
    padded = (_numel(segment_offsets) * VALUE_BYTES[value_dtype] + 15) // 16 * 16
    return int(padded.sum()) + HEADER_BYTES * padded.size


def scratch_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """Bytes of `encode`'s and `prune_encode`'s scratch on the CPU, whatever the density.

    Two bitmaps and the packed values; memory is touched only where there are values.

    Example:
        >>> scratch_capacity(torch.tensor([0, 5, 8]), 0)  # twice 1024 + 64, and 20 + 12 of values
        2208
    """
    check_flat("scratch_capacity", "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
    check_code("scratch_capacity", "value_dtype", value_dtype)
    return _scratch_capacity(segment_offsets.numpy().tobytes(), value_dtype)


@lru_cache(TABLES)
def _scratch_capacity(segment_offsets: bytes, value_dtype: int) -> int:
    numel_S = _numel(segment_offsets)
    bitmaps = (numel_S + _TILE - 1) // _TILE * (2 * _TILE // 8)
    values = numel_S * VALUE_BYTES[value_dtype] + (numel_S + _CHUNK - 1) // _CHUNK * 64
    return int((bitmaps + values).sum())


def _numel(segment_offsets: bytes) -> np.ndarray:
    """Elements of each segment."""
    return np.diff(np.frombuffer(segment_offsets, np.int64))


def record_kind(spec: RecordSpec) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    code = spec.record_format
    return code | _PAPER_ORDER if code == FORMAT_PICI and spec.paper_order else code


def check_encode(
    op: str, grad_N: torch.Tensor, segments: Segments, spec: RecordSpec, out: torch.Tensor
) -> int:
    """Checks the arguments of both encoders; returns the native op's kind."""
    check_offsets(op, "segment_offsets", segments.offsets, grad_N.numel())
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    check_flat(op, "out", out, (torch.uint8,), device=grad_N.device)
    check_code(op, "value_dtype", spec.value_dtype)
    if spec.step < 0:
        raise refusal(op, "step is out of range", "0 or more", spec.step)
    code, size = spec.record_format, spec.block_size
    if not FORMAT_ADAPTIVE <= code < FORMAT_HASH_BITMAP:
        expected = "-1 (adaptive) or a format code from 0 to 3"
        raise refusal(op, "record_format is unknown", expected, code)
    if not (64 <= size <= _TILE and size.bit_count() == 1):
        raise refusal(op, "block_size does not fit", "a power of two from 64 to 4096", size)
    return record_kind(spec)


def check_scratch(
    op: str, scratch: torch.Tensor | None, segment_offsets: torch.Tensor, value_dtype: int
) -> torch.Tensor:
    """The CPU encoders' scratch; allocates it if the caller gave none."""
    if scratch is None:
        return torch.empty(scratch_capacity(segment_offsets, value_dtype), dtype=torch.uint8)
    check_flat(op, "scratch", scratch, (torch.uint8,), device=CPU)
    return scratch


def refuse_scratch(op: str, scratch: torch.Tensor | None) -> None:
    """Refuses scratch for a CUDA call, whose allocator is fast."""
    if scratch is not None:
        raise refusal(op, "scratch is not used on CUDA", None, f"{scratch.numel()} bytes")


def check_slots[T: (torch.Tensor, None)](
    op: str, slots_S: torch.Tensor | None, segments: int, out: T
) -> T:
    """Checks the slots, on which kernels rely, as the CPU's bindings do; returns their part."""
    if slots_S is None:
        return out
    check_flat(op, "slots", slots_S, (torch.int64,), segments + 1, CPU)
    places = slots_S.numpy()
    if (places[1:] < places[:-1]).any():
        raise refusal(op, "slots is not ascending", "ascending bytes", slots_S.tolist()[:8])
    if places[0] != 0 or (places % RECORD_ALIGNMENT).any():
        raise refusal(
            op, "slots are no places of records", "multiples of 16, from 0 on", slots_S.tolist()[:8]
        )
    if out is None:
        return out
    nbytes = int(places[-1])
    _check_room(op, nbytes, out)
    return out[:nbytes]


def _check_room(op: str, needed: int, out: torch.Tensor) -> None:
    if out.numel() < needed:
        raise refusal(op, "the output buffer is too small", f"{needed} bytes", out.numel())


def check_capacity(
    op: str,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    capacity_S: torch.Tensor | None,
) -> None:
    """Refuses a buffer that may prove too small: the residual changes before sizes are known."""
    most_S, slots_S = segments.offsets.diff(), segments.slots
    is_rice = spec.record_format == FORMAT_RICE
    if capacity_S is None and slots_S is None and not is_rice:
        return _check_room(op, message_capacity(segments.offsets, spec.value_dtype), out)
    is_blocks = spec.record_format == FORMAT_BLOCKS
    if capacity_S is not None:
        check_flat(op, "capacity", capacity_S, (torch.int64,), segments.dense.numel(), CPU)
        if (capacity_S.numpy() < 0).any():
            raise refusal(op, "capacity is out of range", "0 or more", capacity_S.tolist()[:8])
        if is_blocks:
            raise refusal(op, "blocks have no capacity on CUDA", "another format", "blocks")
        most_S = capacity_S
    record_format = FORMAT_DENSE if is_blocks else spec.record_format
    most = Slots.of(
        segments.offsets,
        segments.dense,
        most_S,
        spec.value_dtype,
        record_format,
        spec.log2_span,
        without_indices=spec.without_indices,
    )
    if slots_S is None:
        return _check_room(op, int(most.offsets[-1]), out)
    for segment, (needed, there) in enumerate(
        zip(most.sizes, slots_S.diff().tolist(), strict=False)
    ):
        if needed > there:
            what = f"the slot of segment {segment} is too small"
            raise refusal(op, what, f"{needed} bytes", there)
    return None


def compare_counts(found_S: torch.Tensor, given_S: torch.Tensor) -> None:
    """Refuses counts that differ from the encoder's, with the error text of the CPU encoder."""
    for segment, (found, given) in enumerate(zip(found_S.tolist(), given_S.tolist(), strict=True)):
        if found != given:
            what = f"nnz of segment {segment} is not what the gradient holds"
            raise refusal("encode", what, found, given)
