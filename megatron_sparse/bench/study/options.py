"""Options of the benches that train whole runs. The command line reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
from megatron_sparse.config.presets import preset_names

if TYPE_CHECKING:
    from megatron_sparse.transport.netbed import BedLinks

RANKS, BATCH = 2, 16
"""Of `experiment=convergence`."""


def _settings(settings: tuple[Setting, ...], help: str) -> Any:
    """The option that names some of these settings, or `all`."""

    def parse(option: str, text: str) -> tuple[str, ...]:
        return tuple(by_name(settings)) if text == "all" else parse_names(option, text)

    return option("all", help, parse, flag="--setting", metavar="NAME,...", among=by_name(settings))


def _validated(iters: int) -> str:
    whole = iters > 0 and iters % VALIDATIONS == 0
    return "" if whole else f"a multiple of {VALIDATIONS}"


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


def _schemes() -> Iterable[str]:
    return (PLAIN, *scheme_names())


@dataclass(frozen=True, kw_only=True)
class BedOptions(StudyOptions):
    """Where the ranks are."""

    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    delay_ms: int = option(0, "Round trip between its hosts, or sites.", min=0)
    sites: int = option(1, "2: rate and delay are between two sites of hosts.", min=1)

    def _checks(self, mbit: int | None, hosts: int) -> list[Check]:
        from megatron_sparse.run import local_ranks

        local_ranks.check_place(
            netbed=self.netbed, virtual=False, mbit=mbit, ranks=None, started=None
        )
        divided = self.sites == 1 or (self.netbed and self.sites == 2 and hosts % 2 == 0)
        return [
            ("delay-ms", self.delay_ms, self.netbed or not self.delay_ms, "0 without --netbed"),
            ("sites", self.sites, divided, "1, or 2 with --netbed and an even number of hosts"),
        ]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(BedOptions):
    """The options of `bench training`; the first scheme is what the others are compared with.

    With a slow rank, schemes that can skip a straggler have it pinned.
    """

    NAME = "bench training"

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
        "auto",
        "Values of parameters.method.",
        "--parameters",
        metavar="METHOD,...",
        among=METHODS,
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
        """See `Options`."""
        divides = self.ranks % self.ranks_per_node == 0
        has_hosts = self.netbed or self.ranks_per_node == 1
        checks = [
            *self._checks(self.mbit, self.nodes),
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
        return checks

    @property
    def nodes(self) -> int:
        """Hosts."""
        return self.ranks // self.ranks_per_node if self.netbed else 1

    @property
    def links(self) -> BedLinks | None:
        """Of the test bed; None over loopback."""
        from megatron_sparse.transport.netbed import BedLinks

        return BedLinks(self.mbit or 0, self.delay_ms, self.sites) if self.netbed else None


@dataclass(frozen=True, kw_only=True)
class RaceOptions(BedOptions):
    """The options of `bench time-to-loss`; on the test bed each rank has a host of its own."""

    NAME = "bench time-to-loss"

    settings: Sequence[str] = _settings(TIME_TO_LOSS, "Of docs/results/time-to-loss.md, or all.")
    ranks: int = option(4, "Processes on this machine.", fits=at_least(2))
    mbits: Sequence[int] | None = option(
        None, "Rates of the test bed's links.", parse_counts, flag="--mbit", metavar="R,..."
    )
    iters: int = option(200, "Iterations of plain Megatron.", fits=_validated)
    batch: int = option(2, "Sequences of a rank in an iteration.", fits=at_least(1))
    seeds: Sequence[int] = option("1,2", "Each trains every setting.", parse_counts)

    def checks(self) -> list[Check]:
        """See `Options`."""
        return [
            *self._checks(min(self.mbits or (), default=None), self.ranks),
            ("setting", self.settings, PLAIN in self.settings, f"{PLAIN} among them"),
        ]


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(StudyOptions):
    """The options of `bench convergence`."""

    NAME = "bench convergence"

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
