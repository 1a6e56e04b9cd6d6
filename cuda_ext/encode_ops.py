"""The ops that make messages, typed and checked. `ops` exports them and defines the shape suffixes.

A message is one record for each segment, back to back (docs/wire-format.md). The caller selects a
format by a code of `wire`, for example `FORMAT_ADAPTIVE`. Where the sparse record would not be
smaller, the record is dense, so a message never exceeds `message_capacity`; records of format Rice
have the sizes of `rice_capacity`.

Neither the bytes nor the errors depend on the device. Tables of offsets and flags, and the results,
are always on the CPU. So a CUDA call waits once for the device (`codec_cuda`), unless the caller
passes `Reports`, which collect the call's status for later.
"""

from __future__ import annotations

from typing import Any

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
from megatron_sparse.cuda_ext.checksum_ops import seal_
from megatron_sparse.cuda_ext.codec_checks import (
    check_capacity,
    check_encode,
    check_scratch,
    check_slots,
    compare_counts,
    record_kind,
)
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import FORMAT_BLOCKS, FORMAT_RICE, RICE_BITS


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
    op, on_cpu = "encode", grad_N.device == CPU
    check_flat(op, "grad", grad_N, GRAD_DTYPES)
    given = record_arguments(op, grad_N, segments, spec, out, scratch)
    if nnz_S is not None:
        count = segments.dense.numel()
        check_flat(op, "nnz", nnz_S, (torch.int64,), count, CPU if on_cpu else None)
    elif on_cpu:
        raise refusal(op, "nnz is missing", "the counts of a gradient on the CPU", nnz_S)
    report = call(op, grad_N, *given, nnz_S if on_cpu else None)
    sizes_S, found_S = _results(op, report, segments, spec, out, reports)
    if not on_cpu and reports is None and nnz_S is not None:
        compare_counts(found_S, nnz_S.cpu())
    return sizes_S


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
    given = (grad_N, pruning, segments, spec, out, scratch, reports)
    return _prune_encode("prune_encode", *given, is_rice=False)


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
    if residual_N is not None:
        check_flat(op, "residual", residual_N, (torch.float32,), values_N.numel(), values_N.device)
        if spec.value_dtype not in RICE_BITS:
            raise refusal(op, "a residual needs quantised values", "3 to 6", spec.value_dtype)
    given = record_arguments(op, values_N, segments, spec, out, scratch, is_rice=True)
    report = call("encode", values_N, *given, None, residual_N)
    return _results(op, report, segments, spec, out, reports)


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
    given = (grad_N, pruning, segments, spec, out, scratch, reports)
    return _prune_encode("rice_prune_encode", *given, is_rice=True)


def _prune_encode(
    op: str,
    grad_N: torch.Tensor,
    pruning: Pruning,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None,
    reports: Reports | None,
    *,
    is_rice: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = grad_N.device
    ranges = check_selection(op, grad_N, pruning.residual_N, RESIDUAL_DTYPES, pruning.range_offsets)
    check_limits(op, pruning, ranges, device)
    given = record_arguments(op, grad_N, segments, spec, out, scratch, is_rice=is_rice)
    if device.type == "cuda":
        check_capacity(op, segments, spec, out, pruning.capacity_S)
    report = call(
        "prune_encode",
        grad_N,
        *given,
        pruning.residual_N,
        codec_cuda.on_device(pruning.range_offsets, device),
        pruning.thresholds_R,
        pruning.tie_chances_R,
        pruning.leak,
        pruning.key,
        codec_cuda.on_device(pruning.capacity_S, device),
    )
    return _results(op, report, segments, spec, out, reports)


def _results(
    op: str,
    report: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    reports: Reports | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `codec_cuda.results`; seals the records."""
    results = codec_cuda.results(op, report, segments.offsets, reports)
    if spec.checksum:
        seal_(out, segments.dense.numel(), codec_cuda.on_device(segments.slots, out.device))
    return results


def record_arguments(
    op: str,
    grad_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    out: torch.Tensor,
    scratch: torch.Tensor | None,
    *,
    is_rice: bool = False,
) -> tuple[Any, ...]:
    """Checks what all encoders get; returns the native ops' arguments behind the gradient."""
    device, count = grad_N.device, segments.dense.numel()
    check_encode(op, grad_N, segments, spec, out, is_rice=is_rice)
    if check_device(op, "grad", grad_N) == "cuda":
        out = check_slots(op, segments.slots, count, out)
    scratch = check_scratch(
        op, scratch, segments.offsets, spec.value_dtype, device, is_rice=is_rice
    )
    kind = FORMAT_RICE if is_rice else record_kind(spec)
    return (
        *codec_cuda.segment_tables(device, segments, kind),
        spec.value_dtype,
        spec.step,
        spec.block_size if kind == FORMAT_BLOCKS else 0,
        spec.log2_span if is_rice else 0,
        spec.without_indices,
        out,
        codec_cuda.on_device(segments.slots, device),
        scratch,
    )
