"""Options of the benches that train whole runs, and the settings that they train with, by name.

A setting of `bench convergence` changes one factor of `compression=topk99`, or is a preset, or
dense. One that trains with SGD is compared with dense SGD, every other one with dense Adam. The
settings of `bench time-to-loss` are Megatron without the plugin, in three ways, and presets.

Imports nothing heavy: the command line reads this for `--help`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sparse.bench.exchange.options import scheme_names
from megatron_sparse.bench.options import (
    Check,
    Options,
    at_least,
    density_option,
    names_option,
    option,
    parse_counts,
    parse_names,
)
from megatron_sparse.config.level import LEVELS, RANK
from megatron_sparse.config.parameters import METHODS
from megatron_sparse.config.presets import preset_names

if TYPE_CHECKING:
    from megatron_sparse.transport.netbed import BedLinks

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
_LARGE_BUCKETS = "megatron.ddp_bucket_size=null"
"""Megatron's default, one bucket here: at 1000 Mbit/s a second one costs the two cores more than it
hides. Megatron alone is faster with the four of `experiment=testbed`, so it has these."""
_SGD = ("megatron.optimizer=sgd", "training.lr=0.3", "training.min_lr=0.03")
RANKS, BATCH = 2, 16
"""Of `experiment=convergence`."""


@dataclass(frozen=True)
class Setting:
    """One way to synchronise.

    Attributes:
        name: of the run's folder, and on the command line.
        label: in tables and pictures.
        overrides: arguments of `train`.
        warmup: share of the iterations before anything is pruned; None: as by default.
        ramp: share of those in which the density falls to the target; None: as by default.
        baseline: of convergence: name of the setting that it is compared with.
        curve: of convergence: the line in the picture of loss over bits that it is a point of.
        stretch: of time-to-loss: ratio of its iterations (and schedules) to plain Megatron's.
        plain_bits: of time-to-loss: bits that Megatron without the plugin sends for an element,
            gradient and parameter; None with the plugin, which counts them.
    """

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    warmup: float | None = WARMUP_SHARE
    ramp: float | None = RAMP_SHARE
    baseline: str = DENSE
    curve: str | None = None
    stretch: float = STRETCH
    plain_bits: int | None = None


def _in_bits(percent: int, bits: int) -> Setting:
    density = f"compression.density={percent / 100:g}"
    overrides = (density, f"compression.value_bits={bits}", _FULL_SUMS)
    name, label = f"q{bits}_{percent}", f"{percent} %, {bits} bits"
    return Setting(name, label, overrides, curve=f"{bits} bits")


def _preset(name: str, ramp: float) -> Setting:
    return Setting(name, f"preset {name}", (f"preset={name}",), ramp=ramp, curve=_PRESETS)


def _with_exact_parameters(name: str) -> Setting:
    overrides = (f"preset={name}", "parameters.method=exact", _LARGE_BUCKETS)
    return Setting(name, f"preset {name}", overrides, warmup=None, ramp=None)


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
    Setting("leak09", "1 %, leak 0.9", (_TOPK99, "compression.leak=0.9")),
    Setting("cold", "1 %, no warm-up, no ramp", (_TOPK99,), warmup=0, ramp=0),
    Setting("lossy4", "dense, parameters in 4 bits", (*_DENSE_LOSSY, "parameters.bits=4")),
    Setting("lossy8", "dense, parameters in 8 bits", (*_DENSE_LOSSY, "parameters.bits=8")),
    Setting("noramp", "1 %, warm-up, no ramp", (_TOPK99,), ramp=0),
    Setting("longramp", "1 %, ramp of 70 %", (_TOPK99,), ramp=LONG_RAMP_SHARE),
    Setting(SGD_DENSE, "SGD, dense", ("compression=dense", *_SGD), baseline=SGD_DENSE),
    Setting("sgd_topk1", "SGD, 1 %", (_TOPK99, *_SGD), baseline=SGD_DENSE),
)
TIME_TO_LOSS = (
    Setting(PLAIN, "Megatron", ("plugin=false",), stretch=1.0, plain_bits=32 + 16),
    Setting("bf16", "Megatron, gradients in bf16", _BF16, plain_bits=16 + 16),
    Setting("allreduce", "the same, all-reduced", (*_BF16, _REPLICATED), plain_bits=2 * 16),
    *map(_with_exact_parameters, ("quantised", "safe", "balanced", "extreme", "auto")),
)
"""Trained in bf16; Megatron has no gathers in 8 bits on a CPU."""


def by_name(settings: tuple[Setting, ...]) -> dict[str, Setting]:
    """The settings by name, in the same order."""
    return {setting.name: setting for setting in settings}


def schedule(setting: Setting, iterations: int, lr_warmup: int, seed: int) -> list[str]:
    """Returns arguments of `train`: iterations and their phases, validations, seeds, overrides."""
    return [
        f"training.iterations={iterations}",
        f"training.lr_warmup_iters={lr_warmup}",
        f"training.eval_interval={iterations // VALIDATIONS}",
        f"training.seed={seed}",
        f"compression.seed={seed}",
        f"compression.warmup_iters={_steps(setting.warmup, iterations)}",
        f"compression.ramp_iters={_steps(setting.ramp, iterations)}",
        *setting.overrides,
    ]


def _steps(share: float | None, iterations: int) -> int | str:
    """That share of the iterations; `null`, the product's default, without one."""
    return "null" if share is None else round(share * iterations)


