"""The checks of the codec's ops, and the sizes that follow from a plan alone.

The compiled ops check a CPU call themselves. For a CUDA call, this module checks the arguments that
lie on the host: kernels rely on them, and a refusal must come before any launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps

import numpy as np
import torch

from megatron_sparse import wire
from megatron_sparse.cuda_ext.arguments import (
    CPU,
    check_code,
    check_flat,
    check_message_dtype,
    check_offsets,
    refusal,
)
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import TABLES, Slots

_TILE, _CHUNK, _SLACK = 4096, 8 * 4096, 64
_BF16 = 1
_PAPER_ORDER = 16  # beside the format code, for the native op


def _of_segments(size: Callable[[np.ndarray, int], int]) -> Callable[[torch.Tensor, int], int]:
    """Lets a size take the segments' offsets in place of their elements, and keeps its results."""

    @lru_cache(TABLES)
    def kept(segment_offsets: bytes, value_dtype: int) -> int:
        return size(np.diff(np.frombuffer(segment_offsets, np.int64)), value_dtype)

    @wraps(size)
    def checked(segment_offsets: torch.Tensor, value_dtype: int) -> int:
        check_flat(size.__name__, "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
        return kept(segment_offsets.numpy().tobytes(), value_dtype)

    return checked


@_of_segments
def message_capacity(numel_S: np.ndarray, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes, in any format for this dtype code.

    A raw record never exceeds a dense one: headers, values, padding. Where values are quantised the
    format is Rice, with whatever chunks, and kept segments are in bf16.

    Example:
        >>> message_capacity(torch.tensor([0, 5, 8]), 0)  # 48 + 32 and 48 + 16
        144
    """
    check_message_dtype("message_capacity", value_dtype)
    if value_dtype not in wire.RICE_BITS:
        padded = (numel_S * wire.VALUE_BYTES[value_dtype] + 15) // 16 * 16
        return int(padded.sum()) + wire.HEADER_BYTES * padded.size
    total = 0
    for numel in numel_S.tolist():
        # The smallest chunks have the most rows; the largest ones the most bits for a position.
        sizes = [
            wire.rice_payload_bytes(numel, numel, value_dtype, span) for span in wire.RICE_SPANS
        ]
        sizes += [wire.rice_whole_payload_bytes(numel, value_dtype, wire.RICE_SPANS[0])]
        sizes += [wire.pad16(numel * wire.VALUE_BYTES[_BF16])]
        total += wire.HEADER_BYTES + max(sizes)
    return total


def scratch_capacity(segment_offsets: torch.Tensor, spec: RecordSpec) -> int:
    """Bytes of `encode`'s and `prune_encode`'s scratch on the CPU, whatever the density.

    Example:
        >>> scratch_capacity(torch.tensor([0, 5, 8]), RecordSpec(0, step=0))
        2208
    """
    is_rice = spec.record_format == wire.FORMAT_RICE
    size = rice_scratch_capacity if is_rice else plain_scratch_capacity
    return size(segment_offsets, spec.value_dtype)


@_of_segments
def plain_scratch_capacity(numel_S: np.ndarray, value_dtype: int) -> int:
    """Two bitmaps and the packed values; memory is touched only where there are values.

    Example:
        >>> plain_scratch_capacity(torch.tensor([0, 5, 8]), 0)  # twice 1024 + 64, and 20 + 12
        2208
    """
    check_code("scratch_capacity", "value_dtype", value_dtype)
    bitmaps = (numel_S + _TILE - 1) // _TILE * (2 * _TILE // 8)
    values = numel_S * wire.VALUE_BYTES[value_dtype] + (numel_S + _CHUNK - 1) // _CHUNK * _SLACK
    return int((bitmaps + values).sum())


@_of_segments
def rice_scratch_capacity(numel_S: np.ndarray, value_dtype: int) -> int:
    """Two bitmaps, the packed values and the coded gaps, whatever the chunks.

    Memory is touched only where there are entries.

    Example:
        >>> rice_scratch_capacity(torch.tensor([0, 5]), 0)  # twice 512, 20, 64 and 528
        1636
    """
    tiles_S = -(-numel_S // _TILE)
    value_bytes = wire.VALUE_BYTES[0 if value_dtype in wire.RICE_BITS else value_dtype]
    bitmaps = 3 * tiles_S * (_TILE // 8)
    return int((bitmaps + numel_S * value_bytes + tiles_S * (_SLACK + 16)).sum())


def record_kind(spec: RecordSpec) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    code = spec.record_format
    return code | _PAPER_ORDER if code == wire.FORMAT_PICI and spec.paper_order else code


def check_encode(op: str, grad_N: torch.Tensor, segments: Segments, spec: RecordSpec) -> None:
    """Checks of all encoders' arguments those that the compiled op does not check on CUDA."""
    check_offsets(op, "segment_offsets", segments.offsets, grad_N.numel())
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    code = spec.record_format
    if code == wire.FORMAT_RICE:
        return check_message_dtype(op, spec.value_dtype)
    check_code(op, "value_dtype", spec.value_dtype)
    if not wire.FORMAT_ADAPTIVE <= code < wire.FORMAT_HASH_BITMAP:
        expected = "-1 (adaptive), a format code from 0 to 3, or 8 (Rice)"
        raise refusal(op, "record_format is unknown", expected, code)
    return None


def check_scratch(
    op: str,
    scratch: torch.Tensor | None,
    segment_offsets: torch.Tensor,
    spec: RecordSpec,
    device: torch.device,
) -> torch.Tensor | None:
    """The encoders' scratch; on the CPU allocates it if the caller gave none, CUDA takes none."""
    if device != CPU:
        if scratch is not None:
            raise refusal(op, "scratch is not used on CUDA", None, f"{scratch.numel()} bytes")
        return None
    if scratch is None:
        return torch.empty(scratch_capacity(segment_offsets, spec), dtype=torch.uint8)
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
    if places[0] != 0 or (places % wire.RECORD_ALIGNMENT).any():
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
    is_rice = spec.record_format == wire.FORMAT_RICE
    if capacity_S is None and slots_S is None and not is_rice:
        return _check_room(op, message_capacity(segments.offsets, spec.value_dtype), out)
    is_blocks = spec.record_format == wire.FORMAT_BLOCKS
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
    largest = replace(spec, record_format=wire.FORMAT_DENSE) if is_blocks else spec
    most = Slots.of(segments.offsets, segments.dense, most_S, largest)
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
