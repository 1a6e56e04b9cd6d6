"""The settings of `bench convergence`: each changes one factor of `compression=topk99`, or is a
preset, or dense.

Warm-up and ramp are those of `config.CompressionConfig`, scaled to the length of the run. A setting
that trains with SGD is compared with dense SGD, every other one with dense Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_sparse.bench.options import check_arguments, known

DENSE = "dense"
SGD_DENSE = "sgd_dense"
WARMUP_SHARE, RAMP_SHARE = 0.15, 0.3
"""Shares of a run's iterations: those synchronised densely, and those in which the density falls to
the target; 1 : 2 as in `config.CompressionConfig`."""
LONG_RAMP_SHARE = 0.7
"""The same of the presets with a long ramp."""
RANKS, BATCH = 2, 16
"""Of `experiment=convergence`."""
VALIDATIONS = 10
"""Validations in a run, at equal distances, the last one at its end."""
_LOSSY = (
    "compression=dense",
    "training.use_distributed_optimizer=true",
    "parameters.method=lossy",
)
_FULL_SUMS = "scheme.sum_bits=null"
_IN_4_BITS = ("scheme=dense_q", "compression.value_bits=4", _FULL_SUMS)
"""Every element."""
_TOPK99 = "compression=topk99"
_OWN, _PRESETS = "fp32 values", "presets"
_SGD = ("megatron.optimizer=sgd", "training.lr=0.3", "training.min_lr=0.03")


@dataclass(frozen=True)
class Setting:
    """One way to compress.

    Attributes:
        name: of the run's folder, and on the command line.
        label: in tables and pictures.
        overrides: arguments of `train`.
        warmup: share of the iterations that are synchronised densely.
        ramp: share of the iterations in which the density falls to the target.
        baseline: name of the setting that it is compared with.
        tier: 1 runs first.
        curve: the line in the picture of loss over bits that it is a point of; None: of none.
    """

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    warmup: float = WARMUP_SHARE
    ramp: float = RAMP_SHARE
    baseline: str = DENSE
    tier: int = 1
    curve: str | None = None


def _in_bits(percent: int, bits: int) -> Setting:
    return Setting(
        f"q{bits}_{percent}",
        f"{percent} %, {bits} bits",
        (f"compression.density={percent / 100:g}", f"compression.value_bits={bits}", _FULL_SUMS),
        tier=3,
        curve=f"{bits} bits",
    )


def _preset_with_long_ramp(name: str) -> Setting:
    overrides = (f"preset={name}",)
    return Setting(name, f"preset {name}", overrides, ramp=LONG_RAMP_SHARE, curve=_PRESETS)


SETTINGS = (
    Setting(DENSE, "dense", ("compression=dense",)),
    Setting("topk1", "1 %", (_TOPK99,), curve=_OWN),
    Setting("topk01", "0.1 %", ("compression=topk999",), curve=_OWN),
    Setting("topk5", "5 %", ("compression=topk95",), curve=_OWN),
    Setting("safe", "preset safe", ("preset=safe",), curve=_PRESETS),
    _preset_with_long_ramp("balanced"),
    _preset_with_long_ramp("extreme"),
    Setting("dense_q4", "all in 4 bits", _IN_4_BITS, tier=2, curve="4 bits"),
    *(_in_bits(percent, bits=4) for percent in (10, 5, 2)),
    *(_in_bits(percent, bits=2) for percent in (22, 10, 5)),
    Setting("leak09", "1 %, leak 0.9", (_TOPK99, "compression.leak=0.9"), tier=2),
    Setting("cold", "1 %, no warm-up, no ramp", (_TOPK99,), warmup=0, ramp=0, tier=2),
    Setting("lossy4", "dense, parameters in 4 bits", (*_LOSSY, "parameters.bits=4"), tier=2),
    Setting("lossy8", "dense, parameters in 8 bits", (*_LOSSY, "parameters.bits=8"), tier=2),
    Setting("noramp", "1 %, warm-up, no ramp", (_TOPK99,), ramp=0, tier=3),
    Setting("longramp", "1 %, ramp of 70 %", (_TOPK99,), ramp=LONG_RAMP_SHARE, tier=3),
    Setting(SGD_DENSE, "SGD, dense", ("compression=dense", *_SGD), baseline=SGD_DENSE, tier=3),
    Setting("sgd_topk1", "SGD, 1 %", (_TOPK99, *_SGD), baseline=SGD_DENSE, tier=3),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
CORPORA = {"gpt": "prose", "starcoder": "code"}
"""The models, and the corpus of each."""


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    model: str
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.model}-{self.setting.name}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """The runs of a study and their length.

    Attributes:
        models: of `CORPORA`.
        settings: names of `SETTINGS`.
        seeds: of weights, the order of samples and the sample positions of thresholds.
        iters: iterations of each run.
        out: folder of the runs and the corpora.
        overrides: more arguments of `train`, for all runs.
        ranks: of each run, on this machine; they share the batch.
    """

    models: Sequence[str]
    settings: Sequence[str]
    seeds: Sequence[int]
    iters: int
    out: Path
    overrides: Sequence[str] = ()
    ranks: int = RANKS

    def __post_init__(self) -> None:
        whole = self.iters > 0 and self.iters % VALIDATIONS == 0
        check_arguments(
            "bench convergence",
            [
                known("model", self.models, CORPORA),
                known("setting", self.settings, BY_NAME),
                ("seeds", self.seeds, min(self.seeds, default=0) >= 1, "numbers of 1 or more"),
                ("iters", self.iters, whole, f"a multiple of {VALIDATIONS}"),
                ("ranks", self.ranks, BATCH % max(self.ranks, 1) == 0, f"a divisor of {BATCH}"),
            ],
        )

    def runs(self) -> Iterator[Run]:
        """The most important first; runs that are compared with one another follow one another."""
        chosen = [setting for setting in SETTINGS if setting.name in self.settings]
        for tier in sorted({setting.tier for setting in chosen}):
            for model in self.models:
                for seed in self.seeds:
                    for setting in chosen:
                        if setting.tier == tier:
                            yield Run(model, setting, seed)

    def corpus_dir(self, model: str) -> Path:
        """Where the model's corpus is made."""
        return self.out / "corpora" / CORPORA[model]

    def arguments(self, run: Run) -> list[str]:
        """The arguments of `train`, without names and folders."""
        return [
            "experiment=convergence",
            f"model={run.model}_tiny",
            f"data={CORPORA[run.model]}",
            f"training.iterations={self.iters}",
            f"training.lr_warmup_iters={min(100, self.iters // 4)}",
            f"training.eval_interval={self.iters // VALIDATIONS}",
            f"training.seed={run.seed}",
            f"compression.seed={run.seed}",
            f"compression.warmup_iters={round(self.iters * run.setting.warmup)}",
            f"compression.ramp_iters={round(self.iters * run.setting.ramp)}",
            *self._of_ranks(),
            *run.setting.overrides,
            *self.overrides,
        ]

    def _of_ranks(self) -> list[str]:
        """Results of the usual number of ranks do not name it."""
        if self.ranks == RANKS:
            return []
        share = BATCH // self.ranks
        return [f"cluster.ranks_per_node={self.ranks}", f"training.micro_batch_size={share}"]
