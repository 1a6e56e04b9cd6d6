"""Momentum correction and momentum factor masking in float64: the oracle of `compression.dgc`.

Lin et al., "Deep Gradient Compression", equations 4 and 5, in the paper's order.
"""

from __future__ import annotations

import torch


def dgc_step(
    grad_N: torch.Tensor,
    velocity_N: torch.Tensor,
    accumulated_N: torch.Tensor,
    threshold_N: torch.Tensor,
    momentum: float,
    masking: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sent values, the new velocity and the remaining accumulation; mutates nothing.

    Args:
        grad_N: this rank's gradient.
        velocity_N: before the step.
        accumulated_N: velocities that were not sent so far.
        threshold_N: of each element; negative where every element is sent and none is masked.
        momentum: of the velocity.
        masking: whether the velocity of sent elements becomes 0.

    Example:
        >>> one = torch.ones(2)
        >>> dgc_step(2 * one, one, torch.tensor([0.0, 3.0]), 4 * one, 0.5, True)[0]
        tensor([0.0000, 5.5000], dtype=torch.float64)
    """
    velocity = momentum * velocity_N.double() + grad_N.double()
    accumulated = accumulated_N.double() + velocity
    sends = ~(accumulated.abs() <= threshold_N)
    sent = torch.where(sends, accumulated, 0)
    if masking:
        velocity = torch.where(sends & (threshold_N >= 0), 0, velocity)
    return sent, velocity, torch.where(sends, 0, accumulated)
