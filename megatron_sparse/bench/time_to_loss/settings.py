"""The settings of `bench time-to-loss`: plain Megatron, its rivals, and the presets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_sparse.bench.convergence.settings import LONG_RAMP_SHARE, RAMP_SHARE, WARMUP_SHARE
from megatron_sparse.bench.options import at_least, check_arguments, known

PLAIN = "plain"
CORPUS, VOCAB_SIZE = "prose", 8192
"""Text, with a vocabulary that makes the test bed's GPT one of 10 million parameters."""
VALIDATIONS, VALIDATION_ITERS = 10, 100
"""In each run, at equal distances, the last one at its end; each setting's k-th sees the same
samples. With fewer iterations of each, samples matter more than half a percent of the loss."""
STRETCH = 1.1
"""Iterations of a compressed run over plain Megatron's; its schedules are stretched with it."""
LR_WARMUP_SHARE = 0.1
_LOSSY = ("parameters.method=lossy", "parameters.bits=4")


@dataclass(frozen=True)
class Setting:
    """One way to synchronise.

    Attributes:
        name: of the run's folder, and on the command line.
        label: in table and picture.
        overrides: arguments of `train`.
        warmup: share of the iterations before anything is pruned.
        ramp: share of the iterations in which the density falls to the target.
        stretch: iterations over plain Megatron's.
    """

    name: str
    label: str
    overrides: tuple[str, ...]
    warmup: float = WARMUP_SHARE
    ramp: float = RAMP_SHARE
    stretch: float = STRETCH


SETTINGS = (
    Setting(PLAIN, "Megatron", ("plugin=false",), stretch=1.0),
    Setting(
        "bf16",
        "gradients in bf16",
        (
            "scheme=dense",
            "compression.density=1",
            "scheme.wire_dtype=bf16",
            "parameters.method=raw",
        ),
        warmup=0,
        ramp=0,
    ),
    Setting(
        "dense_q4",
        "gradients and parameters in 4 bits",
        ("scheme=dense_q", "compression.value_bits=4", "scheme.sum_bits=null", *_LOSSY),
        warmup=0,
        ramp=0,
    ),
    Setting("topk1", "topk99, exact parameters", ("compression=topk99", "parameters.method=exact")),
    Setting("safe_exact", "safe, exact parameters", ("preset=safe", "parameters.method=exact")),
    Setting("safe", "safe, parameters in 4 bits", ("preset=safe", *_LOSSY)),
    Setting(
        "balanced",
        "balanced, parameters in 4 bits",
        ("preset=balanced", *_LOSSY),
        ramp=LONG_RAMP_SHARE,
    ),
    Setting(
        "extreme",
        "extreme, parameters in 4 bits",
        ("preset=extreme", *_LOSSY),
        ramp=LONG_RAMP_SHARE,
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Run:
    """One training run."""

    setting: Setting
    mbit: int | None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.setting.name}-{'loopback' if self.mbit is None else self.mbit}"


@dataclass(frozen=True)
class Race:
    """What to train, and where.

    Attributes:
        settings: names of `SETTINGS`, `plain` among them.
        ranks: processes on this machine; on the test bed each has a host of its own.
        mbits: rates of the test bed's links in Mbit/s; (None,) for loopback.
        iters: iterations of plain Megatron.
        batch: sequences of a rank in an iteration.
        seed: of weights, samples and sample positions.
        out: folder of the runs and the corpus.
        overrides: more arguments of `train`, for all runs.
    """

    settings: Sequence[str]
    ranks: int
    mbits: Sequence[int | None]
    iters: int
    batch: int
    seed: int
    out: Path
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        whole = self.iters > 0 and self.iters % VALIDATIONS == 0
        check_arguments(
            "bench time-to-loss",
            [
                known("setting", self.settings, BY_NAME),
                ("setting", self.settings, PLAIN in self.settings, f"{PLAIN} among them"),
                at_least("ranks", self.ranks, 2),
                ("iters", self.iters, whole, f"a multiple of {VALIDATIONS}"),
                at_least("batch", self.batch, 1),
                at_least("seed", self.seed, 1),
            ],
        )

    @property
    def corpus_dir(self) -> Path:
        """Where the corpus is made."""
        return self.out / "corpus"

    def runs(self) -> Iterator[Run]:
        """Rate after rate; plain Megatron first."""
        for mbit in self.mbits:
            for setting in SETTINGS:
                if setting.name in self.settings:
                    yield Run(setting, mbit)

    def interval(self, setting: Setting) -> int:
        """Iterations from one validation to the next."""
        return round(self.iters * setting.stretch / VALIDATIONS)

    def arguments(self, run: Run) -> list[str]:
        """The arguments of `train`, without names and folders."""
        setting, nodes = run.setting, 1 if run.mbit is None else self.ranks
        interval = self.interval(setting)
        iterations = interval * VALIDATIONS
        return [
            "experiment=testbed",
            f"cluster.nodes={nodes}",
            f"cluster.ranks_per_node={self.ranks // nodes}",
            "cluster.device=cpu",
            f"training.micro_batch_size={self.batch}",
            f"training.global_batch_size={self.batch * self.ranks}",
            "training.use_distributed_optimizer=true",
            f"training.iterations={iterations}",
            f"training.lr_warmup_iters={round(iterations * LR_WARMUP_SHARE)}",
            f"training.eval_interval={interval}",
            f"training.eval_iters={VALIDATION_ITERS}",
            f"training.seed={self.seed}",
            f"compression.seed={self.seed}",
            f"compression.warmup_iters={round(iterations * setting.warmup)}",
            f"compression.ramp_iters={round(iterations * setting.ramp)}",
            *setting.overrides,
            *self.overrides,
        ]
