"""The threshold of a stratified sample, in Python integers and lists: the oracle."""

import math
from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.triton_kernels.counter_hash import DRAW_SAMPLE, DRAW_TIE, counter_hash


def sample_positions(numel: int, samples: int, key: int) -> list[int]:
    """Positions in a range of `numel` elements: one in each of min(numel, samples) strata.

    Of n elements and s strata, stratum j holds those from floor(j n / s) to before
    floor((j + 1) n / s); the upper 31 bits of the counter hash of (key, j) choose one of them.
    """
    count = min(numel, samples)
    random = counter_hash(key, DRAW_SAMPLE, torch.arange(count)).tolist()
    positions = []
    for j in range(count):
        begin, end = j * numel // count, (j + 1) * numel // count
        positions.append(begin + ((random[j] >> 1) * (end - begin) >> 31))
    return positions


def quantile_limit(magnitudes: list[float], density: float) -> tuple[float, float, int]:
    """Finds the limits by which density * s of s magnitudes are sent on average.

    Returns the threshold (the value of descending rank floor(density * s), counted from 0), the
    chance that a sample equal to it (a tie) is sent, and the number of ties. NaN counts as
    infinite. Zeros are never sent, and infinity always is: a threshold of either has chance 0.

    Example:
        >>> quantile_limit([1.0, 2.0, 2.0, 4.0], 0.5)
        (2.0, 0.5, 2)
    """
    ordered = sorted((math.inf if math.isnan(m) else m for m in magnitudes), reverse=True)
    wanted = density * len(ordered)
    threshold = ordered[min(math.floor(wanted), len(ordered) - 1)]
    equal = ordered.count(threshold)
    if threshold in (0, math.inf):
        return threshold, 0.0, equal
    above = sum(m > threshold for m in ordered)
    return threshold, (wanted - above) / equal, equal


def single_chance(chance: float, key: int) -> float:
    """0 or 1: the chance, drawn once for the range, of a sample that ties with itself alone."""
    (draw,) = counter_hash(key, DRAW_TIE, torch.zeros(1, dtype=torch.int64)) >> 8
    return float(draw * 2.0**-24 < torch.tensor(chance, dtype=torch.float32))


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> Limits:
    """The limits of every range; arguments as of `cuda_ext.ops.sample_threshold`."""
    limits = []
    for (begin, end), density, key in zip(
        pairwise(range_offsets.tolist()), densities_R.tolist(), keys_R.tolist(), strict=True
    ):
        if begin == end or density >= 1:
            limits.append((-1.0, 0.0, 0))  # below every magnitude: all are kept
            continue
        index = torch.tensor(sample_positions(end - begin, samples, key)) + begin
        x = grad_N[index].float()
        if residual_N is not None:
            x = x + residual_N[index].float()
        threshold, chance, ties = quantile_limit(x.abs().tolist(), density)
        if ties == 1:  # one draw for the whole range: the chance becomes 0 or 1
            chance = single_chance(chance, key)
        limits.append((threshold, chance, ties))
    thresholds, chances, ties = zip(*limits, strict=True) if limits else ((), (), ())
    return Limits(
        torch.tensor(thresholds, dtype=torch.float32),
        torch.tensor(chances, dtype=torch.float32),
        torch.tensor(ties, dtype=torch.int64),
    )
