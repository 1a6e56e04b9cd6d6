"""Thresholds from samples: one for each parameter, or one for the pruned part of a bucket.

Both look at `samples` elements by count, not by percentage, at positions that are a pure function
of (seed, step, parameter or bucket): stratum j of s holds the elements floor(j n / s) to
floor((j + 1) n / s), and a counter hash picks one of them.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.keys import draw_key
from megatron_sparse.config import CompressionConfig
from megatron_sparse.cuda_ext import ops

KEEP_ALL = -1.0
"""A threshold that no magnitude is at or under: everything is sent."""


def range_thresholds(
    bucket: Bucket,
    layout: Layout,
    residual_N: torch.Tensor,
    density: float,
    step: int,
    config: CompressionConfig,
    agreed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The threshold of every range of the layout.

    Args:
        bucket: what is selected from.
        layout: how it is cut.
        residual_N: of the bucket; only read.
        density: target density of what may be pruned.
        step: keys the samples.
        config: scope, number of samples, seed.
        agreed: the one threshold that ranks have agreed upon (`group_threshold`); None samples.

    Returns:
        fp32 thresholds_R on the bucket's device; kept ranges, and all of them at density 1, hold
        `KEEP_ALL`. No host synchronisation.
    """
    device = bucket.grad_N.device
    if density >= 1:
        return torch.full(layout.range_piece.shape, KEEP_ALL, device=device)
    pruned_P = [
        owner >= 0 and not bucket.parameters[owner].keep for owner in layout.piece_parameter
    ]
    threshold = agreed
    if threshold is None and config.threshold_scope == "bucket":
        magnitudes_S = sampled_magnitudes(bucket, residual_N, step, config)
        if not magnitudes_S.numel():
            return torch.full(layout.range_piece.shape, KEEP_ALL, device=device)
        threshold = ops.threshold_of_samples(magnitudes_S, density)
    if threshold is not None:
        thresholds_P = threshold.where(torch.tensor(pruned_P, device=device), KEEP_ALL)
    else:
        names = [bucket.parameters[owner].name for owner in layout.piece_parameter]
        keys = [draw_key(config.seed, step, "sample", name) for name in names]
        thresholds_P = ops.sample_threshold(
            bucket.grad_N,
            residual_N,
            layout.piece_offsets,
            torch.tensor([density if pruned else 1.0 for pruned in pruned_P]),
            config.samples,
            torch.tensor(keys, dtype=torch.int64),
        )
    return thresholds_P[layout.range_piece.to(device)]


def sampled_magnitudes(
    bucket: Bucket, residual_N: torch.Tensor, step: int, config: CompressionConfig
) -> torch.Tensor:
    """Samples of |gradient + residual| of all pruned parameters, as if they were adjacent.

    Returns:
        fp32 on the bucket's device: `samples` of them, or as many as there are elements.
    """
    device = bucket.grad_N.device
    pruned = [p for p in bucket.parameters if not p.keep]
    if not pruned:
        return torch.zeros(0, device=device)
    starts = torch.tensor([p.start for p in pruned])
    ends = torch.tensor([p.stop - p.start for p in pruned]).cumsum(0)
    numel = int(ends[-1])
    samples = min(numel, config.samples)
    generator = torch.Generator().manual_seed(draw_key(config.seed, step, "sample", bucket.name))
    inside = torch.rand(samples, generator=generator, dtype=torch.float64)
    if samples == numel:
        inside.zero_()
    positions = ((torch.arange(samples) + inside) * (numel / samples)).long().clamp_(max=numel - 1)
    owner = torch.searchsorted(ends, positions, right=True)
    first = torch.cat([ends.new_zeros(1), ends[:-1]])
    index = (positions - first[owner] + starts[owner]).to(device, non_blocking=True)
    return (bucket.grad_N[index].float() + residual_N[index].float()).abs()
