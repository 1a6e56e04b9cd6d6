"""The section `compression` of the configuration: defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_sparse.config.checks import Checked, are_patterns, choice, number, whole
from megatron_sparse.config.level import LEVELS, RANK
from megatron_sparse.errors import ConfigError

VALUE_BITS = (8, 4, 3, 2)
"""Allowed values of `compression.value_bits`, besides null and `auto`."""
LOSS_BUDGETS = (0, 0.3, 1, 2.5)
"""Percent of the final loss: what the presets were measured to cost (docs/choosing-density.md)."""
DENSE_VALUE_BITS = (8, 4)
"""Those to which every element of a dense gradient can be quantised."""
WARMUP_ITERS, RAMP_ITERS, LONG_RAMP_ITERS = 500, 1000, 2300
"""What null takes where the run's length is not known, and at most where it is."""
KEPT_ERROR, MIN_SAMPLES, MAX_SAMPLES = 0.05, 1024, 40_000
"""Of `compression.samples=auto`; see `CompressionConfig.samples_at`."""
LONG_RAMP_BELOW = 0.1
"""The density below which a ramp of 70 % of the run halved the loss that compression costs
(docs/results/convergence.md)."""


def dense_value_bits(value_bits: int | None) -> int:
    """Bits of a value where every element is sent quantised: `value_bits` if 8 or 4, else 4.

    Example:
        >>> [dense_value_bits(bits) for bits in (8, 4, 3, 2, None)]
        [8, 4, 4, 4, 4]
    """
    return value_bits if value_bits in DENSE_VALUE_BITS else min(DENSE_VALUE_BITS)


