"""The ops that make messages, typed and checked. `ops` passes them on; shape suffixes are its.

A message is one record for each segment, back to back (docs/wire-format.md). What a record becomes
is asked for by a format code of `wire`, `FORMAT_ADAPTIVE` among them; where the sparse
form would not be smaller the record is dense, so a message never exceeds `message_capacity`.

The bytes do not depend on the device, nor do errors. Tables of offsets and flags, and what comes
back, are always on the CPU; a CUDA call therefore waits once for the device (`codec_cuda`), unless
it is given `Reports` to leave its words in.
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
from megatron_sparse.cuda_ext.fakes import STATUS_WORDS
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import FORMAT_BLOCKS, FORMAT_COO

DEFAULT_BLOCK_SIZE = 256
"""Elements of a block; OmniReduce's own choice."""


def encode(
    grad_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz_S: torch.Tensor | None,
    value_dtype: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    form: int = FORMAT_COO,
    paper_order: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
    slots_S: torch.Tensor | None = None,
    reports: Reports | None = None,
) -> torch.Tensor:
    """Writes the wire message of a pruned bucket, reading the gradient once.

    Values are converted to `value_dtype`, to nearest even where they do not fit, which pruned ones
    do. Wire cost: 48 bytes and the padding of each record; beside its values, COO takes 4 bytes an
    entry, Pici 516 for each 4096 elements, blocks 4 and the zeros for each block.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        segment_offsets: S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        segment_dense: uint8, 1 for segments that are dense whatever they hold.
        nnz_S: int64, the non-zero elements of each segment, as `prune_` counts them. May be None
            for a gradient on a CUDA device, where the encoder counts.
        value_dtype: dtype code of the values.
        epoch: the step; its lower 32 bits travel.
        out: uint8, at least as long as the message (`message_capacity` always is), on the
            gradient's device; aligned to 16 bytes if that is CUDA. Mutated; what lies behind the
            message is left alone.
        scratch: uint8, `scratch_capacity` bytes, aligned to 8. Mutated. None allocates it, which
            costs more than the encoding of a small bucket. None for CUDA, whose allocator is fast.
        form: `FORMAT_DENSE`, `FORMAT_COO`, `FORMAT_PICI`, `FORMAT_BLOCKS`, or `FORMAT_ADAPTIVE` for
            the smallest of dense, COO and Pici in each segment, where COO wins a tie.
        paper_order: bits and values of Pici in the order of its paper instead of linear order.
        block_size: elements of a block: a power of two from 64 to 4096.
        slots_S: int64 on the CPU, S+1 bytes at which records begin and the last one's place ends:
            ascending multiples of 16 from 0 on. What a record leaves of its place is cleared. None
            puts them back to back.
        reports: takes what a CUDA call reports, which then is not waited for; `nnz_S` must be None.

    Returns:
        int64 bytes of each record, on the CPU, or with `reports` on the gradient's device. The
        bytes do not depend on the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together, `out` or a slot too small, or counts
            that are not what the gradient holds.
    """
    check_flat("encode", "grad", grad_N, GRAD_DTYPES)
    kind = check_encode(
        "encode",
        grad_N,
        segment_offsets,
        segment_dense,
        value_dtype,
        epoch,
        out,
        form,
        paper_order,
        block_size,
    )
    if nnz_S is not None:
        check_flat("encode", "nnz", nnz_S, (torch.int64,), segment_dense.numel())
    if check_device("encode", "grad", grad_N) == "cuda":
        refuse_scratch("encode", scratch)
        out = check_slots("encode", slots_S, segment_dense.numel(), out)
        report = call(
            "encode_records",
            grad_N,
            *_device_tables(grad_N.device, segment_offsets, segment_dense, kind),
            value_dtype,
            epoch,
            _blocks_only(form, block_size),
            out,
            codec_cuda.on_device(slots_S, grad_N.device),
        )
        if reports is not None:
            return _later("encode", report, segment_offsets, reports)[0]
        sizes, found_S = codec_cuda.read_report("encode", report, segment_offsets)
        compare_counts(found_S, found_S if nnz_S is None else nnz_S.cpu())
        return sizes
    if nnz_S is None:
        raise refusal("encode", "nnz is missing", "the counts of a gradient on the CPU", nnz_S)
    check_flat("encode", "nnz", nnz_S, (torch.int64,), device=CPU)
    scratch = check_scratch("encode", scratch, segment_offsets, value_dtype)
    return call(
        "encode",
        grad_N,
        segment_offsets,
        segment_dense,
        nnz_S,
        value_dtype,
        epoch,
        out,
        scratch,
        kind,
        block_size,
        slots_S,
    )


