"""The encoders of messages of kind Rice, typed and checked. `ops` exports them.

docs/wire-format.md (Rice) specifies the bytes; `decode_ops` decodes them as any other message.
Neither the bytes nor the errors depend on the device; when a CUDA call waits, `encode_ops` says.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import (
    CPU,
    GRAD_DTYPES,
    RESIDUAL_DTYPES,
    call,
    check_device,
    check_flat,
    check_limits,
    check_offsets,
    check_selection,
    refusal,
)
from megatron_sparse.cuda_ext.codec_checks import check_capacity, check_slots, refuse_scratch
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import TABLES
from megatron_sparse.wire import (
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
    RICE_SPANS,
    VALUE_BYTES,
    pad16,
    rice_payload_bytes,
    rice_whole_payload_bytes,
)

_TILE, _SLACK = 4096, 64
_FP32, _BF16, _Q8, _Q4 = 0, 1, 3, 4


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
    for numel in np.diff(np.frombuffer(segment_offsets, np.int64)).tolist():
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
    numel_S = np.diff(np.frombuffer(segment_offsets, np.int64))
    tiles_S = -(-numel_S // _TILE)
    value_bytes = VALUE_BYTES[_FP32 if value_dtype in RICE_BITS else value_dtype]
    bitmaps = 3 * tiles_S * (_TILE // 8)
    return int((bitmaps + numel_S * value_bytes + tiles_S * (_SLACK + 16)).sum())


def rice_encode(
    values_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    residual_N: torch.Tensor | None = None,
    *,
    reports: Reports | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the message of any pruned vector: records of format Rice, or dense where smaller.

    Args:
        values_N: fp32, bf16 or fp16 on the CPU or a CUDA device; only read. The elements that are
            not zero are sent, and in kept segments, or with `spec.without_indices`, all elements.
        segments: the pieces of the vector, and where their records go.
        spec: of `FORMAT_RICE`.
        out: uint8 on the gradient's device, aligned to 16 bytes if that is CUDA; `rice_capacity`
            bytes always suffice, and with slots as many as they take. Mutated.
        scratch: uint8, `rice_scratch_capacity` bytes, aligned to 8. Mutated. None allocates it.
            None for CUDA.
        residual_N: fp32 [N], for quantised values: it is added to every element that is sent, whose
            place in it then receives the difference between the sum and the value that was sent.
            Mutated there; other elements stay. None loses the difference.
        reports: receives the report of a CUDA call, which then does not wait.

    Returns:
        int64 bytes of each record, and int64 non-zero elements of each segment; on the CPU, or with
        `reports` on the gradient's device.

    Raises:
        ExtensionError: the arguments do not fit together, or `out` is too small; the residual is
            then as it was.
    """
    op = "rice_encode"
    check_flat(op, "grad", values_N, GRAD_DTYPES)
    device = values_N.device
    if residual_N is not None:
        check_flat(op, "residual", residual_N, (torch.float32,), values_N.numel(), device)
        if spec.value_dtype not in RICE_BITS:
            raise refusal(op, "a residual needs quantised values", "3 to 6", spec.value_dtype)
    if check_device(op, "grad", values_N) == "cuda":
        # The kernel that writes the residual first finds whether the records fit.
        out = _check_cuda(op, values_N, segments, spec, out, scratch)
        report = call(
            "encode_rice_records",
            values_N,
            *codec_cuda.segment_tables(device, segments, FORMAT_RICE),
            spec.value_dtype,
            spec.step,
            spec.log2_span,
            spec.without_indices,
            out,
            residual_N,
            codec_cuda.on_device(segments.slots, device),
        )
        return codec_cuda.results(op, report, segments.offsets, reports)
    scratch = _check(op, values_N, segments, spec, out, scratch)
    return call(
        "encode_rice",
        values_N,
        segments.offsets,
        segments.dense,
        spec.value_dtype,
        spec.step,
        out,
        scratch,
        spec.log2_span,
        spec.without_indices,
        residual_N,
        segments.slots,
    )


