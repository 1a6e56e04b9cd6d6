"""The section `straggler` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.config.checks import Checked, choice, number, whole
from megatron_sparse.errors import ConfigError


@dataclass
class StragglerConfig(Checked):
    """How the other ranks treat a straggler, the rank that is ready last. See docs/stragglers.md.

    Attributes:
        mode: which rank is skipped, if any: `off`, `observe`, `pinned` or `persistent`. `off`:
            none, and nothing is measured. `observe`: none, but delays are measured. `pinned`:
            always `rank`, in every bucket; no extra messages, bit-exact. `persistent`: the rank
            that was last in most of the past steps, if skipping it pays; decides from timing and
            needs scheme.deterministic=false.
        rank: `pinned`: the rank, counted in the group that reduces gradients together; at
            `compression.level=node` in a lane, so it is the number of the node.
        min_delay_ms: least delay of a straggler, for every bucket; null takes each bucket's
            critical delay, from its links' costs (`planner.cluster`, else measured at the start).
    """

    SECTION = "straggler"

    mode: str = choice("off", ("off", "observe", "pinned", "persistent"))
    rank: int | None = whole(None, 0)
    min_delay_ms: float | None = number(None, 0)

    def __post_init__(self) -> None:
        """Checks each key, and that `rank` is given if and only if `mode` is `pinned`."""
        super().__post_init__()
        if (self.rank is None) == (self.mode == "pinned"):
            raise ConfigError(
                "straggler.rank does not fit straggler.mode",
                expected="a rank with straggler.mode=pinned, null with the other modes",
                got=f"straggler.mode={self.mode} with straggler.rank={self.rank}",
                remedy="set both, or neither",
            )

    @property
    def leaves_behind(self) -> bool:
        """Whether ranks may go on without the straggler."""
        return self.mode not in ("off", "observe")
