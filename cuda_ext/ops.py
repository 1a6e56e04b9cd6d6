"""The native ops for the rest of the package, typed and checked: pruning, encoding, thresholds.

Shape suffixes: N elements of a bucket (1-D, contiguous; fp32, bf16 or fp16), R ranges (with one
threshold each), S segments (with one record each), M elements of an accumulator. Dtype codes are
those of the wire: 0 fp32, 1 bf16, 2 fp16. The residual (error feedback) holds what was not sent.

A range or segment table is an int64 CPU tensor of ascending offsets: piece i is from offset i to
offset i + 1. CPU ops run in torch's thread pool; results do not depend on the number of threads.

A message is one record for each segment, back to back (docs/wire-format.md). The caller of an
encoder selects a format by a code of `wire`, for example `FORMAT_ADAPTIVE`; only Rice quantises.
Where the sparse record would not be smaller, and in kept segments always, the record is dense, so a
message never exceeds `message_capacity`. Neither the bytes nor the errors depend on the device.
Tables and results are on the CPU. So a CUDA call waits once for the device (`codec_cuda`), unless
the caller passes `Reports`, which collect the call's status for later.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import (
    CPU,
    GRAD_DTYPES,
    RESIDUAL_DTYPES,
    call,
    check_code,
    check_device,
    check_flat,
    check_limits,
    check_offsets,
    refusal,
)
from megatron_sparse.cuda_ext.checksum_ops import seal_
from megatron_sparse.cuda_ext.codec_checks import (
    check_capacity,
    check_encode,
    check_slots,
    compare_counts,
    message_capacity,
    record_kind,
)
from megatron_sparse.cuda_ext.decode_ops import decode_add_, decode_sum_
from megatron_sparse.cuda_ext.record_spec import Limits, Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import FORMAT_BLOCKS, FORMAT_RICE

__all__ = [
    "GRAD_DTYPES",
    "RESIDUAL_DTYPES",
    "decode_add_",
    "decode_sum_",
    "encode",
    "message_capacity",
    "prune_",
    "prune_encode",
    "sample_threshold",
    "supported_isas",
]


def prune_(grad_N: torch.Tensor, pruning: Pruning, wire_dtype: int) -> torch.Tensor:
    """Adds the residual to the gradient and prunes the sum, in place and in one pass.

    For each element, in fp32: `x = g + e; drop = |x| <= t; g = drop ? 0 : round(x);
    e = drop ? leak * x : x - g`. NaN and infinity are never dropped; where x is one of them, e
    becomes 0. With fp32 throughout and leak 1, `g + e` afterwards is the fp32 sum before, bit for
    bit (but for the sign of a zero).

    With tie chances an element with `|x| == t > 0` is not dropped if a 24-bit hash of (key, index
    in the bucket), over 2^24, is less than its range's chance.

    `round` is to the values that both the gradient's dtype and `wire_dtype` hold, saturating at
    the largest finite one; the rounding error goes to the residual. It is stochastic: up with the
    probability of the fraction cut off, by random bits that are a pure function of (key, index in
    the bucket). So is the rounding of a bf16 residual. With a negative key both go to nearest even.

    Args:
        grad_N: becomes the values to send, 0 where dropped. Mutated.
        pruning: thresholds t, residual e, leak and key; empty ranges are allowed, `capacity_S` and
            `old_residual_N` are not. Its residual is mutated.
        wire_dtype: dtype code in which the values will be sent.

    Returns:
        int64 nnz_R on the gradient's device: values that are not zero afterwards. The CPU waits for
        nothing; on CUDA this is one Triton kernel on the current stream.

    Raises:
        ExtensionError: arguments that do not fit together.

    Example:
        >>> g, e = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.5])
        >>> pruning = Pruning(e, torch.tensor([0, 2]), torch.tensor([2.0]), leak=0.5, key=0)
        >>> prune_(g, pruning, 0), g, e
        (tensor([1]), tensor([3., 0.]), tensor([0.0000, 0.7500]))
    """
    device = grad_N.device
    check_flat("prune_", "grad", grad_N, GRAD_DTYPES)
    check_flat("prune_", "residual", pruning.residual_N, RESIDUAL_DTYPES, grad_N.numel(), device)
    check_offsets("prune_", "range_offsets", pruning.range_offsets, grad_N.numel())
    check_limits("prune_", pruning, device)
    check_code("prune_", "wire_dtype", wire_dtype)
    if not 0 <= pruning.leak <= 1:
        raise refusal("prune_", "leak is out of range", "0 to 1", pruning.leak)
    if pruning.capacity_S is not None:
        raise refusal("prune_", "a capacity is given", "None", pruning.capacity_S.tolist())
    if pruning.old_residual_N is not None:
        raise refusal("prune_", "an old residual is given", "None", "a tensor")
    if device.type == "cpu":
        return call(
            "prune_",
            grad_N,
            pruning.residual_N,
            pruning.range_offsets,
            pruning.thresholds_R,
            pruning.leak,
            wire_dtype,
            pruning.key,
            pruning.tie_chances_R,
        )
    from megatron_sparse.triton_kernels import prune

    return prune.prune_(
        grad_N,
        pruning.residual_N,
        codec_cuda.on_device(pruning.range_offsets, device),
        (pruning.thresholds_R, pruning.tie_chances_R),
        pruning.leak,
        wire_dtype,
        pruning.key,
    )


def encode(
    grad_N: torch.Tensor,
    segments: Segments,
    nnz_S: torch.Tensor | None,
    spec: RecordSpec,
    out: torch.Tensor,
    residual_N: torch.Tensor | None = None,
    *,
    reports: Reports | None = None,
) -> torch.Tensor:
    """Writes the message of a pruned bucket into `out`, reading the gradient once.

    Values are rounded to nearest even in the record's dtype; those of `prune_` fit exactly. Bytes
    of a record: 48, its values and padding. In addition COO takes 4 bytes for each entry, Pici 516
    for each 4096 elements, and blocks take 16, and for each block that is sent 4 and its zeros.

    Args:
        grad_N: on the CPU or a CUDA device; only read. The elements that are not zero are sent, and
            in kept segments, or with `spec.without_indices`, all elements.
        segments: the pieces of the gradient, and where their records go.
        nnz_S: int64, the non-zero elements of each segment, as `prune_` counts them. Format Rice
            does not read them, and on CUDA they may be None: there the encoder counts.
        spec: the format of the records.
        out: uint8, at least as long as the message (`message_capacity` always is), on the
            gradient's device; aligned to 16 bytes if that is CUDA. Mutated; bytes after the
            message stay as they were.
        residual_N: fp32 [N], for quantised values. The residual of each element that is sent is
            added first, and then becomes the sum minus the value that was sent. Mutated there;
            other elements stay. None adds nothing, and the quantisation error is lost.
        reports: takes the report of a CUDA call, which then does not wait; `nnz_S` must be None.

    Returns:
        int64 bytes of each record, on the CPU, or with `reports` on the gradient's device. The
        bytes do not depend on the number of threads.

    Raises:
        ExtensionError: the arguments do not fit together, `out` or a slot is too small, or the
            counts are not the gradient's; the residual is then as it was.
    """
    op, on_cpu = "encode", grad_N.device == CPU
    record_arguments = _record_arguments(op, grad_N, segments, spec, out)
    if spec.record_format == FORMAT_RICE:
        nnz_S = None  # Rice's encoder counts on either device
    elif nnz_S is not None:
        count = segments.dense.numel()
        check_flat(op, "nnz", nnz_S, (torch.int64,), count, CPU if on_cpu else None)
    # On CUDA the encoder counts too; its counts are compared below.
    report = call(op, grad_N, *record_arguments, nnz_S if on_cpu else None, residual_N)
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
    *,
    reports: Reports | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual, prunes and encodes in one pass; the gradient stays unchanged.

    Message and residual are byte for byte those of `prune_` followed by `encode` (arguments as
    there). Gradient and residual are read once, residual and message are written once.

    Quantised values, of format Rice: for what is sent, the residual becomes `x - sent`, x being
    gradient + residual; in fp32 exactly, so that `sent + residual == x` (docs/wire-format.md has
    the exceptions). A group of values with NaN, infinity or a magnitude of 2^120 or more is sent as
    NaN, and its residual becomes 0.

    With a capacity c a segment sends only the first c of its selected non-zero elements. All later
    ones count as dropped: their residual becomes leak * (value + rounding error), which is leak * x
    bit for bit where values are not narrowed (else to within the rounding of the residual). If a
    later one is infinity or NaN, the last value that the segment sends becomes NaN.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        pruning: what to select, and the capacity. Its residual is mutated.
        segments: the pieces of the gradient. Each slot must have room for the largest record that
            its segment may send. On the CPU they may be some consecutive pieces only: the call
            then prunes those, and their records are the same.
        spec: the format of the records.
        out: uint8, as in `encode`, and at least `message_capacity` bytes; with a capacity or slots
            as many as those need. Mutated.
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
    check_offsets(op, "range_offsets", pruning.range_offsets, grad_N.numel())
    check_limits(op, pruning, device)
    record_arguments = _record_arguments(op, grad_N, segments, spec, out)
    if device.type == "cuda":
        check_capacity(op, segments, spec, out, pruning.capacity_S)
    report = call(
        op,
        grad_N,
        *record_arguments,
        pruning.residual_N,
        codec_cuda.on_device(pruning.range_offsets, device),
        pruning.thresholds_R,
        pruning.tie_chances_R,
        pruning.leak,
        pruning.key,
        codec_cuda.on_device(pruning.capacity_S, device),
        pruning.old_residual_N,
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
    """Checks an encoder's report, seals the records if `spec.checksum`, and splits the report.

    A CUDA report is copied to the CPU here or, with `reports`, left on the device for `reports` to
    check. A CPU encoder has raised its errors itself. Returns each record's int64 bytes, and its
    count of non-zero elements.

    Raises:
        ExtensionError: the output buffer or a slot is too small, or a segment too long; no record
            was written.
    """
    check = partial(codec_cuda.check_report, op, segment_offsets=segments.offsets)
    if report.is_cuda and reports is not None:
        reports.add(report, check)
    elif report.is_cuda:
        report = report.cpu()
        check(report)
    if spec.checksum:
        seal_(out, segments.dense.numel(), codec_cuda.on_device(segments.slots, out.device))
    sizes_S, nnz_S = report[codec_cuda.STATUS_WORDS :].view(2, -1)
    return sizes_S, nnz_S


def _record_arguments(
    op: str, grad_N: torch.Tensor, segments: Segments, spec: RecordSpec, out: torch.Tensor
) -> tuple[Any, ...]:
    """Checks the arguments common to all encoders; returns the native op's from the second on."""
    device, count = grad_N.device, segments.dense.numel()
    check_encode(op, grad_N, segments, spec)
    if check_device(op, "grad", grad_N) == "cuda":  # the CPU op checks the slots itself
        out = check_slots(op, segments.slots, count, out)
    kind = record_kind(spec)
    return (
        codec_cuda.on_device(segments.offsets, device),
        codec_cuda.record_kinds(segments.dense, kind, device),
        spec.value_dtype,
        spec.step,
        spec.block_size if kind == FORMAT_BLOCKS else 0,
        spec.log2_span if kind == FORMAT_RICE else 0,
        spec.without_indices,
        out,
        codec_cuda.on_device(segments.slots, device),
    )


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> Limits:
    """Samples each range to find the limits that keep about the part `density` of its elements.

    Of a range of n elements it samples s = min(n, samples), one from each of s equal strata. The
    threshold is the magnitude `|g + e|` of rank floor(density * s), in descending order from 0. Of
    the samples, A exceed it and E equal it. The tie chance is (density * s - A) / E, so density * s
    samples are kept on average, whatever their distribution. If E is 1 that chance is rounded here
    to 0 or 1 at random, by the range's key: so whether the sample is kept does not depend on the
    element's index in the bucket. A threshold of 0, above which all non-zero elements lie, has
    chance 0; so has infinity, which is always sent. NaN counts as infinite. A pure function.

    Args:
        grad_N: only read.
        residual_N: fp32, bf16 or fp16; None for zeros. Only read.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N.
        densities_R: fp32 on the CPU, above 0; 1 and more keeps all of a range.
        samples: the most elements to sample from a range.
        keys_R: int64 on the CPU: each range's key, which determines its random choices.

    Returns:
        Limits_R on the gradient's device; threshold -1, chance 0 and no ties for a range that is
        empty or kept whole. The CPU does not wait for them.

    Raises:
        ExtensionError: arguments that do not fit together.

    Example:
        >>> g = torch.tensor([1.0, -4.0, 2.0, 2.0])
        >>> sample_threshold(
        ...     g, None, torch.tensor([0, 4]), torch.tensor([0.5]), 10, torch.tensor([7])
        ... )
        Limits(thresholds=tensor([2.]), tie_chances=tensor([0.5000]), ties=tensor([2]))
    """
    op, device = "sample_threshold", grad_N.device
    # The compiled op, which checks the other arguments, does not check what these tables hold.
    check_offsets(op, "range_offsets", range_offsets, grad_N.numel())
    check_flat(op, "densities", densities_R, (torch.float32,), range_offsets.numel() - 1, CPU)
    if not bool((densities_R > 0).all()):
        raise refusal(op, "a density is out of range", "above 0", densities_R.tolist())
    found = call(
        op,
        grad_N,
        residual_N,
        codec_cuda.on_device(range_offsets, device),
        codec_cuda.on_device(densities_R, device),
        samples,
        codec_cuda.to_device(keys_R, device),  # not cached: each step has other keys
    )
    return Limits(*found)


def supported_isas() -> list[str]:
    """The instruction sets that MEGATRON_SPARSE_ISA may name on this machine, slowest first.

    If the variable is not set, ops use the last one. Every call of an op reads the variable.
    """
    return call("supported_isas").split(",")