def prune_encode(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds_R: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    form: int = FORMAT_COO,
    paper_order: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
    capacity_S: torch.Tensor | None = None,
    slots_S: torch.Tensor | None = None,
    reports: Reports | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error feedback, pruning and encoding in one pass, without a pruned gradient in between.

    Message and residual are byte for byte those of `prune_` followed by `encode` (arguments as
    there), but the gradient is left as it was. Gradient and residual are read once, residual and
    message are written once.

    With `capacity_S` a segment sends its first non-zero elements up to that count. The others were
    not selected: their residual becomes leak * (value + residual), which is leak * x bit for bit
    where values are not narrowed (else to within the rounding of the residual). Infinity and NaN
    among them are not held back: the segment's last value becomes NaN.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        residual_N: fp32 or bf16, on the gradient's device. Mutated.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N.
        thresholds_R: fp32, on the gradient's device; below 0 keeps all of a range, NaN too.
        segment_offsets: S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        segment_dense: uint8, 1 for segments that are dense whatever they hold.
        leak: factor on what is dropped, 0 to 1.
        wire_dtype: dtype code in which values travel.
        key: of the random bits of stochastic rounding; negative for rounding to nearest.
        epoch: the step; its lower 32 bits travel.
        out: uint8, `message_capacity` bytes (with a capacity or slots, as many as those need),
            otherwise as in `encode`. Mutated.
        scratch: as in `encode`.
        form: as in `encode`.
        paper_order: as in `encode`.
        block_size: as in `encode`.
        capacity_S: int64 on the CPU, the most non-zero elements of each segment; None for no limit.
        slots_S: as in `encode`; each must have room for what its segment may send.
        reports: as in `encode`.

    Returns:
        int64 bytes of each record and int64 nnz_S, on the CPU, or with `reports` on the gradient's
        device. Neither they nor the bytes depend on the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together; the residual is as it was.

    Example:
        >>> g, e, whole = torch.tensor([3.0, 1.0] * 8), torch.zeros(16), torch.tensor([0, 16])
        >>> out, no = torch.zeros(112, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        >>> prune_encode(g, e, whole, torch.tensor([2.0]), whole, no, 1.0, 1, 0, 0, out)
        (tensor([80]), tensor([8]))
    """
    device = grad_N.device
    ranges = check_selection("prune_encode", grad_N, residual_N, RESIDUAL_DTYPES, range_offsets)
    check_flat("prune_encode", "thresholds", thresholds_R, (torch.float32,), ranges, device)
    kind = check_encode(
        "prune_encode",
        grad_N,
        segment_offsets,
        segment_dense,
        wire_dtype,
        epoch,
        out,
        form,
        paper_order,
        block_size,
    )
    if check_device("prune_encode", "grad", grad_N) == "cuda":
        refuse_scratch("prune_encode", scratch)
        out = check_slots("prune_encode", slots_S, segment_dense.numel(), out)
        check_capacity(segment_offsets, segment_dense, wire_dtype, form, out, capacity_S, slots_S)
        report = call(
            "prune_encode_records",
            grad_N,
            residual_N,
            codec_cuda.on_device(range_offsets, device),
            thresholds_R,
            leak,
            key,
            *_device_tables(device, segment_offsets, segment_dense, kind),
            wire_dtype,
            epoch,
            _blocks_only(form, block_size),
            out,
            codec_cuda.on_device(capacity_S, device),
            codec_cuda.on_device(slots_S, device),
        )
        if reports is not None:
            return _later("prune_encode", report, segment_offsets, reports)
        return codec_cuda.read_report("prune_encode", report, segment_offsets)
    scratch = check_scratch("prune_encode", scratch, segment_offsets, wire_dtype)
    return call(
        "prune_encode",
        grad_N,
        residual_N,
        range_offsets,
        thresholds_R,
        segment_offsets,
        segment_dense,
        leak,
        wire_dtype,
        key,
        epoch,
        out,
        scratch,
        kind,
        block_size,
        capacity_S,
        slots_S,
    )


def _later(
    op: str, report: torch.Tensor, segment_offsets: torch.Tensor, reports: Reports
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves an encoder's report for later; returns sizes and counts, on its device."""
    reports.add(report, lambda words: codec_cuda.check_report(op, words, segment_offsets))
    sizes_S, nnz_S = report[STATUS_WORDS:].view(2, -1)
    return sizes_S, nnz_S


def _device_tables(
    device: torch.device, segment_offsets: torch.Tensor, segment_dense: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the segments and what each is to become, on the device."""
    kinds = codec_cuda.record_kinds(segment_dense, kind, device)
    return codec_cuda.on_device(segment_offsets, device), kinds


def _blocks_only(form: int, block_size: int) -> int:
    """The block size for the CUDA encoders, which count blocks where it is not 0."""
    return block_size if form == FORMAT_BLOCKS else 0
