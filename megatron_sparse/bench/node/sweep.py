"""Options of `bench node`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Sizes,
    above_zero,
    at_least,
    check_arguments,
    known,
    option,
    parse_names,
)

OPS = ("all_reduce", "reduce_scatter", "all_gather", "exchange")


@dataclass(frozen=True, kw_only=True)
class NodeSweep(Sizes):
    """What `bench node` measures; a size is that of the whole gradient of a rank."""

    ops: Sequence[str] = option(
        ",".join(OPS), " | ".join(OPS), parse_names, flag="--op", metavar="OP,..."
    )
    dtype: str = option("fp32", " | ".join(DTYPE_NAMES))
    iters: int = option(11, "Runs that are timed.", min=1)
    timeout_s: float = option(120.0, "Seconds that an operation may take.", flag="--timeout")

    def __post_init__(self) -> None:
        check_arguments(
            "bench node",
            [
                *self.range_checks(1024),
                known("op", self.ops, OPS),
                known("dtype", [self.dtype], DTYPE_NAMES),
                above_zero("timeout", self.timeout_s, " s"),
            ],
        )


def check_ranks(ranks: int) -> None:
    """Refuses fewer than two.

    Raises:
        ConfigError: there are fewer.
    """
    check_arguments("bench node", [at_least("ranks", ranks, 2)])
