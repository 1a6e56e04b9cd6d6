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
    RICE_BITS,
    RICE_SPANS,
    VALUE_BYTES,
    pad16,
    rice_payload_bytes,
    rice_whole_payload_bytes,
)

_TILE, _CHUNK, _SLACK = 4096, 8 * 4096, 64
_BF16, _Q8, _Q4 = 1, 3, 4
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
    values = numel_S * VALUE_BYTES[value_dtype] + (numel_S + _CHUNK - 1) // _CHUNK * _SLACK
    return int((bitmaps + values).sum())


def rice_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes, whatever its chunks and values.

    Kept segments are in bf16 where values are quantised. A raw record never exceeds a dense one.

    Example:
        >>> rice_capacity(torch.tensor([0, 5]), 0)  # as `message_capacity`
        80
    """
    check_flat("rice_capacity", "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
    return _rice_capacity(segment_offsets.numpy().tobytes(), value_dtype)


@lru_cache(TABLES)
def _rice_capacity(segment_offsets: bytes, value_dtype: int) -> int:
    total = 0
    for numel in _numel(segment_offsets).tolist():
        if value_dtype in RICE_BITS:
            # The smallest chunks have the most rows; the largest ones the most bits for a position.
            sizes = [rice_payload_bytes(numel, numel, value_dtype, RICE_SPANS[0])]
            sizes += [rice_payload_bytes(numel, numel, value_dtype, span) for span in RICE_SPANS]
            sizes += [rice_whole_payload_bytes(numel, value_dtype, RICE_SPANS[0])]
            sizes += [pad16(numel * VALUE_BYTES[_BF16])]
            payload = max(sizes)
        else:
            payload = pad16(numel * VALUE_BYTES[value_dtype])
        total += HEADER_BYTES + payload
    return total


def rice_scratch_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """Bytes of scratch that the encoders take at most, whatever their chunks.

    Two bitmaps, the packed values and the coded gaps; memory is touched only where there are
    entries.

    Example:
        >>> rice_scratch_capacity(torch.tensor([0, 5]), 0)  # twice 512, 20, 64 and 528
        1636
    """
    check_flat("rice_scratch", "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
    return _rice_scratch_capacity(segment_offsets.numpy().tobytes(), value_dtype)


@lru_cache(TABLES)
def _rice_scratch_capacity(segment_offsets: bytes, value_dtype: int) -> int:
    numel_S = _numel(segment_offsets)
    tiles_S = -(-numel_S // _TILE)
    value_bytes = VALUE_BYTES[0 if value_dtype in RICE_BITS else value_dtype]
    bitmaps = 3 * tiles_S * (_TILE // 8)
    return int((bitmaps + numel_S * value_bytes + tiles_S * (_SLACK + 16)).sum())


def _numel(segment_offsets: bytes) -> np.ndarray:
    """Elements of each segment."""
    return np.diff(np.frombuffer(segment_offsets, np.int64))


def record_kind(spec: RecordSpec) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    code = spec.record_format
    return code | _PAPER_ORDER if code == FORMAT_PICI and spec.paper_order else code


def check_encode(
    op: str,
    grad_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    *,
    is_rice: bool,
) -> None:
    """Checks the arguments of all encoders; the spec's format counts only if it is not Rice."""
    check_offsets(op, "segment_offsets", segments.offsets, grad_N.numel())
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    check_flat(op, "out", out, (torch.uint8,), device=grad_N.device)
    if is_rice:
        _check_rice(op, spec)
        if grad_N.device == CPU:
            return  # the compiled op checks the rest
    else:
        check_code(op, "value_dtype", spec.value_dtype)
    if spec.step < 0:
        raise refusal(op, "step is out of range", "0 or more", spec.step)
    code, size = spec.record_format, spec.block_size
    if not (is_rice or FORMAT_ADAPTIVE <= code < FORMAT_HASH_BITMAP):
        expected = "-1 (adaptive) or a format code from 0 to 3"
        raise refusal(op, "record_format is unknown", expected, code)
    if not (is_rice or (64 <= size <= _TILE and size.bit_count() == 1)):
        raise refusal(op, "block_size does not fit", "a power of two from 64 to 4096", size)


def _check_rice(op: str, spec: RecordSpec) -> None:
    if not 0 <= spec.value_dtype <= max(RICE_BITS):
        expected = "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)"
        raise refusal(op, "value_dtype is unknown", expected, spec.value_dtype)
    if spec.log2_span not in RICE_SPANS:
        raise refusal(op, "log2_span is out of range", "12 to 24", spec.log2_span)
    if spec.without_indices and spec.value_dtype not in (_Q8, _Q4):
        what = "a value of every element needs other values"
        raise refusal(op, what, "3 (q8) or 4 (q4)", spec.value_dtype)


def check_scratch(
    op: str,
    scratch: torch.Tensor | None,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    device: torch.device,
    *,
    is_rice: bool,
) -> torch.Tensor | None:
    """The encoders' scratch; on the CPU allocates it if the caller gave none, CUDA takes none."""
    if device != CPU:
        if scratch is not None:
            raise refusal(op, "scratch is not used on CUDA", None, f"{scratch.numel()} bytes")
        return None
    if scratch is None:
        capacity = rice_scratch_capacity if is_rice else scratch_capacity
        return torch.empty(capacity(segment_offsets, value_dtype), dtype=torch.uint8)
    check_flat(op, "scratch", scratch, (torch.uint8,), device=CPU)
    return scratch


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
    slots_S = segments.slots
    is_rice = spec.record_format == FORMAT_RICE
    if capacity_S is None and slots_S is None and not is_rice:
        return _check_room(op, message_capacity(segments.offsets, spec.value_dtype), out)
    is_blocks = spec.record_format == FORMAT_BLOCKS
    most_S = segments.offsets.diff()
    if capacity_S is not None:
        check_flat(op, "capacity", capacity_S, (torch.int64,), segments.dense.numel(), CPU)
        if (capacity_S.numpy() < 0).any():
            raise refusal(op, "capacity is out of range", "0 or more", capacity_S.tolist()[:8])
        if is_blocks:
            raise refusal(op, "blocks have no capacity on CUDA", "another format", "blocks")
        if spec.without_indices and (capacity_S < most_S).any():
            what = "capacity is below what a message without indices sends"
            raise refusal(op, what, most_S.tolist()[:8], capacity_S.tolist()[:8])
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
