"""Threshold reuse, step by step, for one bucket with one parameter: the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of a bucket.

    Attributes:
        sampled: the threshold that a sample would give, fp32.
        kept: elements that were sent.
        density: the target.
        counts: whether the step counts: it selected something, and the optimizer took it.
    """

    sampled: float
    kept: int
    density: float
    counts: bool = True


def replay(steps: Sequence[Step], numel: int, reuse_iters: int) -> list[tuple[float, bool]]:
    """For each step the threshold (before rounding to fp32) and whether it was sampled.

    Example:
        >>> replay([Step(2.0, 9, 0.01), Step(3.0, 15, 0.01), Step(3.0, 9, 0.01)], 1000, 32)
        [(2.0, True), (2.0, False), (2.193..., False)]
    """
    told: list[tuple[float, bool]] = []
    age = 0
    for now, step in enumerate(steps):
        before = steps[now - 1] if now else None
        threshold = None
        if before is not None and before.counts and before.density == step.density:
            age += 1
            ratio = before.kept / (step.density * numel)
            if age < reuse_iters and 0.5 <= ratio <= 2:
                threshold = told[-1][0]
                if not 0.8 <= ratio <= 1.3:
                    # The tail exp(-x / b) has density d at b ln(1 / d).
                    b = threshold / math.log(1 / (ratio * step.density))
                    grown = b * math.log(1 / step.density)
                    threshold = min(max(grown, 0.8 * threshold), 1.3 * threshold)
        if threshold is None:
            age = 0
        told.append((step.sampled if threshold is None else threshold, threshold is None))
    return told