def _settings(settings: tuple[Setting, ...], help: str) -> Any:
    """Makes the option `--setting`: names of some of `settings`, or `all`."""

    def parse(option: str, text: str) -> tuple[str, ...]:
        """Parses names with commas between; `all` is all of them."""
        return tuple(by_name(settings)) if text == "all" else parse_names(option, text)

    return option("all", help, parse, flag="--setting", metavar="NAME,...", among=by_name(settings))


def _validated(iters: int) -> str:
    whole = iters > 0 and iters % VALIDATIONS == 0
    return "" if whole else f"a multiple of {VALIDATIONS}"


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    """Options of all benches of whole runs.

    `out` gets a folder and a log for each run; `overrides` are more arguments of `train`, for all.
    """

    out: Path = Path()
    overrides: Sequence[str] = ()


def _schemes() -> Iterable[str]:
    return (PLAIN, *scheme_names())


@dataclass(frozen=True, kw_only=True)
class BedOptions(StudyOptions):
    """Options of the links: loopback, or those of the network test bed."""

    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    delay_ms: int = option(0, "Round trip between its hosts, or sites.", min=0)
    sites: int = option(1, "2: rate and delay are between two sites of hosts.", min=1)

    def _link_checks(self, mbit: int | None, hosts: int) -> list[Check]:
        """Raises an error if `--netbed` lacks a link rate; returns checks of delay and sites."""
        from megatron_sparse.run import local_ranks

        local_ranks.check_place(
            netbed=self.netbed, virtual=False, mbit=mbit, ranks=None, started=None
        )
        has_two_halves = self.netbed and hosts % 2 == 0
        sites_fit = self.sites == 1 or (self.sites == 2 and has_two_halves)
        return [
            ("delay-ms", self.delay_ms, self.netbed or not self.delay_ms, "0 without --netbed"),
            ("sites", self.sites, sites_fit, "1, or 2 with --netbed and an even number of hosts"),
        ]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(BedOptions):
    """Iterations of a small Megatron GPT: plain Megatron beside compressed gradients.

    The first scheme is what the others are compared with. With a slow rank, schemes that can skip a
    straggler have it pinned.
    """

    NAME = "bench training"
    RUNNER = "study.training"

    out: Path = Path("runs/bench_training")
    schemes: Sequence[str] = names_option(
        "plain,direct", "plain: Megatron without the plugin.", "--scheme", among=_schemes
    )
    densities: Sequence[float] = density_option("0.01", "Fractions sent.")
    presets: Sequence[str] | None = names_option(
        None,
        "Rows of presets; the trials of auto come before --warmup.",
        "--preset",
        among=preset_names,
    )
    methods: Sequence[str] = names_option(
        "auto", "Values of parameters.method.", "--parameters", metavar="METHOD,...", among=METHODS
    )
    levels: Sequence[str] = names_option(
        RANK, "Values of compression.level.", "--level", metavar="LEVEL,...", among=LEVELS
    )
    ranks: int = option(2, "Processes on this machine.", min=1)
    ranks_per_node: int = option(1, "On each host of --netbed.", min=1)
    mbit: int | None = option(None, "Rate of the test bed's links.", min=1)
    iters: int = option(12, "Iterations that are timed.", min=1)
    warmup: int = option(3, "Iterations that are not.", min=0)
    slow_rank: int | None = option(None, "Sleeps in every backward pass.", min=0)
    slow_ms: float = option(300.0, "For so long.", min=0)

    def checks(self) -> list[Check]:
        """Checks links and the ranks of each host, and that other options fit `--slow-rank`."""
        divides = self.ranks % self.ranks_per_node == 0
        has_hosts = self.netbed or self.ranks_per_node == 1
        checks = [
            *self._link_checks(self.mbit, self.nodes),
            ("ranks-per-node", self.ranks_per_node, divides, f"a divisor of {self.ranks}"),
            ("ranks-per-node", self.ranks_per_node, has_hosts, "1 without --netbed"),
        ]
        if (slow := self.slow_rank) is not None:
            is_at_rank, levels = set(self.levels) == {RANK}, ",".join(self.levels)
            sleeps = f"no {PLAIN} with --slow-rank: it is the plugin that sleeps"
            checks += [
                ("slow-rank", slow, slow < self.ranks, f"0 to {self.ranks - 1}"),
                ("level", levels, is_at_rank, "rank: one is slow"),
                ("slow-ms", self.slow_ms, self.slow_ms > 0, "more than 0 with --slow-rank"),
                ("scheme", self.schemes, PLAIN not in self.schemes, sleeps),
            ]
        return checks

    @property
    def nodes(self) -> int:
        """The number of hosts; this machine is one."""
        return self.ranks // self.ranks_per_node if self.netbed else 1

    @property
    def links(self) -> BedLinks | None:
        """The test bed's links; None over loopback."""
        from megatron_sparse.transport.netbed import BedLinks

        return BedLinks(self.mbit or 0, self.delay_ms, self.sites) if self.netbed else None


