"""Options of the benches that train whole runs. The command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from megatron_sparse.bench.options import (
    Options,
    at_least,
    check_arguments,
    known,
    option,
    parse_densities,
    parse_list,
    parse_names,
)
from megatron_sparse.bench.study.settings import (
    CONVERGENCE,
    CORPORA,
    PLAIN,
    TIME_TO_LOSS,
    VALIDATIONS,
    Setting,
    by_name,
)
from megatron_sparse.config.level import LEVELS, RANK
from megatron_sparse.config.parameters import METHODS

RANKS, BATCH = 2, 16
"""Of `experiment=convergence`."""


def _settings(settings: tuple[Setting, ...], help: str) -> Any:
    """The option that names some of these settings, or `all`."""

    def parse(option: str, text: str) -> tuple[str, ...]:
        return tuple(by_name(settings)) if text == "all" else parse_names(option, text)

    return option("all", help, parse, flag="--setting", metavar="NAME,...")


def _parse_integers(option: str, text: str) -> tuple[int, ...]:
    return parse_list(option, text, int, "whole numbers with commas between")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    """What all benches of whole runs are given besides their options.

    Attributes:
        out: gets a folder and a log for each run.
        overrides: more arguments of `train`, for all runs.
    """

    out: Path = Path()
    overrides: Sequence[str] = ()

    def given(self, out: Path, overrides: Sequence[str] | None) -> Self:
        """The same options with a folder and overrides."""
        return replace(self, out=out, overrides=overrides or ())


def _check_bed(*, netbed: bool, mbit: int | None) -> None:
    from megatron_sparse.run import local_ranks

    local_ranks.check_place(netbed=netbed, virtual=False, mbit=mbit, ranks=None, started=None)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(StudyOptions):
    """The options of `bench training`; the first scheme is what the others are compared with.

    With a slow rank, schemes that can skip a straggler have it pinned.
    """

    schemes: Sequence[str] = option(
        "plain,direct", "plain: Megatron without the plugin.", parse_names, flag="--scheme"
    )
    densities: Sequence[float] = option(
        "0.01", "Fractions sent.", parse_densities, flag="--density"
    )
    methods: Sequence[str] = option(
        "auto",
        "Values of parameters.method.",
        parse_names,
        flag="--parameters",
        metavar="METHOD,...",
    )
    levels: Sequence[str] = option(
        RANK, "Values of compression.level.", parse_names, flag="--level", metavar="LEVEL,..."
    )
    ranks: int = option(2, "Processes on this machine.", min=1)
    ranks_per_node: int = option(1, "On each host of --netbed.", min=1)
    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    mbit: int | None = option(None, "Rate of the test bed's links.", min=1)
    iters: int = option(12, "Iterations that are timed.", min=1)
    warmup: int = option(3, "Iterations that are not.", min=0)
    slow_rank: int | None = option(None, "Sleeps in every backward pass.", min=0)
    slow_ms: float = option(300.0, "For so long.", min=0)

    def __post_init__(self) -> None:
        from megatron_sparse.collectives import AUTO, SCHEMES

        _check_bed(netbed=self.netbed, mbit=self.mbit)
        divides = self.ranks % self.ranks_per_node == 0
        has_hosts = self.netbed or self.ranks_per_node == 1
        checks = [
            known("scheme", self.schemes, (PLAIN, AUTO, *SCHEMES)),
            known("parameters", self.methods, METHODS),
            at_least("ranks", self.ranks, 1),
            at_least("warmup", self.warmup, 0),
            at_least("iters", self.iters, 1),
            known("level", self.levels, LEVELS),
            ("ranks-per-node", self.ranks_per_node, divides, f"a divisor of {self.ranks}"),
            ("ranks-per-node", self.ranks_per_node, has_hosts, "1 without --netbed"),
        ]
        if (slow := self.slow_rank) is not None:
            of_ranks, levels = set(self.levels) == {RANK}, ",".join(self.levels)
            sleeps = f"no {PLAIN} with --slow-rank: it is the plugin that sleeps"
            checks += [
                ("slow-rank", slow, slow < self.ranks, f"0 to {self.ranks - 1}"),
                ("level", levels, of_ranks, "rank: one is slow"),
                ("slow-ms", self.slow_ms, self.slow_ms > 0, "more than 0 with --slow-rank"),
                ("scheme", self.schemes, PLAIN not in self.schemes, sleeps),
            ]
        check_arguments("bench training", checks)

    @property
    def nodes(self) -> int:
        """Hosts."""
        return self.ranks // self.ranks_per_node if self.netbed else 1


@dataclass(frozen=True, kw_only=True)
class RaceOptions(StudyOptions):
    """The options of `bench time-to-loss`; on the test bed each rank has a host of its own."""

    settings: Sequence[str] = _settings(TIME_TO_LOSS, "Of docs/results/time-to-loss.md, or all.")
    ranks: int = option(4, "Processes on this machine.")
    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    mbits: Sequence[int] | None = option(
        None, "Rates of the test bed's links.", _parse_integers, flag="--mbit", metavar="R,..."
    )
    iters: int = option(200, "Iterations of plain Megatron.")
    batch: int = option(2, "Sequences of a rank in an iteration.")
    seed: int = option(1, "Of weights and samples.")

    def __post_init__(self) -> None:
        _check_bed(netbed=self.netbed, mbit=min(self.mbits or (), default=None))
        whole = self.iters > 0 and self.iters % VALIDATIONS == 0
        checks = [
            known("setting", self.settings, by_name(TIME_TO_LOSS)),
            ("setting", self.settings, PLAIN in self.settings, f"{PLAIN} among them"),
            at_least("ranks", self.ranks, 2),
            ("iters", self.iters, whole, f"a multiple of {VALIDATIONS}"),
            at_least("batch", self.batch, 1),
            at_least("seed", self.seed, 1),
        ]
        check_arguments("bench time-to-loss", checks)


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(StudyOptions):
    """The options of `bench convergence`."""

    models: Sequence[str] = option("gpt,starcoder", "gpt | starcoder", parse_names, flag="--model")
    settings: Sequence[str] = _settings(CONVERGENCE, "all, or of docs/results/convergence.md.")
    seeds: Sequence[int] = option(
        "1,2", "Each trains every setting.", _parse_integers, metavar="N,..."
    )
    iters: int = option(1500, "Iterations of each run.")
    ranks: int = option(RANKS, "Ranks of each run; they share the batch.")

    def __post_init__(self) -> None:
        whole = self.iters > 0 and self.iters % VALIDATIONS == 0
        checks = [
            known("model", self.models, CORPORA),
            known("setting", self.settings, by_name(CONVERGENCE)),
            ("seeds", self.seeds, min(self.seeds, default=0) >= 1, "numbers of 1 or more"),
            ("iters", self.iters, whole, f"a multiple of {VALIDATIONS}"),
            ("ranks", self.ranks, BATCH % max(self.ranks, 1) == 0, f"a divisor of {BATCH}"),
        ]
        check_arguments("bench convergence", checks)
