"""Options of `bench parameters`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Options,
    check_arguments,
    known,
    option,
    parse_list,
    parse_names,
)

CODERS = ("rans", "packed", "raw", "zstd", "lz4")


def parse_rates(option: str, text: str) -> tuple[float, ...]:
    """Learning rates, separated by commas.

    Raises:
        ConfigError: one of them is no number.
    """
    return parse_list(option, text, float, "numbers with commas between, such as 1e-4,3e-4")


@dataclass(frozen=True, kw_only=True)
class ParameterSweep(Options):
    """What `bench parameters` measures."""

    rates: Sequence[float] = option(
        "3e-5,1e-4,3e-4,1e-3",
        "Learning rates: updates of RMS 0.3 times the rate on weights of RMS 0.02, both normal.",
        parse_rates,
        flag="--lr",
        metavar="LR,...",
    )
    dtype: str = option("bf16", "Of the parameters: fp32 | bf16 | fp16.")
    elements: int = option(4_000_000, "Parameters.", min=1)
    coders: Sequence[str] = option(
        ",".join(CODERS),
        "zstd (level 3) and lz4 compress the moves; the rest are the plugin's.",
        parse_names,
        flag="--coder",
    )
    warmup: int = option(1, "Rounds that are not timed.", min=0)
    iters: int = option(5, "Rounds that are timed.", min=1)
    threads: int = option(1, "Of torch; zstd and lz4 use one.", min=1)

    def __post_init__(self) -> None:
        check_arguments(
            "bench parameters",
            [
                known("dtype", (self.dtype,), DTYPE_NAMES),
                known("coder", self.coders, CODERS),
                ("lr", self.rates, all(rate >= 0 for rate in self.rates), "0 or more"),
            ],
        )