@dataclass(frozen=True, kw_only=True)
class RaceOptions(BedOptions):
    """Seconds of training until a small GPT reaches plain Megatron's losses.

    On the test bed each rank has a host of its own.
    """

    NAME = "bench time-to-loss"
    RUNNER = "study.time_to_loss"

    out: Path = Path("runs/time_to_loss")
    settings: Sequence[str] = _settings(TIME_TO_LOSS, "Of docs/results/time-to-loss.md, or all.")
    ranks: int = option(4, "Processes on this machine.", fits=at_least(2))
    mbits: Sequence[int] | None = option(
        None, "Rates of the test bed's links.", parse_counts, flag="--mbit", metavar="R,..."
    )
    iters: int = option(200, "Iterations of plain Megatron.", fits=_validated)
    batch: int = option(2, "Sequences of a rank in an iteration.", fits=at_least(1))
    seeds: Sequence[int] = option("1,2", "Each trains every setting.", parse_counts)

    def checks(self) -> list[Check]:
        """Checks the links (at the lowest rate), and that plain Megatron is among the settings."""
        return [
            *self._link_checks(min(self.mbits or (), default=None), self.ranks),
            ("setting", self.settings, PLAIN in self.settings, f"{PLAIN} among them"),
        ]


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(StudyOptions):
    """Final validation loss of small models, compressed beside dense."""

    NAME = "bench convergence"
    RUNNER = "study.convergence"

    out: Path = Path("runs/convergence")
    models: Sequence[str] = names_option("gpt,starcoder", flag="--model", among=CORPORA)
    settings: Sequence[str] = _settings(CONVERGENCE, "all, or of docs/results/convergence.md.")
    seeds: Sequence[int] = option("1,2", "Each trains every setting.", parse_counts)
    iters: int = option(1500, "Iterations of each run.", fits=_validated)
    ranks: int = option(
        RANKS,
        "Ranks of each run; they share the batch.",
        fits=lambda ranks: "" if BATCH % max(ranks, 1) == 0 else f"a divisor of {BATCH}",
    )


@dataclass(frozen=True, kw_only=True)
class OverheadOptions(Options):
    """The plugin's own cost: dense through it against Megatron alone, in pairs."""

    NAME = "bench overhead"
    RUNNER = "study.overhead"

    ranks: int = option(2, "Processes on this machine.", min=1)
    warmup: int = option(3, "Pairs that are not timed.", min=0)
    iters: int = option(20, "Pairs that are timed.", min=2)
