"""The warning about a residual that outgrows the gradient: `compression.residual_alarm`."""

from __future__ import annotations

import logging

logger = logging.getLogger("megatron_sparse")

ALARM_INTERVAL = 100
"""Steps between checks of the residual's norm, each of which reads the residual once."""


def warn_if_large(step: int, norm: float, grad_norm: float, limit: float) -> None:
    """Warns if the residual's norm exceeds `limit` times the gradient's, or is not a number."""
    if not norm <= limit * grad_norm:
        logger.warning(
            "step %d: the residual's norm is %.3g, %.3g times the gradient's norm of %.3g; "
            "lower the leak, raise the density, or lengthen the ramp "
            "(compression.residual_alarm=%g)",
            step,
            norm,
            norm / grad_norm,
            grad_norm,
            limit,
        )
