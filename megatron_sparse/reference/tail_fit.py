"""Thresholds from fitted tails in Python floats, one sample after the other: the oracle."""

from __future__ import annotations

import math

import torch


def fit_limit(magnitudes: list[float], density: float, stages: int) -> tuple[float, float]:
    """The threshold and tie chance of one row of `compression.tail_fit.fit_limits`.

    Example:
        >>> fit_limit([2.0, 2.0, 2.0, 2.0], 0.25, 1)
        (2.0, 0.25)
    """
    fitted = fit_threshold(magnitudes, density, stages)
    ordered = sorted((x for x in magnitudes if math.isfinite(x)), reverse=True)
    if not ordered:
        return fitted, 0.0
    wanted = density * len(ordered)
    error = math.sqrt(wanted * (1 - density))
    quantile = ordered[int(wanted)]
    ties = ordered.count(quantile)
    kept = sum(x > fitted for x in ordered)
    if ties <= max(error, 1) and abs(kept - wanted) <= 2 * error:
        return fitted, 0.0
    above = sum(x > quantile for x in ordered)
    return quantile, (wanted - above) / ties if quantile > 0 else 0.0


def fit_threshold(magnitudes: list[float], density: float, stages: int) -> float:
    """The threshold of one row of `compression.tail_fit.fit_thresholds`.

    Args:
        magnitudes: values that are not finite are ignored.
        density: in (0, 1).
        stages: how many fits there are.

    Example:
        >>> fit_threshold([1.0, 3.0], 0.5, 1)  # a = -3/2, b = 5: (10 / 3) (1 - 2^-1.5)
        2.1548221111297607
    """
    finite = [x for x in magnitudes if math.isfinite(x)]
    wanted = max(density * len(finite), 1.0)
    threshold = 0.0
    for stage in range(stages):
        excesses = [x - threshold for x in finite if x > threshold]
        if excesses:
            ratio = min(wanted / len(excesses), 1.0) ** (1 / (stages - stage))
            threshold += _exceeded(excesses, ratio)
    largest = torch.tensor(max(finite, default=0.0), dtype=torch.float32)
    below = torch.nextafter(largest, torch.zeros(()))
    return float(torch.minimum(torch.tensor(threshold, dtype=torch.float32), below))


def _exceeded(excesses: list[float], ratio: float) -> float:
    """The value that a fraction `ratio` of the Pareto distribution fitted to `excesses` exceeds."""
    count = len(excesses)
    mean = math.fsum(excesses) / count
    variance = math.fsum((x - mean) ** 2 for x in excesses) / count
    dispersion = mean * mean / max(variance, 1e-12 * mean * mean)
    shape, scale = (1 - dispersion) / 2, mean * (dispersion + 1) / 2
    if abs(shape) <= 1e-6:
        return -scale * math.log(ratio)
    return scale * (ratio**-shape - 1) / shape