@dataclass
class CompressionConfig(Checked):
    """How each gradient bucket is compressed.

    Attributes:
        enabled: False synchronises densely; the first dense step also sends the residual.
        level: which ranks' gradients are added up, dense, before elements are selected from them.
            `rank`: none, each rank selects from its own gradient. `node`: those of a node; each of
            its m ranks selects from 1/m of the sum, and only selections cross between nodes.
            `instance`: those of an instance of Megatron's distributed optimizer; the sum over
            the instances is compressed. `auto`: with `planner.cluster` the fastest by its model;
            without, `instance` where there are several, `node` where several nodes have equally
            many ranks, more than one; else `rank`.
            The start says which level runs and why; see docs/compression.md.
        density: the fraction of each pruned range that is sent (nnz / numel), in (0, 1]. `auto`
            (the preset of that name) tries the presets that `loss_budget` allows at the start, and
            goes on with the one whose iterations take least time; see docs/choosing-density.md.
        loss_budget: of `density=auto`: percent of the final loss that compression may cost: 0, 0.3,
            1 or 2.5.
        value_bits: 8, 4, 3 or 2: values are quantised to this many bits, with a scale of 32 bits
            for each group of 128; elements that are sent whole are bf16. Rounding errors go to the
            residual. The warm-up's dense gradients are quantised, too, to 8 or 4 bits (`dense_q`).
            null: `scheme.wire_dtype`. `auto` is 4 where messages can hold quantised values, and
            null elsewhere: with `scheme.wire_dtype`, a `scheme.format` other than `rice`,
            `scheme.nccl_engine` or `lossless_patterns`, where `scheme.name` or `planner.schemes`
            names a scheme that cannot send them, and at density 1. See docs/choosing-density.md.
        leak: factor on unsent values when they enter the residual; 1 loses nothing.
        samples: elements sampled from a range to find its threshold. `auto` samples as many as keep
            the number of selected elements within about 5 %, at least 1,024 and at most 40,000.
        residual_dtype: fp32 or bf16 (stochastically rounded, half the memory).
        undo: `auto` keeps an undo copy of the residual only where a step can be skipped or
            repeated (loss scaling, Megatron's rerun mode, plain DDP); `always`, `never`.
        warmup_iters: iterations at the start that synchronise densely; null takes 5 % of
            `training.iterations`, at most 500. A resumed run keeps its number. `install`, `attach`
            and `ddp_hook` do not know the run's length, and take 500.
        ramp_iters: iterations over which the density falls from `ramp_start_density` to `density`,
            by equal factors; null takes 10 % of `training.iterations`, at most 1000, or, if the
            density is below 10 %, 70 % of them, at most 2300; otherwise as `warmup_iters`.
        ramp_start_density: the first density of the ramp.
        keep_below_numel: parameters with fewer elements are always sent whole; so are all
            one-dimensional ones and those that tensor parallelism replicates.
        keep_patterns: regular expressions; a parameter whose name matches one is sent whole.
        lossless_patterns: regular expressions; of a parameter whose name matches one, exactly the
            non-zero elements are sent. For embeddings that are not tied to the output layer, see
            docs/natural-sparsity.md. They win over `keep_patterns`. Not with `scheme.capacity`.
        residual_checkpoint: `full` saves each rank's residual with Megatron's checkpoint; `sum`
            saves one residual, the total of all data-parallel ranks; `none` saves and restores
            nothing.
        seed: seed of the sample positions and of stochastic rounding.
    """

    SECTION = "compression"

    enabled: bool = True
    level: str = choice(RANK, LEVELS)
    density: float | int | str = number(0.22, 0, 1, besides=("auto",), low_open=True)
    loss_budget: float = choice(0.3, LOSS_BUDGETS)
    value_bits: int | str | None = choice("auto", ("auto", *VALUE_BITS, None))
    leak: float = number(1.0, 0, 1)
    samples: int | str = whole("auto", 1, 2**31 - 1)
    residual_dtype: str = choice("fp32", ("fp32", "bf16"))
    undo: str = choice("auto", ("auto", "always", "never"))
    warmup_iters: int | None = whole(None, 0)
    ramp_iters: int | None = whole(None, 0)
    ramp_start_density: float = number(0.25, 0, 1, low_open=True)
    keep_below_numel: int = whole(4096, 0)
    keep_patterns: list[str] = field(default_factory=list)
    lossless_patterns: list[str] = field(default_factory=list)
    residual_checkpoint: str = choice("full", ("full", "sum", "none"))
    seed: int = whole(1234, 0, 2**63 - 1)

    def __post_init__(self) -> None:
        """Checks each key, then the keys that depend on one another."""
        super().__post_init__()
        are_patterns("compression.keep_patterns", self.keep_patterns)
        are_patterns("compression.lossless_patterns", self.lossless_patterns)
        self._check_bits()

    @property
    def given_density(self) -> float:
        """The target density; of `auto` that of `safe`, with which a run begins."""
        return CompressionConfig.density if isinstance(self.density, str) else self.density  # type: ignore[return-value]

    @property
    def given_value_bits(self) -> int | None:
        """Bits of a value; None: in full, as `auto` outside a `SparseConfig` is."""
        return None if isinstance(self.value_bits, str) else self.value_bits

    def samples_at(self, density: float) -> int:
        """Number of elements to sample from a range to find its threshold at a step's density.

        Of s samples, the number above the true threshold of density p is binomial with mean p s. So
        the number of selected elements has the relative standard deviation sqrt((1 - p) / (p s)).
        `auto` sets that to KEPT_ERROR: s = (1 - p) / (p KEPT_ERROR^2), within its bounds.

        Example:
            >>> tuple(CompressionConfig().samples_at(p) for p in (0.5, 0.22, 0.015, 0.001))
            (1024, 1419, 26267, 40000)
        """
        if not isinstance(self.samples, str):
            return self.samples
        wanted = math.ceil((1 - density) / (density * KEPT_ERROR**2))
        return min(max(wanted, MIN_SAMPLES), MAX_SAMPLES)

    @property
    def warmup(self) -> int:
        """Dense iterations at the start; of null, those of a run of unknown length."""
        return WARMUP_ITERS if self.warmup_iters is None else self.warmup_iters

    @property
    def ramp(self) -> int:
        """Iterations over which the density falls, as `warmup`."""
        return self._longest_ramp[1] if self.ramp_iters is None else self.ramp_iters

    @property
    def _longest_ramp(self) -> tuple[int, int]:
        """The limits of a ramp of `ramp_iters=null`: tenths of the run, and iterations."""
        is_low = self.given_density < LONG_RAMP_BELOW
        return (7, LONG_RAMP_ITERS) if is_low else (1, RAMP_ITERS)

    def in_run_of(self, iterations: int) -> CompressionConfig:
        """Returns a copy with null `warmup_iters` and `ramp_iters` set for a run of `iterations`.

        Example:
            >>> short = CompressionConfig().in_run_of(1000)
            >>> short.warmup_iters, short.ramp_iters
            (50, 100)
            >>> low = CompressionConfig(density=0.07)
            >>> low.in_run_of(1000).ramp_iters, low.in_run_of(100_000).ramp_iters
            (700, 2300)
        """
        warmup, ramp = self.warmup_iters, self.ramp_iters
        # The ramp depends on the density: with density=auto it stays null until that is chosen.
        if ramp is None and self.density != "auto":
            tenths, longest = self._longest_ramp
            ramp = min(longest, iterations * tenths // 10)
        return replace(
            self,
            warmup_iters=min(WARMUP_ITERS, iterations // 20) if warmup is None else warmup,  # 5 %
            ramp_iters=ramp,
        )

    def _check_bits(self) -> None:
        """Refuses `value_bits` of 3 or 2 at density 1, and any bits with `lossless_patterns`."""
        if self.given_value_bits is None:
            return
        if self.density == 1 and self.value_bits not in DENSE_VALUE_BITS:
            raise ConfigError(
                f"compression.density=1 with compression.value_bits={self.value_bits}: a dense "
                "gradient cannot travel in 3 or 2 bits",
                expected="compression.value_bits=" + " | ".join(map(str, DENSE_VALUE_BITS)),
                got=self.value_bits,
                remedy="set compression.value_bits=4, or a density below 1",
            )
        if self.lossless_patterns:
            raise ConfigError(
                f"compression.value_bits={self.value_bits} leaves a rounding error in each element "
                "that compression.lossless_patterns sends, so it would be sent in every later step",
                expected="compression.value_bits=null",
                got=self.value_bits,
                remedy="leave one of the two out",
            )
