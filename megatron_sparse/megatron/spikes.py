"""Gradients far above what is usual must not come back from the residual.

Megatron clips after the sum. So of a spike, the part that was sent is clipped, but the part that
was withheld is not: it would fill later steps, each of them clipped to the limit. Therefore a step
whose norm is far above the running median enters the residual as if it had been clipped to that
median: the residual moves from its old value towards its new one by median / norm.

Without clipping both parts stay as they are. Scaling needs the old residual, of which there is
an undo copy (`ResidualStore.undo`). A residual that outgrows the gradient is warned about:
`compression.residual_alarm`.

`loss_factor` makes spikes on demand, for the study of docs/results/convergence.md, Spikes.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from megatron_sparse.errors import ConfigError

logger = logging.getLogger("megatron_sparse")

FACTOR = 4.0
"""A norm so many times above the median is a spike."""
WINDOW, FEWEST = 100, 20
"""Accepted steps whose norms make the median, and how many it needs."""
ALARM_INTERVAL = 100
"""Steps between checks of the residual's norm, each of which reads the residual once."""
SPIKES = "MEGATRON_SPARSE_SPIKES"
"""An environment variable: with `FACTOR:SHARE` the loss is multiplied by the factor in so large a
share of the iterations, for `train` with the plugin or without."""


class UsualNorm:
    """The running median of the gradient's norm.

    Attributes:
        norms: of the last accepted steps, spikes included.

    Args:
        norms: of earlier steps, from a checkpoint.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self.norms: deque[float] = deque(norms, WINDOW)

    def share(self, norm: float | None, step: int) -> float | None:
        """How much of the step's change enters the residual; None: all of it.

        Args:
            norm: the gradient's; the same on every rank. None and 0 are unknown, and NaN is no
                spike.
            step: for the log.

        Example:
            >>> usual = UsualNorm([2.0] * 30)
            >>> usual.share(7.0, 31), usual.share(50.0, 32)
            (None, 0.04)
        """
        if not norm or not math.isfinite(norm):
            return None
        usual = median(self.norms) if len(self.norms) >= FEWEST else None
        self.norms.append(norm)
        if usual is None or norm <= FACTOR * usual:
            return None
        logger.info(
            "step %d: the gradient's norm is %.3g, %.3g times the usual: what is withheld of it is "
            "scaled down",
            step,
            norm,
            norm / usual,
        )
        return usual / norm


def warn_if_large(step: int, norm: float, grad_norm: float, limit: float) -> None:
    """Warns if the residual's norm exceeds `limit` times the gradient's, or is not a number."""
    if not norm <= limit * grad_norm:  # true of NaN, too
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


def loss_factor(arguments: Callable[[], Any]) -> float:
    """The factor on the loss in this iteration, the same on every rank: see `SPIKES`.

    Args:
        arguments: returns Megatron's; called only if the variable is set.

    Raises:
        ConfigError: the variable cannot be read.
    """
    given = os.environ.get(SPIKES)
    if given is None:
        return 1.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?):(0?\.\d+)", given)
    if found is None:
        raise ConfigError(f"{SPIKES} cannot be read", expected="FACTOR:SHARE", got=repr(given))
    args = arguments()
    factor, share = float(found[1]), float(found[2])
    # Seeded by the iteration, so that every rank draws the same number.
    drawn = random.Random(f"{args.seed}:{args.curr_iteration}").random()
    return factor if drawn < share else 1.0
