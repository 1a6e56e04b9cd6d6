"""Options of `bench planner`: the cases and the place of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_sparse.bench.options import Options, option, parse_counts, parse_names, parse_size
from megatron_sparse.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlannerOptions(Options):
    """Gradients, ranks, clusters and candidates; None stands for the usual ones."""

    kinds: Sequence[str] | None = option(None, "Of gradients; all by default.", parse_names)
    recording: Path | None = option(  # noqa: RUF009 - it makes a field
        None, "Recorded gradients instead.", metavar="DIR"
    )
    ranks: Sequence[int] | None = option(
        None,
        "2 to 64 by default; 4 on the test bed.",
        partial(parse_counts, low=2),
        metavar="N,...",
    )
    clusters: Sequence[str] | None = option(None, "Shipped models; all by default.", parse_names)
    schemes: Sequence[str] | None = option(None, "The candidates; all by default.", parse_names)
    bucket_bytes: int = option("64M", "Of the fp32 bucket.", parse_size)
    simulated_bytes: int | None = option(
        None, "Of the virtual one for it; 2M, with --quick 512K.", parse_size
    )
    op: str = option("all_reduce", "all_reduce | reduce_scatter")
    quick: bool = option(False, "Five kinds, 2 to 8 ranks.", flag="--quick")
    netbed: bool = option(False, "Real time, on the test bed; needs root.", flag="--netbed")
    mbit: int | None = option(None, "Rate of the test bed's links.", min=1)
    cluster: str | None = option(None, "Of the test bed; else it is measured.", metavar="FILE")
    warmup: int = option(2, "Real rounds that are not timed.", min=0)
    iters: int = option(9, "Real rounds that are timed.", min=1)
    timeout_s: float = option(120.0, "Seconds that an operation may take.", flag="--timeout")

    def __post_init__(self) -> None:
        if self.recording is not None and self.kinds is not None:
            raise ConfigError(
                "bench planner: both kinds and a recording are given",
                expected="--kinds or --recording",
                got="both",
            )
