"""The options of `megatron-sparse calibrate`. The command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_sparse.bench.exchange.options import Place
from megatron_sparse.bench.options import (
    Options,
    above_zero,
    density_option,
    names_option,
    option,
    parse_size,
)


def _ring_formats() -> tuple[str, ...]:
    from megatron_sparse.pricing.cluster import RING_FORMATS

    return RING_FORMATS


@dataclass(frozen=True, kw_only=True)
class CalibrationPlace(Place):
    """Where to measure."""

    ranks: int | None = option(None, "Default: the ranks that a launcher started, else 2.", min=1)
    mbit: int | None = option(None, "Link rate of the test bed in Mbit/s.", min=1)
    ranks_per_node: int = option(1, "Ranks on each node of the test bed.", min=1)
    virtual: bool = option(False, "Run the sweep on virtual ranks: a model.", flag="--virtual")
    cluster: str | None = option(None, "Cluster model of the virtual ranks.", metavar="NAME|FILE")

    def nodes(self, ranks: int) -> int:
        """See `Place`."""
        return -(-ranks // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(Options):
    """What to measure, the same on every rank.

    Attributes:
        out: the YAML file; None writes none (virtual only).
    """

    NAME = "calibrate"

    out: Path | None = None
    quick: bool = option(False, "Take seconds, with less precise results.", flag="--quick")
    force: bool = option(False, "Replace FILE.", flag="--force")
    sweep: bool = option(
        False, "Find adaptive_ring's thresholds and add them to FILE.", flag="--sweep"
    )
    formats: Sequence[str] = names_option(
        "coo,pici",
        "Message formats of the sweep.",
        "--format",
        among=_ring_formats,
        metavar="FORMAT,...",
    )
    size_bytes: int = option("16M", "Bucket size of the sweep.", parse_size, flag="--size")
    densities: Sequence[float] = density_option("0.05,0.2,0.4", "Gradient densities of the sweep.")
    env: str | None = option(None, "Set the environment of configs/cluster/NAME.", metavar="NAME")
    timeout_s: float = option(
        120.0, "Seconds after which an operation has failed.", flag="--timeout", fits=above_zero
    )

    def arguments(self) -> list[str]:
        """The command line with the same options."""
        out = [] if self.out is None else [f"--output={self.out}"]
        return [*out, *super().arguments()]
