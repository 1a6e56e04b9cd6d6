"""Checks of the encode and decode ops' arguments, and the largest size of a message.

`check_encode` runs before every encode. Slots (each record's fixed place in the message), capacity
(the most non-zero elements of each segment) and the buffer's size are checked by the CPU ops
themselves. For CUDA this module checks them before the launch, because kernels rely on them.
A kept segment (`Segments.dense`) is one whose record is always dense.
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
    """The most bytes that a message of these segments takes, whatever its format.

    A record of fp32, bf16 or fp16 is at most a dense one: 48 bytes of header, and its values padded
    to 16 bytes. Quantised values are in Rice records (any chunk size) or, if kept, in dense bf16.

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
    """Computes `message_capacity`; the offsets are bytes, which the cache can use as a key."""
    numel_S = np.diff(np.frombuffer(segment_offsets, np.int64))
    if value_dtype not in wire.RICE_BITS:
        padded = (numel_S * wire.VALUE_BYTES[value_dtype] + 15) // 16 * 16
        return int(padded.sum()) + wire.HEADER_BYTES * padded.size
    total = 0
    for numel in numel_S.tolist():
        # Small chunks take more rows of the table, large ones more bits for an index. Without
        # indices there is no table and no index, and one chunk size stands for all.
        sizes = [
            wire.rice_payload_bytes(numel, numel, value_dtype, span) for span in wire.RICE_SPANS
        ]
        sizes += [wire.rice_whole_payload_bytes(numel, value_dtype, wire.RICE_SPANS[0])]
        sizes += [wire.pad16(numel * wire.VALUE_BYTES[_BF16])]  # if the segment is kept
        total += wire.HEADER_BYTES + max(sizes)
    return total


def record_kind(spec: RecordSpec) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    code = spec.record_format
    in_paper_order = code == wire.FORMAT_PICI and spec.paper_order
    return code | _PAPER_ORDER if in_paper_order else code


def check_encode(op: str, grad_N: torch.Tensor, segments: Segments, spec: RecordSpec) -> None:
    """Refuses segments that do not cut the gradient, and unknown formats or value dtypes.

    They must cover it, but for `prune_encode` on the CPU.

    The native ops cannot: CUDA's do not read the tables before the launch, and none gets the
    format code, only a kind of record for each segment (`record_kind`).
    """
    whole = op != "prune_encode" or grad_N.is_cuda
    check_offsets(op, "segment_offsets", segments.offsets, grad_N.numel(), whole=whole)
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    if spec.record_format == wire.FORMAT_RICE:
        check_message_dtype(op, spec.value_dtype)
        # To the native ops a log2_span (block_size) of 0 means a format other than Rice (blocks).
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
    """Checks the slots of records (`Segments`), as the CPU ops do; CUDA kernels rely on them.

    Returns `out`, the message's buffer, cut to the bytes that the slots take; without slots, all of
    it. None checks the slots alone.
    """
    if slots_S is None:
        return out
    check_flat(op, "slots", slots_S, (torch.int64,), segments + 1, CPU)
    begins = slots_S.numpy()
    if (begins[1:] < begins[:-1]).any():
        raise refusal(op, "slots is not ascending", "ascending bytes", slots_S.tolist()[:8])
    if begins[0] != 0 or (begins % wire.RECORD_ALIGNMENT).any():
        raise refusal(
            op, "slots are no places of records", "multiples of 16, from 0 on", slots_S.tolist()[:8]
        )
    if out is None:
        return out
    nbytes = int(begins[-1])
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
    """Refuses a buffer or slots without room for the largest records that an encoder may write.

    Called before a CUDA encoder, which changes the residual before it knows the records' sizes.
    `capacity_S`: the most non-zero elements of each segment; None if all may be non-zero.
    """
    slots_S = segments.slots
    is_rice = spec.record_format == wire.FORMAT_RICE
    has_limits = capacity_S is not None or slots_S is not None
    if not has_limits and not is_rice:  # a dense record is the largest, except with Rice
        _check_room(op, message_capacity(segments.offsets, spec.value_dtype), out)
        return
    is_blocks = spec.record_format == wire.FORMAT_BLOCKS
    most_S = segments.offsets.diff()  # without a capacity all elements may be non-zero
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
    # Where blocks would not be smaller the record is dense, so the dense one is the largest.
    largest_spec = replace(spec, record_format=wire.FORMAT_DENSE) if is_blocks else spec
    needed_slots = Slots.of(segments.offsets, segments.dense, most_S, largest_spec)
    if slots_S is None:
        _check_room(op, int(needed_slots.offsets[-1]), out)
        return
    slot_bytes_S = slots_S.diff().tolist()
    for segment, (needed, given) in enumerate(zip(needed_slots.sizes, slot_bytes_S, strict=True)):
        if needed > given:
            what = f"the slot of segment {segment} is too small"
            raise refusal(op, what, f"{needed} bytes", given)


def compare_counts(found_S: torch.Tensor, given_S: torch.Tensor) -> None:
    """Refuses the caller's counts of non-zero elements if the CUDA encoder has counted others.

    The error's text is that of the CPU encoder.
    """
    for segment, (found, given) in enumerate(zip(found_S.tolist(), given_S.tolist(), strict=True)):
        if found != given:
            what = f"nnz of segment {segment} is not what the gradient holds"
            raise refusal("encode", what, found, given)
