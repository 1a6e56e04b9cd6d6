"""Options of `bench stragglers`: the cases, the delay of one rank, and the place of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_sparse.bench.collectives.sweep import Place, Sweep
from megatron_sparse.bench.options import (
    AUTO,
    Check,
    option,
    parse_densities,
    parse_list,
    parse_names,
)
from megatron_sparse.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sparse.transport import Topology

DEFAULT_SCHEMES = (
    "dense",
    "dense_ring",
    "dense_rhd",
    "dense_allpairs",
    "dense_broadcast",
    "straggler",
    "agsparse",
    "direct",
    "straggler_direct",
)


def parse_delays(flag: str, text: str) -> tuple[float | None, ...]:
    """Milliseconds separated by commas; `auto` becomes None.

    Raises:
        ConfigError: one of them is neither.

    Example:
        >>> parse_delays("--delay-ms", "0,auto")
        (0.0, None)
    """
    return parse_list(
        flag,
        text,
        lambda part: None if part == AUTO else float(part),
        "delays: milliseconds with commas between, or auto, such as 0,50,auto",
    )


@dataclass(frozen=True, kw_only=True)
class StragglerSweep(Sweep):
    """All groups, and how late the straggler is in each.

    An automatic delay is `AUTO_FACTOR` times the reduce-scatter of `dense_ring` on the same
    gradient, measured (or modelled) before.
    """

    NAME = "bench stragglers"

    densities: Sequence[float] = option(
        "0.01", "Fractions selected.", parse_densities, flag="--density"
    )
    schemes: Sequence[str] = option(
        ",".join(DEFAULT_SCHEMES), "Of docs/collectives.md.", parse_names, flag="--scheme"
    )
    # Messages are always the schemes' own, sizes travel with them, and selection is timed.
    message_format: str = "auto"
    levels: Sequence[str] = ("rank",)
    capacity: float | None = None
    nccl_engine: bool = False
    prune: bool = True
    delays_ms: Sequence[float | None] = option(
        "0,auto",
        "How late; auto: 1.5 reduce-scatters.",
        parse_delays,
        flag="--delay-ms",
        metavar="MS,...",
    )
    straggler: int | None = option(None, "The late rank; the last by default.")
    rule: bool = option(True, "Measure also what the rule takes.", flag="--rule/--no-rule")

    def checks(self) -> list[Check]:
        """Every argument's."""
        longest_ms = self.timeout_s * 1e3
        fits = f"0 to less than --timeout ({longest_ms:g} ms), or auto"
        delays = [
            ("delay-ms", delay, delay is None or 0 <= delay < longest_ms, fits)
            for delay in self.delays_ms
        ]
        return [*super().checks(), *delays]

    def late_rank(self, world_size: int) -> int:
        """The straggler's rank.

        Raises:
            ConfigError: the group has no such rank, or no other one that could wait for it.
        """
        rank = world_size - 1 if self.straggler is None else self.straggler
        if world_size < 2 or not 0 <= rank < world_size:
            raise ConfigError(
                "bench stragglers: there is no such straggler",
                expected=f"--straggler 0 to {world_size - 1} of at least 2 ranks",
                got=f"rank {rank} of {world_size}",
            )
        return rank


@dataclass(frozen=True, kw_only=True)
class LinkPlace(Place):
    """Ranks whose virtual links are all alike."""

    gbit: float = option(25.0, "Virtual links.", min=1e-6)

    def topology(self, ranks: int) -> Topology:
        """See `Place`."""
        return self._topology(ranks, ranks, self.gbit, self.gbit)
