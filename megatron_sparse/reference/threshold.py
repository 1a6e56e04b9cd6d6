"""The threshold of a stratified sample, in Python integers and lists: the oracle."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from megatron_sparse.reference.counter_hash import DRAW_SAMPLE, counter_hash


def sample_positions(numel: int, samples: int, key: int) -> list[int]:
    """Positions in a range of `numel` elements: one in each of min(numel, samples) strata.

    Stratum j holds floor(j n / s) to floor((j + 1) n / s); the upper 31 bits of the counter hash of
    (key, j) choose among its elements.
    """
    count = min(numel, samples)
    random = counter_hash(key, DRAW_SAMPLE, torch.arange(count)).tolist()
    positions = []
    for j in range(count):
        begin, end = j * numel // count, (j + 1) * numel // count
        positions.append(begin + ((random[j] >> 1) * (end - begin) >> 31))
    return positions


def quantile_threshold(magnitudes: list[float], density: float) -> float:
    """The magnitude that about `density` of the samples exceed, at least one of them.

    It is the value of descending rank floor(density * s), counted from 0, at least 1; NaN counts as
    infinite. If that is also the largest value and not zero, it is the next smaller float: else
    equal gradients would never be sent.

    Example:
        >>> quantile_threshold([1.0, 2.0, 3.0, 4.0], 0.5)
        2.0
    """
    ordered = sorted((math.inf if math.isnan(m) else m for m in magnitudes), reverse=True)
    rank = min(max(math.floor(density * len(ordered)), 1), len(ordered) - 1)
    threshold = torch.tensor(ordered[rank], dtype=torch.float32)
    if ordered[0] == ordered[rank] and ordered[rank] > 0:
        threshold = torch.nextafter(threshold, torch.zeros(()))
    return float(threshold)


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> torch.Tensor:
    """The threshold of every range; arguments as of `cuda_ext.ops.sample_threshold`."""
    thresholds = []
    for (begin, end), density, key in zip(
        pairwise(range_offsets.tolist()), densities_R.tolist(), keys_R.tolist(), strict=True
    ):
        if begin == end or density >= 1:
            thresholds.append(-1.0)
            continue
        index = torch.tensor(sample_positions(end - begin, samples, key)) + begin
        x = grad_N[index].float()
        if residual_N is not None:
            x = x + residual_N[index].float()
        thresholds.append(quantile_threshold(x.abs().tolist(), density))
    return torch.tensor(thresholds, dtype=torch.float32)
