"""How the codec's ops are called on CUDA tensors: tables, launches, and reports.

Kernels are launched on the current stream. The host must know a record's length before it can send
it, and whether a peer's record was right before the optimizer uses it. So each call ends with one
copy of a few words to the host, and waits for it: an encoder's report (status, sizes and counts of
its segments), or a decoder's status. Where sizes are fixed, `reports` reads all of them together.
Tables of offsets lie on the host, where the plan made them; their copies on the device are cached.

A CUDA graph copies its tables itself: the copy is one of its nodes, and each replay repeats it. A
copy made outside of the graph would not do, because the cache may release it before a replay; and a
copy made inside of it holds nothing until the graph is replayed, so it is never cached.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from megatron_sparse.cuda_ext.arguments import refusal
from megatron_sparse.cuda_ext.record_spec import Segments
from megatron_sparse.cuda_ext.reports import Reports

STATUS_WORDS = 4
"""Words of a decoder's status, and of an encoder's report before the sizes and counts."""
_DENSE_KIND = 0
_CAPACITY, _SEGMENTS, _SLOT = 1, 2, 4  # encode_launch.h; an unknown kind is refused before
_OUTSIDE = 2  # decode_launch.h
TABLES = 2**14
"""Tables whose device copies are kept: a bucket has about three, and two for each of its shards
where these differ."""


def read_report(
    op: str, report: torch.Tensor, segment_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Waits for an encoder and returns the bytes and the non-zero elements of each segment.

    Raises:
        ExtensionError: the output buffer or a slot is too small, or a segment too long; no record
            was written.
    """
    words = report.cpu()
    check_report(op, words, segment_offsets)
    sizes_S, nnz_S = words[STATUS_WORDS:].view(2, -1)
    return sizes_S, nnz_S


def results(
    op: str, report: torch.Tensor, segment_offsets: torch.Tensor, reports: Reports | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes and counts from an encoder's report: `read_report` or, with `reports`, `later`."""
    if reports is None:
        return read_report(op, report, segment_offsets)
    return later(op, report, segment_offsets, reports)


def later(
    op: str, report: torch.Tensor, segment_offsets: torch.Tensor, reports: Reports
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds an encoder's report to `reports`; returns sizes and counts, on its device."""
    reports.add(report, lambda words: check_report(op, words, segment_offsets))
    sizes_S, nnz_S = report[STATUS_WORDS:].view(2, -1)
    return sizes_S, nnz_S


def check_report(op: str, words: torch.Tensor, segment_offsets: torch.Tensor) -> None:
    """Raises the error that an encoder's report, on the CPU, holds, if any; see `read_report`."""
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

    The status says the same about the message as on the CPU; `refuse_message` raises that error.

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
    memory that the cache releases is free when that stream gets there. While a CUDA graph is
    captured each call returns a new copy, which belongs to the graph.
    """
    if table is None or device.type == "cpu":
        return table
    if torch.cuda.is_current_stream_capturing():
        return to_device(table, device)
    return _device_copy(table.numpy().tobytes(), table.dtype, device, _stream(device))


@lru_cache(maxsize=TABLES)
def _device_copy(
    data: bytes, dtype: torch.dtype, device: torch.device, stream: int
) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    return to_device(torch.frombuffer(bytearray(data), dtype=dtype), device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy on the device; a tensor already there is returned as is. Never waits.

    Copies through pinned memory: from other memory CUDA may wait for all work in the stream. While
    a CUDA graph is captured, pinned memory with the same bytes is used by all copies and kept until
    the process ends, because a graph may be replayed at any time.
    """
    if values.device.type == device.type:
        return values
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _graph_source(data, values.dtype, values.shape).to(device, non_blocking=True)
    return values.pin_memory().to(device, non_blocking=True)


@cache
def _graph_source(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Pinned memory from which captured graphs copy."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).pin_memory()


def segment_tables(
    device: torch.device, segments: Segments, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the segments and the requested kind of each, on the device. Only to read."""
    return on_device(segments.offsets, device), record_kinds(segments.dense, kind, device)


def record_kinds(segment_dense: torch.Tensor, kind: int, device: torch.device) -> torch.Tensor:
    """The requested `RecordKind` (`csrc/record.h`) of each segment. Only to read."""
    return on_device(_record_kinds(segment_dense.numpy().tobytes(), kind & 0xFF), device)


@lru_cache(maxsize=TABLES)
def _record_kinds(segment_dense: bytes, kind: int) -> torch.Tensor:
    kinds = [_DENSE_KIND if dense else kind for dense in segment_dense]
    return torch.tensor(kinds, dtype=torch.uint8)
