"""Thresholds from fitted tails in Python floats, one sample after the other: the oracle."""

from __future__ import annotations

import math

import torch


def fit_threshold(magnitudes: list[float], density: float, tail_fit: str, stages: int) -> float:
    """The threshold of one row of `compression.tail_fit.fit_thresholds`.

    Args:
        magnitudes: what is not finite is left out.
        density: in (0, 1).
        tail_fit: `exponential`, `gamma` or `pareto`; the latter two go on with `pareto`.
        stages: how many fits there are.

    Example:
        >>> fit_threshold([1.0, 3.0], 0.5, "exponential", 1)  # 2 ln 2
        1.3862943649291992
    """
    finite = [x for x in magnitudes if math.isfinite(x)]
    wanted = max(density * len(finite), 1.0)
    threshold = 0.0
    for stage in range(stages):
        excesses = [x - threshold for x in finite if x > threshold]
        if excesses:
            ratio = min(wanted / len(excesses), 1.0) ** (1 / (stages - stage))
            threshold += _quantile(excesses, ratio, tail_fit)
        if tail_fit == "gamma":
            tail_fit = "pareto"
    largest = torch.tensor(max(finite, default=0.0), dtype=torch.float32)
    below = torch.nextafter(largest, torch.zeros(()))
    return float(torch.minimum(torch.tensor(threshold, dtype=torch.float32), below))


def _quantile(excesses: list[float], ratio: float, tail_fit: str) -> float:
    """What a part `ratio` of the distribution that fits `excesses` exceeds."""
    count = len(excesses)
    mean = math.fsum(excesses) / count
    if tail_fit == "exponential":
        return -mean * math.log(ratio)
    if tail_fit == "gamma":
        s = math.log(mean) - math.fsum(math.log(x) for x in excesses) / count
        s = max(s, 1e-12)
        shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        return max(-mean / shape * (math.log(ratio) + math.lgamma(shape)), 0.0)
    variance = math.fsum((x - mean) ** 2 for x in excesses) / count
    dispersion = mean * mean / max(variance, 1e-12 * mean * mean)
    shape, scale = (1 - dispersion) / 2, mean * (dispersion + 1) / 2
    if abs(shape) <= 1e-6:
        return -scale * math.log(ratio)
    return scale * (ratio**-shape - 1) / shape
