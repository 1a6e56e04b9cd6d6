"""The ops of the native part, typed and checked, for the rest of the package.

Shape suffixes: N elements of a bucket (1-D, contiguous; fp32, bf16 or fp16), R ranges, S wire
segments, M elements of an accumulator. Dtype codes are those of the wire: 0 fp32, 1 bf16, 2 fp16.

A range or segment table is an int64 CPU tensor of ascending offsets: piece i is [i] to [i + 1].
CPU tensors are worked on by torch's own thread pool; results do not depend on the thread count.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext import codec_cuda, threshold_torch
from megatron_sparse.cuda_ext.arguments import (
    GRAD_DTYPES,
    RESIDUAL_DTYPES,
    call,
    check_code,
    check_flat,
    check_limits,
    check_selection,
    refusal,
)
from megatron_sparse.cuda_ext.codec_checks import (
    message_capacity,
    rice_capacity,
    rice_scratch_capacity,
    scratch_capacity,
)
from megatron_sparse.cuda_ext.decode_ops import decode_add_, decode_sum_
from megatron_sparse.cuda_ext.encode_ops import encode, prune_encode, rice_encode, rice_prune_encode
from megatron_sparse.cuda_ext.record_spec import Limits, Pruning

__all__ = [
    "GRAD_DTYPES",
    "RESIDUAL_DTYPES",
    "decode_add_",
    "decode_sum_",
    "encode",
    "message_capacity",
    "prune_",
    "prune_encode",
    "rice_capacity",
    "rice_encode",
    "rice_prune_encode",
    "rice_scratch_capacity",
    "sample_threshold",
    "scratch_capacity",
    "supported_isas",
    "threshold_of_samples",
]


def prune_(grad_N: torch.Tensor, pruning: Pruning, wire_dtype: int) -> torch.Tensor:
    """Leaky error feedback and pruning, fused, in place.

    For each element, in fp32: `x = g + e; drop = |x| <= t; g = drop ? 0 : round(x);
    e = drop ? leak * x : x - g`. NaN and infinity are never dropped; where x is one of them, e
    becomes 0. With fp32 throughout and leak 1, `g + e` afterwards is the fp32 sum before, bit for
    bit (but for the sign of a zero).

    With tie chances an element with `|x| == t > 0` is not dropped if a 24-bit hash of (key, index
    in the bucket), over 2^24, is less than its range's chance.

    `round` is to the values that both the gradient's dtype and `wire_dtype` hold, saturating at
    the largest finite one; what it cuts off goes to the residual. It is stochastic: up with the
    probability of the part cut off, by random bits that are a pure function of (key, index in the
    bucket). So is the rounding of a bf16 residual. With a negative key both go to nearest even.

    Args:
        grad_N: becomes the values to send. Mutated.
        pruning: what is selected; empty ranges are allowed, a capacity is not. Its residual is
            mutated.
        wire_dtype: dtype code in which values will travel.

    Returns:
        int64 nnz_R on the gradient's device: stored values that are not zero. No host
        synchronisation; on CUDA everything is on the current stream, and the kernel is Triton's.

    Raises:
        ExtensionError: arguments that do not fit together.

    Example:
        >>> g, e = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.5])
        >>> pruning = Pruning(e, torch.tensor([0, 2]), torch.tensor([2.0]), leak=0.5, key=0)
        >>> prune_(g, pruning, 0), g, e
        (tensor([1]), tensor([3., 0.]), tensor([0.0000, 0.7500]))
    """
    ranges = check_selection(
        "prune_", grad_N, pruning.residual_N, RESIDUAL_DTYPES, pruning.range_offsets
    )
    check_limits("prune_", pruning, ranges, grad_N.device)
    check_code("prune_", "wire_dtype", wire_dtype)
    if not 0 <= pruning.leak <= 1:
        raise refusal("prune_", "leak is out of range", "0 to 1", pruning.leak)
    if pruning.capacity_S is not None:
        raise refusal("prune_", "a capacity is given", "None", pruning.capacity_S.tolist())
    if grad_N.device.type == "cpu":
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
        codec_cuda.on_device(pruning.range_offsets, grad_N.device),
        (pruning.thresholds_R, pruning.tie_chances_R),
        pruning.leak,
        wire_dtype,
        pruning.key,
    )


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> Limits:
    """The limits that select about `density` of each range, from a stratified sample.

    From a range of n elements it samples s = min(n, samples), one in each of s equal strata; with
    n <= samples that is all of them. The threshold is the magnitude `|g + e|` of descending rank
    floor(density * s), from 0. Of the samples, A exceed it and E equal it; the tie chance is
    (density * s - A) / E, so density * s samples are selected on average, whatever their
    distribution. Where E is 1 the range's key draws here whether that sample is selected: its
    chance is 0 or 1, and does not depend on its place in a bucket. A threshold of 0, which selects
    all that is not zero, has chance 0; so has infinity, which is always sent. NaN counts as
    infinite. A pure function of its arguments.

    Args:
        grad_N: only read.
        residual_N: fp32, bf16 or fp16; None for zeros. Only read.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N.
        densities_R: fp32 on the CPU, above 0; 1 and more keeps all of a range.
        samples: elements to look at in each range.
        keys_R: int64 on the CPU; keys of the sample positions and of that draw.

    Returns:
        Limits_R on the gradient's device; threshold -1, chance 0 and no ties for a range that is
        empty or kept whole. No host synchronisation.

    Raises:
        ExtensionError: arguments that do not fit together.

    Example:
        >>> g = torch.tensor([1.0, -4.0, 2.0, 2.0])
        >>> sample_threshold(
        ...     g, None, torch.tensor([0, 4]), torch.tensor([0.5]), 10, torch.tensor([7])
        ... )
        Limits(thresholds=tensor([2.]), tie_chances=tensor([0.5000]), ties=tensor([2]))
    """
    ranges = check_selection("sample_threshold", grad_N, residual_N, GRAD_DTYPES, range_offsets)
    cpu = torch.device("cpu")
    check_flat("sample_threshold", "densities", densities_R, (torch.float32,), ranges, cpu)
    check_flat("sample_threshold", "keys", keys_R, (torch.int64,), ranges, cpu)
    if not 1 <= samples < 2**31:
        raise refusal("sample_threshold", "samples is out of range", "1 to 2^31 - 1", samples)
    if not bool((densities_R > 0).all()):
        raise refusal(
            "sample_threshold", "a density is out of range", "above 0", densities_R.tolist()
        )
    device = grad_N.device
    found = call(
        "sample_threshold",
        grad_N,
        residual_N,
        codec_cuda.on_device(range_offsets, device),
        codec_cuda.on_device(densities_R, device),
        samples,
        codec_cuda.to_device(keys_R, device),
    )
    return Limits(*found)


def threshold_of_samples(magnitudes_K: torch.Tensor, density: float) -> Limits:
    """The limits of one sample that was already taken; the rule of `sample_threshold`.

    Args:
        magnitudes_K: fp32 `|g + e|` of K samples, on any device. Only read.
        density: above 0; 1 and more keeps all.

    Returns:
        0-D limits on the same device; threshold -1 for no samples. No host synchronisation.

    Raises:
        ExtensionError: wrong shape, dtype or density.

    Example:
        >>> threshold_of_samples(torch.tensor([2.0, 4.0, 2.0, 3.0]), 0.625)
        Limits(thresholds=tensor(2.), tie_chances=tensor(0.2500), ties=tensor(2))
    """
    check_flat("threshold_of_samples", "magnitudes", magnitudes_K, (torch.float32,))
    if not density > 0:
        raise refusal("threshold_of_samples", "density is out of range", "above 0", density)
    return threshold_torch.threshold_of_samples(magnitudes_K, density)


def supported_isas() -> list[str]:
    """The names that MEGATRON_SPARSE_ISA may have on this machine, slowest first.

    If the variable is not set, ops use the best one. Every call of an op reads the variable.
    """
    return call("supported_isas").split(",")
