"""The section `straggler` of the configuration: defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sparse.config.checks import in_range, one_of
from megatron_sparse.errors import ConfigError

STRAGGLER_MODES = ("off", "observe", "pinned", "persistent", "dynamic")
TIMED_STRAGGLER_MODES = ("persistent", "dynamic")
"""Those that decide from timing."""
MIN_STRAGGLER_HISTORY = 5
"""Fewer steps say nothing about who will be last."""


@dataclass
class StragglerConfig:
    """How the other ranks treat a straggler, the rank that is ready last. See docs/stragglers.md.

    Attributes:
        mode: which rank is skipped, if any: `off` (none; nothing is measured), `observe` (none,
            but delays are measured), `pinned` (always `rank`, in every bucket; no extra messages,
            bit-exact), `persistent` (the rank that was last in most of the past steps, if skipping
            it pays) or `dynamic` (the rank that is missing when all others are ready, if skipping
            it pays). `persistent` and `dynamic` decide from timing and need
            scheme.deterministic=false.
        rank: `pinned`: the rank, counted in the group that reduces gradients together; at
            `compression.level=node` in a lane, so it is the number of the node.
        min_delay_ms: least delay of a straggler, for every bucket; null takes each bucket's
            critical delay, from its links' costs (`planner.cluster`, else measured at the start).
        history: number of past steps to consider.
        inject_rank: a test aid: this rank of each group sleeps in every backward pass, when its
            first bucket is ready.
        inject_delay_ms: how long `inject_rank` sleeps.
    """

    mode: str = "off"
    rank: int | None = None
    min_delay_ms: float | None = None
    history: int = 20
    inject_rank: int | None = None
    inject_delay_ms: float = 0.0

    def __post_init__(self) -> None:
        one_of("straggler.mode", self.mode, STRAGGLER_MODES)
        if (self.rank is None) == (self.mode == "pinned"):
            raise ConfigError(
                "straggler.rank does not fit straggler.mode",
                expected="a rank with straggler.mode=pinned, null with the other modes",
                got=f"straggler.mode={self.mode} with straggler.rank={self.rank}",
                remedy="set both, or neither",
            )
        for name in ("rank", "inject_rank"):
            if getattr(self, name) is not None:
                in_range(f"straggler.{name}", getattr(self, name), 0, math.inf, integer=True)
        if self.min_delay_ms is not None:
            in_range("straggler.min_delay_ms", self.min_delay_ms, 0, math.inf)
        in_range("straggler.history", self.history, MIN_STRAGGLER_HISTORY, 10_000, integer=True)
        in_range("straggler.inject_delay_ms", self.inject_delay_ms, 0, 60_000)
        if self.inject_delay_ms and self.inject_rank is None:
            raise ConfigError(
                "straggler.inject_delay_ms needs a rank to delay",
                expected="straggler.inject_rank=RANK",
                got="null",
            )

    @property
    def leaves_behind(self) -> bool:
        """Whether ranks may go on without the straggler."""
        return self.mode not in ("off", "observe")
