"""What the runs of `bench convergence` and `bench time-to-loss` are trained with, by name.

A setting of convergence changes one factor of `compression=topk99`, or is a preset, or dense. One
that trains with SGD is compared with dense SGD, every other one with dense Adam. Time to loss has
plain Megatron and what it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.megatron.spiked_loss import SPIKES

PLAIN, DENSE, SGD_DENSE = "plain", "dense", "sgd_dense"
WARMUP_SHARE, RAMP_SHARE, LONG_RAMP_SHARE = 0.15, 0.3, 0.7
"""Shares of a run's iterations: those synchronised densely, and those in which the density falls to
the target, 1 : 2 as in `config.CompressionConfig`; the latter of presets with a long ramp."""
VALIDATIONS = 10
"""Validations in a run, at equal distances, the last one at its end."""
STRETCH = 1.1
"""Iterations of a compressed run of time-to-loss over plain Megatron's."""
CORPORA = {"gpt": "prose", "starcoder": "code"}
"""The models of convergence, and the corpus of each."""
_TOPK99 = "compression=topk99"
_FULL_SUMS = "scheme.sum_bits=null"
_OWN, _PRESETS = "fp32 values", "presets"
_DENSE_LOSSY = (
    "compression=dense",
    "training.use_distributed_optimizer=true",
    "parameters.method=lossy",
)
_BF16 = ("plugin=false", "megatron.grad_reduce_in_bf16=true")
_REPLICATED = "training.use_distributed_optimizer=false"
"""Over gloo torch reduce-scatters by an all-reduce, which sends twice as much; so plain Megatron
without the distributed optimizer sends what NCCL would send with it."""
_SGD = ("megatron.optimizer=sgd", "training.lr=0.3", "training.min_lr=0.03")


@dataclass(frozen=True)
class Setting:
    """One way to synchronise.

    Attributes:
        name: of the run's folder, and on the command line.
        label: in tables and pictures.
        overrides: arguments of `train`.
        warmup: share of the iterations before anything is pruned.
        ramp: share of the iterations in which the density falls to the target.
        baseline: of convergence: name of the setting that it is compared with.
        tier: of convergence: 1 runs first.
        curve: of convergence: the line in the picture of loss over bits that it is a point of.
        stretch: of time-to-loss: iterations over plain Megatron's, and so its schedules.
        plain_bits: of time-to-loss: bits that Megatron without the plugin sends for an element,
            gradient and parameter; None with the plugin, which counts them.
    """

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    warmup: float = WARMUP_SHARE
    ramp: float = RAMP_SHARE
    baseline: str = DENSE
    tier: int = 1
    curve: str | None = None
    stretch: float = STRETCH
    plain_bits: int | None = None


def _in_bits(percent: int, bits: int) -> Setting:
    density = f"compression.density={percent / 100:g}"
    overrides = (density, f"compression.value_bits={bits}", _FULL_SUMS)
    name, label = f"q{bits}_{percent}", f"{percent} %, {bits} bits"
    return Setting(name, label, overrides, tier=3, curve=f"{bits} bits")


def _spiked(factor: int) -> tuple[Setting, ...]:
    """The same with a loss that is `factor` times too large in 0.5 % of the iterations."""
    spikes, dense = f"cluster.env.{SPIKES}='{factor}:0.005'", f"dense_x{factor}"
    of = {"dense": "compression=dense", "topk1": _TOPK99, "topk5": "compression=topk95"}
    of["safe"] = "preset=safe"
    return tuple(
        Setting(f"{name}_x{factor}", f"{name}, {factor} x", (given, spikes), baseline=dense, tier=3)
        for name, given in of.items()
    )


def _preset(name: str, ramp: float) -> Setting:
    return Setting(name, f"preset {name}", (f"preset={name}",), ramp=ramp, curve=_PRESETS)


def _with_exact_parameters(
    name: str, ramp: float = RAMP_SHARE, warmup: float = WARMUP_SHARE
) -> Setting:
    overrides = (f"preset={name}", "parameters.method=exact")
    return Setting(name, f"preset {name}", overrides, warmup, ramp)


CONVERGENCE = (
    Setting(DENSE, "dense", ("compression=dense",)),
    Setting("topk1", "1 %", (_TOPK99,), curve=_OWN),
    Setting("topk01", "0.1 %", ("compression=topk999",), curve=_OWN),
    Setting("topk5", "5 %", ("compression=topk95",), curve=_OWN),
    _preset("quantised", 0),
    _preset("safe", RAMP_SHARE),
    _preset("balanced", LONG_RAMP_SHARE),
    _preset("extreme", LONG_RAMP_SHARE),
    *(_in_bits(percent, bits=4) for percent in (10, 5, 2)),
    *(_in_bits(percent, bits=2) for percent in (22, 10, 5)),
    Setting("leak09", "1 %, leak 0.9", (_TOPK99, "compression.leak=0.9"), tier=2),
    Setting("cold", "1 %, no warm-up, no ramp", (_TOPK99,), warmup=0, ramp=0, tier=2),
    Setting("lossy4", "dense, parameters in 4 bits", (*_DENSE_LOSSY, "parameters.bits=4"), tier=2),
    Setting("lossy8", "dense, parameters in 8 bits", (*_DENSE_LOSSY, "parameters.bits=8"), tier=2),
    Setting("noramp", "1 %, warm-up, no ramp", (_TOPK99,), ramp=0, tier=3),
    Setting("longramp", "1 %, ramp of 70 %", (_TOPK99,), ramp=LONG_RAMP_SHARE, tier=3),
    Setting(SGD_DENSE, "SGD, dense", ("compression=dense", *_SGD), baseline=SGD_DENSE, tier=3),
    *_spiked(100),
    *_spiked(1000),
    Setting("sgd_topk1", "SGD, 1 %", (_TOPK99, *_SGD), baseline=SGD_DENSE, tier=3),
)
TIME_TO_LOSS = (
    Setting(PLAIN, "Megatron", ("plugin=false",), stretch=1.0, plain_bits=32 + 16),
    Setting("bf16", "Megatron, gradients in bf16", _BF16, plain_bits=16 + 16),
    Setting("allreduce", "the same, all-reduced", (*_BF16, _REPLICATED), plain_bits=2 * 16),
    _with_exact_parameters("quantised", warmup=0),
    _with_exact_parameters("safe"),
    _with_exact_parameters("balanced", LONG_RAMP_SHARE),
    _with_exact_parameters("extreme", LONG_RAMP_SHARE),
    _with_exact_parameters("auto"),
)
"""Trained in bf16; Megatron has no gathers in 8 bits on a CPU."""


def by_name(settings: tuple[Setting, ...]) -> dict[str, Setting]:
    """In their order."""
    return {setting.name: setting for setting in settings}


def schedule(setting: Setting, iterations: int, lr_warmup: int, seed: int) -> list[str]:
    """Arguments of `train`: lengths, validations and seeds of a run of so many iterations."""
    return [
        f"training.iterations={iterations}",
        f"training.lr_warmup_iters={lr_warmup}",
        f"training.eval_interval={iterations // VALIDATIONS}",
        f"training.seed={seed}",
        f"compression.seed={seed}",
        f"compression.warmup_iters={round(iterations * setting.warmup)}",
        f"compression.ramp_iters={round(iterations * setting.ramp)}",
        *setting.overrides,
    ]
