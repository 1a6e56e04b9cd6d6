"""The ops that make messages, typed and checked. `ops` exports them and defines the shape suffixes.

A message is one record for each segment, back to back (docs/wire-format.md). The caller selects a
format by a code of `wire`, for example `FORMAT_ADAPTIVE`. Where the sparse record would not be
smaller, the record is dense, so a message never exceeds `message_capacity`.

Neither the bytes nor the errors depend on the device. Tables of offsets and flags, and the results,
are always on the CPU. So a CUDA call waits once for the device (`codec_cuda`), unless the caller
passes `Reports`, which collect the call's status for later.
"""

from __future__ import annotations

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
    check_selection,
    refusal,
)
from megatron_sparse.cuda_ext.codec_checks import (
    check_capacity,
    check_encode,
    check_scratch,
    check_slots,
    compare_counts,
    refuse_scratch,
)
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import FORMAT_BLOCKS


def encode(
    grad_N: torch.Tensor,
    segments: Segments,
    nnz_S: torch.Tensor | None,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    reports: Reports | None = None,
) -> torch.Tensor:
    """Writes the wire message of a pruned bucket, reading the gradient once.

    Values are converted to the record's dtype, rounded to nearest even where they do not fit.
    Pruned values fit. Wire cost: 48 bytes and the padding of each record. In addition to its
    values, COO takes 4 bytes an entry, Pici 516 for each 4096 elements, blocks 4 and the zeros for
    each block.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        segments: the pieces of the gradient, and where their records go.
        nnz_S: int64, the non-zero elements of each segment, as `prune_` counts them. May be None
            for a gradient on a CUDA device, where the encoder counts.
        spec: the format of the records.
        out: uint8, at least as long as the message (`message_capacity` always is), on the
            gradient's device; aligned to 16 bytes if that is CUDA. Mutated; bytes after the
            message stay as they were.
        scratch: uint8, `scratch_capacity` bytes, aligned to 8. Mutated. None allocates it, which
            costs more than the encoding of a small bucket. None for CUDA, whose allocator is fast.
        reports: receives the report of a CUDA call, which then does not wait; `nnz_S` must be None.

    Returns:
        int64 bytes of each record, on the CPU, or with `reports` on the gradient's device. The
        bytes do not depend on the number of threads.

    Raises:
        ExtensionError: the arguments do not fit together, `out` or a slot is too small, or the
            counts are not the gradient's.
    """
    check_flat("encode", "grad", grad_N, GRAD_DTYPES)
    kind = check_encode("encode", grad_N, segments, spec, out)
    if nnz_S is not None:
        check_flat("encode", "nnz", nnz_S, (torch.int64,), segments.dense.numel())
    if check_device("encode", "grad", grad_N) == "cuda":
        refuse_scratch("encode", scratch)
        out = check_slots("encode", segments.slots, segments.dense.numel(), out)
        report = call(
            "encode_records",
            grad_N,
            *codec_cuda.segment_tables(grad_N.device, segments, kind),
            spec.value_dtype,
            spec.step,
            _blocks_only(spec),
            out,
            codec_cuda.on_device(segments.slots, grad_N.device),
        )
        sizes_S, found_S = codec_cuda.results("encode", report, segments.offsets, reports)
        if reports is None and nnz_S is not None:
            compare_counts(found_S, nnz_S.cpu())
        return sizes_S
    if nnz_S is None:
        raise refusal("encode", "nnz is missing", "the counts of a gradient on the CPU", nnz_S)
    check_flat("encode", "nnz", nnz_S, (torch.int64,), device=CPU)
    scratch = check_scratch("encode", scratch, segments.offsets, spec.value_dtype)
    return call(
        "encode",
        grad_N,
        segments.offsets,
        segments.dense,
        nnz_S,
        spec.value_dtype,
        spec.step,
        out,
        scratch,
        kind,
        spec.block_size,
        segments.slots,
    )


def prune_encode(
    grad_N: torch.Tensor,
    pruning: Pruning,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    reports: Reports | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error feedback, pruning and encoding in one pass, without a pruned gradient in between.

    Message and residual are byte for byte those of `prune_` followed by `encode` (arguments as
    there), but the gradient is left as it was. Gradient and residual are read once, residual and
    message are written once.

    With a capacity a segment sends only that many of its non-zero elements, the first ones. The
    others count as not selected: their residual becomes leak * (value + residual), which is
    leak * x bit for bit where values are not narrowed (else to within the rounding of the
    residual). If one of the others is infinity or NaN, the segment's last value becomes NaN.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        pruning: the selection's arguments. Its residual is mutated.
        segments: the pieces of the gradient. Each slot must have room for the largest record that
            its segment may send.
        spec: the format of the records.
        out: uint8, `message_capacity` bytes (with a capacity or slots, as many as those need),
            otherwise as in `encode`. Mutated.
        scratch: as in `encode`.
        reports: as in `encode`.

    Returns:
        int64 bytes of each record and int64 nnz_S, on the CPU, or with `reports` on the gradient's
        device. Neither they nor the bytes depend on the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together; the residual is as it was.

    Example:
        >>> whole, no = torch.tensor([0, 16]), torch.zeros(1, dtype=torch.uint8)
        >>> pruning = Pruning(torch.zeros(16), whole, torch.tensor([2.0]), leak=1.0, key=0)
        >>> g, out = torch.tensor([3.0, 1.0] * 8), torch.zeros(112, dtype=torch.uint8)
        >>> prune_encode(g, pruning, Segments(whole, no), RecordSpec(1, step=0), out)
        (tensor([80]), tensor([8]))
    """
    op, device = "prune_encode", grad_N.device
    ranges = check_selection(op, grad_N, pruning.residual_N, RESIDUAL_DTYPES, pruning.range_offsets)
    check_limits(op, pruning, ranges, device)
    kind = check_encode(op, grad_N, segments, spec, out)
    if check_device(op, "grad", grad_N) == "cuda":
        refuse_scratch(op, scratch)
        out = check_slots(op, segments.slots, segments.dense.numel(), out)
        check_capacity(op, segments, spec, out, pruning.capacity_S)
        report = call(
            "prune_encode_records",
            grad_N,
            pruning.residual_N,
            codec_cuda.on_device(pruning.range_offsets, device),
            pruning.thresholds_R,
            pruning.leak,
            pruning.key,
            *codec_cuda.segment_tables(device, segments, kind),
            spec.value_dtype,
            spec.step,
            _blocks_only(spec),
            out,
            codec_cuda.on_device(pruning.capacity_S, device),
            codec_cuda.on_device(segments.slots, device),
            pruning.tie_chances_R,
        )
        return codec_cuda.results(op, report, segments.offsets, reports)
    scratch = check_scratch(op, scratch, segments.offsets, spec.value_dtype)
    return call(
        op,
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
        kind,
        spec.block_size,
        pruning.capacity_S,
        segments.slots,
        pruning.tie_chances_R,
    )


def _blocks_only(spec: RecordSpec) -> int:
    """The block size for the CUDA encoders, which count blocks where it is not 0."""
    return spec.block_size if spec.record_format == FORMAT_BLOCKS else 0
