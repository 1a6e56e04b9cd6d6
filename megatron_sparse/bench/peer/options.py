"""Options of `bench peer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import Options, option, parse_counts, parse_densities


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    """What is measured."""

    megabytes: int = option(64, "Of a gradient.", min=1)
    ranks: Sequence[int] = option("2,4,8", "Virtual ranks.", parse_counts)
    density: Sequence[float] = option("0.01,0.1", "Fractions of a gradient.", parse_densities)
    iters: int = option(20, "Runs that are timed.", min=1)
