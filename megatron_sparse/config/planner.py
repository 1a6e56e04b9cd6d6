"""The section `planner` of the configuration: defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sparse.config.checks import in_range
from megatron_sparse.errors import ConfigError


@dataclass
class PlannerConfig:
    """How `scheme.name=auto` chooses for each bucket. See docs/planner.md.

    Attributes:
        cluster: the costs of links and codecs: a file that `megatron-sparse calibrate` wrote, or
            the name of a shipped cluster model. `train cluster=NAME` sets it to the costs of that
            cluster where they are known. null compares bytes instead of times; of the options
            below only `pin` then has an effect.
        schemes: names of candidate schemes; `dense` is always a candidate. null takes all, but
            `dense_q`, which rounds, only with `compression.value_bits`.
        profile_iters: steps at the beginning of ramp and target that sample each bucket's
            sparsity.
        profile_every: steps between later samples; 0 takes none.
        hysteresis: a bucket changes its scheme only if the new one's predicted time is shorter by
            more than this fraction of the current one's.
        replan_every: steps between comparisons of measured with predicted times on all ranks; not
            with `scheme.deterministic`, which takes no decision from timing.
        retry_after: steps for which a scheme measured slower than dense is not tried again, and
            after which dense is measured again.
        pin: a `plan.json` whose schemes are used, whatever they cost.
    """

    cluster: str | None = None
    schemes: list[str] | None = None
    profile_iters: int = 3
    profile_every: int = 200
    hysteresis: float = 0.05
    replan_every: int = 50
    retry_after: int = 1000
    pin: str | None = None

    def __post_init__(self) -> None:
        if self.schemes is not None and not self.schemes:
            raise ConfigError(
                "planner.schemes is empty",
                expected="names of schemes, or null for all of them",
                got="[]",
            )
        for name in ("profile_iters", "replan_every", "retry_after"):
            in_range(f"planner.{name}", getattr(self, name), 1, math.inf, integer=True)
        in_range("planner.profile_every", self.profile_every, 0, math.inf, integer=True)
        in_range("planner.hysteresis", self.hysteresis, 0, 1)
