"""Options of `bench density`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import (
    Options,
    check_arguments,
    option,
    parse_densities,
    parse_names,
)
from megatron_sparse.config.compression import CompressionConfig


@dataclass(frozen=True, kw_only=True)
class DensitySweep(Options):
    """What `bench density` measures."""

    distributions: Sequence[str] | None = option(
        None, "Of the gradient; all by default.", parse_names, flag="--distribution"
    )
    densities: Sequence[float] = option(
        "0.001,0.01,0.05,0.25", "Fractions asked for.", parse_densities, flag="--density"
    )
    threshold_scope: str = option("parameter", "parameter | bucket")
    samples: int = option(CompressionConfig.samples, "compression.samples", min=1)
    elements: int = option(100_000, "Elements of the gradient.", min=1)
    steps: int = option(20, "Steps of each row.", min=1)

    def __post_init__(self) -> None:
        below_one = all(0 < density < 1 for density in self.densities)
        check_arguments(
            "bench density", [("density", self.densities, below_one, "above 0 and below 1")]
        )

    def config(self) -> CompressionConfig:
        """The settings that rows share.

        Raises:
            ConfigError: they do not go together.
        """
        return CompressionConfig(threshold_scope=self.threshold_scope, samples=self.samples)
