"""The section `compression` of the configuration, see `config`: its defaults and its checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_sparse.config.checks import are_patterns, in_range, is_flag, one_of
from megatron_sparse.errors import ConfigError

THRESHOLD_SCOPES = ("parameter", "bucket", "tp_group")
RESIDUAL_CHECKPOINTS = ("full", "sum", "none")
METHODS = ("topk", "threshold_reuse", "sidco", "dgc")
"""The classes in `compression`, see `compression.method`."""
SHARED_THRESHOLD_METHODS = ("topk", "dgc")
"""Those whose threshold a tensor-parallel group can agree upon: they sample in every step."""
TAIL_FITS = ("exponential", "gamma", "pareto")
RAMP_SHAPES = ("exponential", "linear", "staircase")
REUSE_BAND = (0.8, 1.3)
"""Kept counts over the target between which `threshold_reuse` leaves a threshold alone: those of
DGC's threshold adaptation."""


@dataclass
class CompressionConfig:
    """What is selected from each gradient bucket, and what becomes of the rest.

    Attributes:
        enabled: False synchronises densely; what the residual still holds is sent first.
        method: what is accumulated and how thresholds are found; docs/compression.md says when to
            take which. `topk`: leaky error feedback, thresholds from samples of every step.
            `threshold_reuse`: the same, with thresholds that serve for several steps. `sidco`: the
            same, with thresholds from a tail that is fitted to the samples. `dgc`: Deep Gradient
            Compression's momentum correction, for SGD without momentum of its own.
        density: the fraction of each pruned range that is sent (nnz / numel), in (0, 1].
        leak: factor on what was not sent when it enters the residual; 1 loses nothing.
        samples: how many elements of a range are looked at for its threshold. The kept count's
            relative error is about sqrt((1 - density) / (density * samples)).
        threshold_scope: `parameter` (one threshold for each parameter: the same selection with
            overlap on and off), `bucket` (one for each bucket, whose cut depends on overlap) or
            `tp_group` (one for each bucket of all ranks of Megatron's tensor-parallel group, from
            samples that they gather; not with plans that ranks of it may not share:
            `planner.cluster`; with the methods `topk` and `dgc`).
        reuse_iters: `threshold_reuse`: steps that a threshold serves for, the one it was sampled in
            included.
        tail_fit: `sidco`: what is fitted to the magnitudes: `exponential`, `pareto` (generalised),
            or `gamma` first and `pareto` to what exceeds it.
        momentum: `dgc`: of the velocity that each rank accumulates; it takes the place of the
            optimizer's.
        momentum_masking: `dgc`: forget the velocity of what is sent (momentum factor masking).
        residual_dtype: fp32 or bf16 (stochastically rounded; half the memory).
        undo: `auto` keeps an undo copy of the residual only where a step can be skipped or
            repeated (fp16 loss scaling, Megatron's rerun mode); `always`, `never`.
        warmup_iters: iterations synchronised densely at the start.
        ramp_iters: iterations over which the density falls from `ramp_start_density` to `density`.
        ramp_start_density: the first density of the ramp.
        ramp_shape: `exponential` (equal factors), `linear` (equal differences) or `staircase`
            (DGC's warm-up: equal times at a density, at a quarter of it, and so on, while that is
            above `density`).
        keep_below_numel: parameters with fewer elements are always sent whole; so are all
            one-dimensional ones and those that tensor parallelism replicates.
        keep_patterns: regular expressions; a parameter whose name one of them finds is kept whole.
        lossless_patterns: the same for parameters of which exactly what is not zero is sent, such
            as an embedding that is not tied to the output layer; docs/natural-sparsity.md. Not
            with `scheme.capacity`.
        residual_checkpoint: `full` saves each rank's residual with Megatron's checkpoint, `sum` one
            for all data-parallel ranks, whose total it keeps; `none` neither saves nor restores it.
        residual_alarm: warn when a rank's residual norm exceeds this many times the norm of the
            gradient it sends; 0 turns the alarm off.
        seed: of the sample positions and of stochastic rounding.
    """

    enabled: bool = True
    method: str = "topk"
    density: float = 0.01
    leak: float = 1.0
    samples: int = 40_000
    threshold_scope: str = "parameter"
    reuse_iters: int = 32
    tail_fit: str = "pareto"
    momentum: float = 0.9
    momentum_masking: bool = True
    residual_dtype: str = "fp32"
    undo: str = "auto"
    warmup_iters: int = 500
    ramp_iters: int = 1000
    ramp_start_density: float = 0.25
    ramp_shape: str = "exponential"
    keep_below_numel: int = 4096
    keep_patterns: list[str] = field(default_factory=list)
    lossless_patterns: list[str] = field(default_factory=list)
    residual_checkpoint: str = "full"
    residual_alarm: float = 1000.0
    seed: int = 1234

    def __post_init__(self) -> None:
        is_flag("compression.enabled", self.enabled)
        one_of("compression.method", self.method, METHODS)
        in_range("compression.density", self.density, 0, 1, low_open=True)
        in_range("compression.leak", self.leak, 0, 1)
        in_range("compression.samples", self.samples, 1, 2**31 - 1, integer=True)
        one_of("compression.threshold_scope", self.threshold_scope, THRESHOLD_SCOPES)
        in_range("compression.reuse_iters", self.reuse_iters, 1, math.inf, integer=True)
        one_of("compression.tail_fit", self.tail_fit, TAIL_FITS)
        in_range("compression.momentum", self.momentum, 0, 0.999)
        is_flag("compression.momentum_masking", self.momentum_masking)
        one_of("compression.residual_dtype", self.residual_dtype, ("fp32", "bf16"))
        one_of("compression.undo", self.undo, ("auto", "always", "never"))
        in_range("compression.warmup_iters", self.warmup_iters, 0, math.inf, integer=True)
        in_range("compression.ramp_iters", self.ramp_iters, 0, math.inf, integer=True)
        in_range("compression.ramp_start_density", self.ramp_start_density, 0, 1, low_open=True)
        one_of("compression.ramp_shape", self.ramp_shape, RAMP_SHAPES)
        in_range("compression.keep_below_numel", self.keep_below_numel, 0, math.inf, integer=True)
        one_of("compression.residual_checkpoint", self.residual_checkpoint, RESIDUAL_CHECKPOINTS)
        in_range("compression.residual_alarm", self.residual_alarm, 0, math.inf)
        in_range("compression.seed", self.seed, 0, 2**63 - 1, integer=True)
        are_patterns("compression.keep_patterns", self.keep_patterns)
        are_patterns("compression.lossless_patterns", self.lossless_patterns)
        for pattern in set(self.lossless_patterns) & set(self.keep_patterns):
            raise ConfigError(
                "compression.lossless_patterns and .keep_patterns exclude each other",
                expected="a pattern in one of them",
                got=f"{pattern!r} in both",
                remedy="leave it in lossless_patterns where most is zero, else in keep_patterns",
            )
        self._check_method()

    def _check_method(self) -> None:
        """What does not go with the method."""
        if self.threshold_scope == "tp_group" and self.method not in SHARED_THRESHOLD_METHODS:
            raise ConfigError(
                f"compression.method={self.method} has thresholds of its own on each rank",
                expected="compression.threshold_scope=parameter or bucket",
                got="tp_group",
                remedy="set compression.threshold_scope=bucket, or compression.method="
                + " or ".join(SHARED_THRESHOLD_METHODS),
            )
        if self.method == "dgc" and self.residual_dtype != "fp32":
            raise ConfigError(
                "compression.method=dgc adds up velocities in the residual",
                expected="compression.residual_dtype=fp32",
                got=self.residual_dtype,
                remedy="leave it out: in bf16 additions under 1/256 of an element would be lost",
            )
