"""When to compress and how much: dense warm-up, density ramp, target density.

The density is the part of a gradient's elements that is sent. From scratch, density 1 % without a
warm-up costs a visible part of the first loss drop. Deep Gradient Compression (Lin et al., 2017,
section 3.3) lowers it exponentially, epoch by epoch; the ramp here is the same curve without steps.
"""

from enum import StrEnum

from megatron_sparse.config.sparse import CompressionConfig


class Phase(StrEnum):
    """The part of the schedule that an iteration belongs to."""

    OFF = "off"
    TRIAL = "trial"
    WARMUP = "warmup"
    RAMP = "ramp"
    TARGET = "target"


def phase_and_density(config: CompressionConfig, step: int) -> tuple[Phase, float]:
    """The phase and the density of step `step` (0-based); density 1 means nothing is pruned.

    The ramp's first step has `ramp_start_density`, or the target density if that is higher. The
    first step after the ramp has the target density.

    Example:
        >>> c = CompressionConfig(density=0.01, warmup_iters=1, ramp_iters=2, ramp_start_density=1)
        >>> [phase_and_density(c, s) for s in range(4)]  # doctest: +NORMALIZE_WHITESPACE
        [(<Phase.WARMUP: 'warmup'>, 1.0), (<Phase.RAMP: 'ramp'>, 1.0),
         (<Phase.RAMP: 'ramp'>, 0.1), (<Phase.TARGET: 'target'>, 0.01)]
    """
    if not config.enabled:
        return Phase.OFF, 1.0
    if step < config.warmup:
        return Phase.WARMUP, 1.0
    ramp_step = step - config.warmup
    density = config.given_density
    if ramp_step >= config.ramp:
        return Phase.TARGET, density
    start = max(config.ramp_start_density, density)
    progress = ramp_step / config.ramp
    return Phase.RAMP, start * (density / start) ** progress