def rice_prune_encode(
    grad_N: torch.Tensor,
    pruning: Pruning,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    reports: Reports | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error feedback, pruning, quantising and coding in one pass over gradient and residual.

    Quantised: for what is sent, the residual becomes `x - sent`, x being gradient + residual; in
    fp32 exactly, so that `sent + residual == x` (docs/wire-format.md has the exceptions). A group
    of values with NaN, infinity or a magnitude of 2^120 or more is sent as NaN, and its residual
    becomes 0. Raw values: as `prune_encode`.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        pruning: the selection's arguments. Its residual is mutated.
        segments: the pieces of the gradient, and where their records go.
        spec: of `FORMAT_RICE`.
        out: as `rice_encode`'s; with slots as many bytes as those need. Mutated.
        scratch: as `rice_encode`'s.
        reports: as `rice_encode`'s.

    Returns:
        As `rice_encode`. Neither results nor bytes depend on the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together; the residual is as it was.
    """
    op, device = "rice_prune_encode", grad_N.device
    ranges = check_selection(op, grad_N, pruning.residual_N, RESIDUAL_DTYPES, pruning.range_offsets)
    check_limits(op, pruning, ranges, device)
    if check_device(op, "grad", grad_N) == "cuda":
        out = _check_cuda(op, grad_N, segments, spec, out, scratch)
        check_capacity(op, segments, spec, out, pruning.capacity_S)
        report = call(
            "prune_encode_rice_records",
            grad_N,
            pruning.residual_N,
            codec_cuda.on_device(pruning.range_offsets, device),
            pruning.thresholds_R,
            pruning.leak,
            pruning.key,
            *codec_cuda.segment_tables(device, segments, FORMAT_RICE),
            spec.value_dtype,
            spec.step,
            spec.log2_span,
            spec.without_indices,
            out,
            codec_cuda.on_device(pruning.capacity_S, device),
            codec_cuda.on_device(segments.slots, device),
            pruning.tie_chances_R,
        )
        return codec_cuda.results(op, report, segments.offsets, reports)
    scratch = _check(op, grad_N, segments, spec, out, scratch)
    return call(
        "prune_encode_rice",
        grad_N,
        pruning.residual_N,
        pruning.range_offsets,
        pruning.thresholds_R,
        segments.offsets,
        segments.dense,
        pruning.leak,
        spec.value_dtype,
        pruning.key,
        spec.step,
        out,
        scratch,
        spec.log2_span,
        spec.without_indices,
        pruning.capacity_S,
        segments.slots,
        pruning.tie_chances_R,
    )


def _check_cuda(
    op: str,
    values_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    """The checks of both encoders' CUDA calls; returns the part of `out` that has slots."""
    refuse_scratch(op, scratch)
    _check_segments(op, values_N, segments, out)
    if not 0 <= spec.value_dtype <= max(RICE_BITS):
        expected = "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)"
        raise refusal(op, "value_dtype is unknown", expected, spec.value_dtype)
    if spec.log2_span not in RICE_SPANS:
        raise refusal(op, "log2_span is out of range", "12 to 24", spec.log2_span)
    if spec.without_indices and spec.value_dtype not in (_Q8, _Q4):
        what = "a value of every element needs other values"
        raise refusal(op, what, "3 (q8) or 4 (q4)", spec.value_dtype)
    if spec.step < 0:
        raise refusal(op, "step is out of range", "0 or more", spec.step)
    return check_slots(op, segments.slots, segments.dense.numel(), out)


def _check(
    op: str,
    values_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None,
) -> torch.Tensor:
    """The checks of both encoders' CPU calls; returns the scratch memory."""
    _check_segments(op, values_N, segments, out)
    if scratch is None:
        nbytes = rice_scratch_capacity(segments.offsets, spec.value_dtype)
        return torch.empty(nbytes, dtype=torch.uint8)
    check_flat(op, "scratch", scratch, (torch.uint8,), device=CPU)
    return scratch


def _check_segments(op: str, values_N: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
    check_offsets(op, "segment_offsets", segments.offsets, values_N.numel())
    count = segments.offsets.numel() - 1
    check_flat(op, "segment_dense", segments.dense, (torch.uint8,), count, CPU)
    check_flat(op, "out", out, (torch.uint8,), device=values_N.device)
