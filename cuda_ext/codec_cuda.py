"""How the codec's ops are called on CUDA tensors: tables, launches, and reports.

Kernels are launched on the current stream. The host must know a record's length before it can send
it, and whether a peer's record was right before the optimizer uses it. So each call ends with one
copy of a few words to the host, and waits for it: an encoder's report (status, sizes and counts of
its segments), or a decoder's status. Where sizes are fixed, `reports` reads all of them together.
Tables of offsets lie on the host, where the plan made them; their copies on the device are cached.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from megatron_sparse.cuda_ext.arguments import refusal
from megatron_sparse.cuda_ext.slots import TABLES

STATUS_WORDS = 4
"""Words of a decoder's status, and of an encoder's report before the sizes and counts."""
_DENSE_KIND = 0
_CAPACITY, _SEGMENTS, _SLOT = 1, 2, 4  # encode_launch.h; an unknown kind is refused before
_OUTSIDE = 2  # decode_launch.h


def check_report(op: str, words: torch.Tensor, segment_offsets: torch.Tensor) -> None:
    """Raises the error that an encoder's report, on the CPU, holds, if any.

    It begins with a code, the segment, and for lack of room the bytes needed and those there.
    """
    code, segment, needed, there = words[:STATUS_WORDS].tolist()
    if code == _CAPACITY:
        raise refusal(op, "the output buffer is too small", f"{needed} bytes", there)
    if code == _SEGMENTS:
        numel = int(segment_offsets[segment + 1] - segment_offsets[segment])
        raise refusal(op, f"segment {segment} is too long", "at most 2^31 - 1 elements", numel)
    if code == _SLOT:
        what = f"the slot of segment {segment} is too small"
        raise refusal(op, what, f"{needed} bytes", there)
    assert code == 0, f"{op}: the wrapper has ruled out status {code}"


def check_status(
    status: torch.Tensor, segment_offsets: torch.Tensor, base: int, acc_numel: int
) -> None:
    """Raises the error of the arguments that a decoder's status, on the CPU, holds, if any.

    An error of the message is left to `decode_ops.refuse_message`.

    Args:
        status: its first word is a code.
        segment_offsets: elements of the bucket, where segments begin and the last one ends.
        base: the bucket's element that the accumulator begins with.
        acc_numel: elements of the accumulator.

    Raises:
        ExtensionError: the segments do not lie in the accumulator, which is untouched.
    """
    if int(status[0]) == _OUTSIDE:
        raise refusal(
            "decode_add_",
            "the segments do not lie in acc",
            f"ascending offsets from {base} to {base + acc_numel}",
            segment_offsets.tolist()[:8],
        )


def on_device[T: (torch.Tensor, None)](table: T, device: torch.device) -> T:
    """A cached copy of a small host table, or None for None. Do not write to it.

    For the CPU it is the table itself. Never waits. A copy belongs to the stream that made it, so
    memory that the cache releases is free when that stream gets there.
    """
    if table is None or device.type == "cpu":
        return table
    return _device_copy(table.numpy().tobytes(), table.dtype, device, _stream(device))


@lru_cache(maxsize=TABLES)
def _device_copy(
    data: bytes, dtype: torch.dtype, device: torch.device, stream: int
) -> torch.Tensor:
    """A table's copy on the device, cached by its content; `stream` is part of the key only."""
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    return to_device(torch.frombuffer(bytearray(data), dtype=dtype), device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy on the device; a tensor already there is returned as is. Never waits.

    Copies through pinned memory: from other memory CUDA may wait for all work in the stream.
    """
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def record_kinds(segment_dense: torch.Tensor, kind: int, device: torch.device) -> torch.Tensor:
    """The requested `RecordKind` (`csrc/record.h`) of each segment. Only to read."""
    return on_device(_record_kinds(segment_dense.numpy().tobytes(), kind & 0xFF), device)


@lru_cache(maxsize=TABLES)
def _record_kinds(segment_dense: bytes, kind: int) -> torch.Tensor:
    kinds = [_DENSE_KIND if dense else kind for dense in segment_dense]
    return torch.tensor(kinds, dtype=torch.uint8)
