"""The section `planner` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.errors import ConfigError


@dataclass
class PlannerConfig:
    """How `scheme.name=auto` chooses for each bucket. See docs/planner.md.

    Attributes:
        cluster: the costs of links and codecs: a file that `megatron-sparse calibrate` wrote, or
            the name of a shipped cluster model. `train cluster=NAME` sets it to the costs of that
            cluster where they are known. null compares bytes instead of times; `schemes` then has
            no effect.
        schemes: names of candidate schemes; `dense` is always a candidate. null takes all, but
            `dense_q`, which rounds, only with `compression.value_bits`.
        pin: a `plan.json` whose schemes are used, whatever they cost.
    """

    cluster: str | None = None
    schemes: list[str] | None = None
    pin: str | None = None

    def __post_init__(self) -> None:
        if self.schemes is not None and not self.schemes:
            raise ConfigError(
                "planner.schemes is empty",
                expected="names of schemes, or null for all of them",
                got="[]",
            )
