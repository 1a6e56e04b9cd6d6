"""Limits from samples: one for each parameter, or one for the pruned part of a bucket.

Both sample `samples` elements by count, not by percentage, at positions that are a pure function of
(seed, step, parameter or bucket): stratum j of s holds the elements floor(j n / s) to
floor((j + 1) n / s), and a counter hash picks one of them.

A limit is a threshold and the chance of what ties with it, so that `density` of a parameter is sent
whatever its distribution: `ops.sample_threshold` has the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from megatron_sparse.bucket import Bucket, Layout, ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.cuda_ext import codec_cuda, ops, threshold_triton
from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.formats.codec_choice import is_compiled


def draw_key(seed: int, step: int, *names: object) -> int:
    """A non-negative 63-bit key for the random draw that `names` names in step `step`.

    A draw (sample positions, stochastic rounding) must not depend on how parameters are grouped
    into buckets, on the process, or on Python's salted `hash`, so that a resumed run repeats it.

    Example:
        >>> draw_key(1, 2, "w") == draw_key(1, 2, "w") != draw_key(1, 3, "w")
        True
    """
    text = "\0".join([str(seed), str(step), *map(str, names)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def range_limits(
    bucket: Bucket,
    layout: Layout,
    residual_N: torch.Tensor,
    density: float,
    step: int,
    config: CompressionConfig,
    agreed: Limits | None = None,
) -> Limits:
    """The limits of every range of the layout.

    Args:
        bucket: the gradients.
        layout: how the bucket is cut.
        residual_N: of the bucket; only read.
        density: target density of the pruned parameters.
        step: keys the samples.
        config: scope, number of samples, seed.
        agreed: the limits, 0-D, that ranks have agreed on (`group_limits`); None samples.

    Returns:
        Limits_R on the bucket's device; thresholds of ranges that are not pruned, and all of them
        at density 1, are `KEEP_ALL`. No host synchronisation.
    """
    piece_R = codec_cuda.on_device(layout.range_piece, bucket.grad_N.device)
    limits_P = _piece_limits(bucket, layout, residual_N, density, step, config, agreed)
    return Limits(*(each_P[piece_R] for each_P in limits_P))


def _piece_limits(
    bucket: Bucket,
    layout: Layout,
    residual_N: torch.Tensor,
    density: float,
    step: int,
    config: CompressionConfig,
    agreed: Limits | None,
) -> Limits:
    """The limits of every piece of the layout, each of which has one range or more."""
    device = bucket.grad_N.device
    # Kept and lossless parameters and padding have no threshold.
    pruned_P = [owner >= 0 and bucket.parameters[owner].pruned for owner in layout.piece_parameter]
    if density >= 1:
        return Limits.keep_all((len(pruned_P),), device)
    limits = agreed
    if limits is None and config.threshold_scope == "bucket":
        magnitudes_S = sampled_magnitudes(bucket, residual_N, step, config)
        if not magnitudes_S.numel():
            return Limits.keep_all((len(pruned_P),), device)
        limits = ops.threshold_of_samples(magnitudes_S, density)
    if limits is not None:
        everything = Limits.keep_all((len(pruned_P),), device)
        is_pruned = codec_cuda.on_device(torch.tensor(pruned_P), device)
        pairs = zip(limits, everything, strict=True)
        return Limits(*(torch.where(is_pruned, one, other) for one, other in pairs))
    names = [bucket.parameters[owner].name for owner in layout.piece_parameter]
    keys = [draw_key(config.seed, step, "sample", name) for name in names]
    sample = (ops if is_compiled(device) else threshold_triton).sample_threshold
    return sample(
        bucket.grad_N,
        residual_N,
        layout.piece_offsets,
        torch.tensor([density if pruned else 1.0 for pruned in pruned_P]),
        config.samples,
        torch.tensor(keys, dtype=torch.int64),
    )


def sampled_magnitudes(
    bucket: Bucket, residual_N: torch.Tensor, step: int, config: CompressionConfig
) -> torch.Tensor:
    """Samples of |gradient + residual| of all pruned parameters, as if they were adjacent.

    Returns:
        fp32 on the bucket's device: `samples` of them, or as many as there are elements.
    """
    key = draw_key(config.seed, step, "sample", bucket.name)
    positions = _positions([p for p in bucket.parameters if p.pruned], config.samples, key)
    index = codec_cuda.to_device(positions, bucket.grad_N.device)
    return (bucket.grad_N[index].float() + residual_N[index].float()).abs()


def _positions(parameters: Sequence[ParameterSlice], samples: int, key: int) -> torch.Tensor:
    """Elements of the bucket, int64 on the CPU, one from each stratum of the parameters' union."""
    if not parameters:
        return torch.zeros(0, dtype=torch.int64)
    starts = torch.tensor([p.start for p in parameters])
    ends = torch.tensor([p.stop - p.start for p in parameters]).cumsum(0)
    numel = int(ends[-1])
    count = min(numel, samples)
    generator = torch.Generator().manual_seed(key)
    inside = torch.rand(count, generator=generator, dtype=torch.float64)
    if count == numel:
        inside.zero_()
    positions = ((torch.arange(count) + inside) * (numel / count)).long().clamp_(max=numel - 1)
    owner = torch.searchsorted(ends, positions, right=True)
    first = torch.cat([ends.new_zeros(1), ends[:-1]])
    return positions - first[owner] + starts[owner]
