"""The checks of the codec's ops, and the sizes that follow from a plan alone.

The compiled encoders rely on `check_encode` on either device. Slots, capacity and room are checked
by the CPU's ops themselves. For a CUDA call, this module checks them: kernels rely on them, and a
refusal must come before any launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

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

_BF16 = 1
_PAPER_ORDER = 16  # beside the format code, for the native op


def message_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes, in any format for this dtype code.

    A raw record never exceeds a dense one: headers, values, padding. Where values are quantised the
    format is Rice, with whatever chunks, and kept segments are in bf16.

    Example:
        >>> message_capacity(torch.tensor([0, 5, 8]), 0)  # 48 + 32 and 48 + 16
        144
    """
    op = "message_capacity"
    check_flat(op, "segment_offsets", segment_offsets, (torch.int64,), device=CPU)
    check_message_dtype(op, value_dtype)
    return _message_capacity(segment_offsets.numpy().tobytes(), value_dtype)


@lru_cache(TABLES)
def _message_capacity(segment_offsets: bytes, value_dtype: int) -> int:
    """`message_capacity`, with the content of the offsets' table as argument."""
    numel_S = np.diff(np.frombuffer(segment_offsets, np.int64))
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
        sizes += [wire.pad16(numel * wire.VALUE_BYTES[_BF16])]  # of a kept segment
        total += wire.HEADER_BYTES + max(sizes)
    return total


def record_kind(spec: RecordSpec) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    code = spec.record_format
    in_paper_order = code == wire.FORMAT_PICI and spec.paper_order
    return code | _PAPER_ORDER if in_paper_order else code


def check_encode(op: str, grad_N: torch.Tensor, segments: Segments, spec: RecordSpec) -> None:
    """Refuses segments that do not cut the gradient, and unknown formats and value dtypes.

    The compiled ops cannot: on CUDA they do not read the tables, and their formats are kinds.
    """
    check_offsets(op, "segment_offsets", segments.offsets, grad_N.numel())
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    if spec.record_format == wire.FORMAT_RICE:
        check_message_dtype(op, spec.value_dtype)
        # To the native ops a size of 0 says that the format is another one.
        if spec.log2_span == 0:
            raise refusal(op, "log2_span is out of range", "12 to 24", 0)
        return
    check_code(op, "value_dtype", spec.value_dtype)
    # Dense, COO, Pici and blocks; the formats from hash bitmap on have encoders of their own.
    if not wire.FORMAT_ADAPTIVE <= spec.record_format < wire.FORMAT_HASH_BITMAP:
        expected = "-1 (adaptive), a format code from 0 to 3, or 8 (Rice)"
        raise refusal(op, "record_format is unknown", expected, spec.record_format)
    if spec.record_format == wire.FORMAT_BLOCKS and spec.block_size == 0:
        raise refusal(op, "block_size does not fit", "a power of two from 64 to 4096", 0)


def check_slots[T: (torch.Tensor, None)](
    op: str, slots_S: torch.Tensor | None, segments: int, out: T
) -> T:
    """Checks the slots, on which kernels rely, as the CPU's bindings do.

    Args:
        op: names the call in errors.
        slots_S: where records begin and the last one's place ends; None for back to back.
        segments: how many segments there are.
        out: the message's buffer, or None to check the slots alone.

    Returns:
        The part of `out` that the slots take; all of it without slots.
    """
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
    """Refuses a buffer or slots without room for the largest records that the call may write.

    A CUDA encoder changes the residual before it knows the sizes: later would be too late.

    Args:
        op: names the call in errors.
        segments: the pieces, with or without slots.
        spec: the format of the records.
        out: the message's buffer.
        capacity_S: the most non-zero elements of each segment; None if all may be non-zero.
    """
    slots_S = segments.slots
    is_rice = spec.record_format == wire.FORMAT_RICE
    has_limits = capacity_S is not None or slots_S is not None
    if not has_limits and not is_rice:
        _check_room(op, message_capacity(segments.offsets, spec.value_dtype), out)
        return
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
    # A record in blocks is dense where blocks are not smaller: its largest size is that of dense.
    largest_spec = replace(spec, record_format=wire.FORMAT_DENSE) if is_blocks else spec
    needed_slots = Slots.of(segments.offsets, segments.dense, most_S, largest_spec)
    if slots_S is None:
        _check_room(op, int(needed_slots.offsets[-1]), out)
        return
    room_S = slots_S.diff().tolist()
    for segment, (needed, there) in enumerate(zip(needed_slots.sizes, room_S, strict=False)):
        if needed > there:
            what = f"the slot of segment {segment} is too small"
            raise refusal(op, what, f"{needed} bytes", there)


def compare_counts(found_S: torch.Tensor, given_S: torch.Tensor) -> None:
    """Refuses given counts that are not what the CUDA encoder has found, after it has run.

    The error has the words of the CPU encoder's.
    """
    for segment, (found, given) in enumerate(zip(found_S.tolist(), given_S.tolist(), strict=True)):
        if found != given:
            what = f"nnz of segment {segment} is not what the gradient holds"
            raise refusal("encode", what, found, given)
