"""Keeps a spike, a gradient with a far larger norm than usual, from filling the residual.

Megatron clips after the sum. So the selected elements of a spike are clipped, but those that stay
in the residual are not: they would dominate later steps, each of them clipped to the limit.
Therefore a step whose norm is far above the running median enters the residual as if it had been
clipped to that median: the residual moves from its old value towards its new one by median / norm.

Without clipping nothing is scaled. Scaling needs the old residual, of which there is an undo copy
(`ResidualStore.undo`).
"""

import logging
import math
from collections import deque
from collections.abc import Iterable
from statistics import median

logger = logging.getLogger("megatron_sparse")

FACTOR = 4.0
"""A norm so many times above the median is a spike."""
WINDOW, FEWEST = 100, 20
"""Accepted steps whose norms make the median, and how many it needs."""


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
        """Adds a step's norm; returns which fraction of its change enters the residual.

        None means all of it: the step is no spike, or there are too few norms for a median.

        Args:
            norm: the gradient's; the same on every rank. None and 0 are unknown; those, NaN and
                infinity are not added.
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
