"""What encode and decode ops need on CUDA: device copies of tables, and reading error reports.

Kernels run on the current stream. A status is a few int64 words that a kernel leaves on the device,
the first one an error code (0: none). A decoder reports its status; an encoder's report is its
status, then its segments' sizes, then their counts. The CPU needs a record's length to send it, and
must find a bad record before the optimizer uses the sum. So each call copies its report to the CPU
and waits; where sizes are fixed (`slots`), `reports` copies the reports of many calls at once.
Tables (of offsets, for example) are CPU tensors; `on_device` caches their copies on the device.
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
    """Raises the error in an encoder's report, if any; `words` is the report, on the CPU.

    Its status: error code, segment and, for lack of room, the bytes needed and those available.
    """
    code, segment, needed, available = words[:STATUS_WORDS].tolist()
    if code == _CAPACITY:
        raise refusal(op, "the output buffer is too small", f"{needed} bytes", available)
    if code == _SEGMENTS:
        numel = int(segment_offsets[segment + 1] - segment_offsets[segment])
        raise refusal(op, f"segment {segment} is too long", "at most 2^31 - 1 elements", numel)
    if code == _SLOT:
        what = f"the slot of segment {segment} is too small"
        raise refusal(op, what, f"{needed} bytes", available)
    assert code == 0, f"{op}: the wrapper's checks have ruled out status {code}"


def check_status(
    status: torch.Tensor, segment_offsets: torch.Tensor, base: int, acc_numel: int
) -> None:
    """Raises an `ExtensionError` if a decoder's status, on the CPU, is about the call's arguments.

    Then the segments do not lie in the accumulator, which is untouched. Errors of the message
    itself are left to `decode_ops.refuse_message`.
    """
    if int(status[0]) == _OUTSIDE:
        expected, got = f"ascending offsets from {base} to {base + acc_numel}", segment_offsets[:8]
        raise refusal("decode_add_", "the segments do not lie in acc", expected, got.tolist())


def on_device[T: (torch.Tensor, None)](table: T, device: torch.device) -> T:
    """A cached device copy of a small CPU table; for a CPU device the table itself. None for None.

    Do not write to it. Never waits. Each stream has copies of its own: when the cache drops one,
    the allocator gives its memory to later work of its stream without waiting for other streams.
    """
    if table is None or device.type == "cpu":
        return table
    return _device_copy(table.numpy().tobytes(), table.dtype, device, _stream(device))


@lru_cache(maxsize=TABLES)
def _device_copy(
    data: bytes, dtype: torch.dtype, device: torch.device, stream: int
) -> torch.Tensor:
    """Copies a table. `stream` only keys the cache, as other streams do not wait for the copy."""
    if not data:  # `frombuffer` refuses an empty buffer
        return torch.empty(0, dtype=dtype, device=device)
    return to_device(torch.frombuffer(bytearray(data), dtype=dtype), device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor's copy on the device; a tensor already there is returned as is. Never waits.

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
