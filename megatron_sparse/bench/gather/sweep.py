"""Options of `bench gather`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.codec.options import parse_rates
from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Options,
    above_zero,
    check_arguments,
    known,
    option,
    parse_names,
)

CODERS = ("rans", "packed")
FLAT, PER_NODE = "flat", "per-node"
WAYS = (FLAT, PER_NODE)


@dataclass(frozen=True, kw_only=True)
class GatherSweep(Options):
    """What `bench gather` measures; `per-node` only where nodes have several ranks."""

    elements: int = option(4_000_000, "Parameters; rounded up to whole shards.", min=1)
    rates: Sequence[float] = option(
        "1e-4", "Learning rates of a step of Adam on normal weights.", parse_rates, flag="--lr"
    )
    dtype: str = option("bf16", "fp32 | bf16 | fp16")
    coders: Sequence[str] = option(
        ",".join(CODERS), "rans | packed", parse_names, flag="--coder", metavar="NAME,..."
    )
    ways: Sequence[str] = option(
        ",".join(WAYS),
        "flat: every record to every rank | per-node: to each other node once.",
        parse_names,
        flag="--way",
        metavar="NAME,...",
    )
    mbit: int | None = option(None, "Rate of the test bed's links, in Mbit/s.", min=1)
    warmup: int = option(1, "Rounds that are not timed.", min=0)
    iters: int = option(7, "Rounds that are timed.", min=1)
    timeout_s: float = option(120.0, "Seconds that an operation may take.", flag="--timeout")

    def __post_init__(self) -> None:
        check_arguments(
            "bench gather",
            [
                known("dtype", (self.dtype,), DTYPE_NAMES),
                known("coder", self.coders, CODERS),
                known("way", self.ways, WAYS),
                ("lr", self.rates, all(rate >= 0 for rate in self.rates), "0 or more"),
                above_zero("mbit", self.mbit),
                above_zero("timeout", self.timeout_s, " s"),
            ],
        )
