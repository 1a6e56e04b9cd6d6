"""Shared parts of benches that train whole runs: trains runs, saves and loads their results.

Each run is one `megatron-sparse train` in its own process and folder, over loopback or on the
network test bed; runs follow one another. Times and losses are those that Megatron itself prints,
so all runs are measured alike. `carry_out` saves each result in the run's folder, and does not
repeat a finished run with the same arguments, so an interrupted study can be continued.

A validation loss is Megatron's: the mean over the tokens of held-out documents. After the last
iteration Megatron validates twice, on different samples; the final loss is the mean of the two.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import IO, Any

from megatron_sparse.bench.table import HostLoad, describe_cpu, foreign_share
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run import composition, local_ranks
from megatron_sparse.simulate import figures
from megatron_sparse.telemetry import load_summary
from megatron_sparse.telemetry.lines import write_whole
from megatron_sparse.telemetry.run import BREAKDOWN_FILE
from megatron_sparse.transport.netbed import BedLinks

ITERATION = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+-]+)"
)
VALIDATION = re.compile(
    r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+)"
)
TAIL_LINES = 30
OUTCOME_FILE = "outcome.json"

type Picture = tuple[str, list[figures.Row], figures.Draw, float]
"""Its name, the rows of its CSV, what draws them, and its height in inches."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        bench: the command's name.
        name: of the run's folder and log.
        arguments: of `train`, without names and folders.
        out: where the run's folder and its log are.
        place: more arguments, which may differ when a result is loaded: folders, the machine.
        links: of the test bed; None over loopback.
        setting: name of the study's setting.
        model: of the study's models, if it has several.
        seed: of weights and samples.
        validates: it ends with a validation.
        untimed: number of its first iterations, whose times do not count.
    """

    bench: str
    name: str
    arguments: list[str]
    out: Path
    place: Sequence[str] = ()
    links: BedLinks | None = None
    setting: str = ""
    model: str = ""
    seed: int = 1
    validates: bool = True
    untimed: int = 0

    @property
    def folder(self) -> Path:
        """The run's own folder; Megatron without the plugin does not make it."""
        return self.out / self.name

    @property
    def where(self) -> dict[str, Any]:
        """The cells of a row that say on which links it ran."""
        return (
            dict(BedLinks(0)._asdict(), mbit=None) if self.links is None else self.links._asdict()
        )

    @property
    def words(self) -> list[str]:
        """All arguments of `train`."""
        return [f"name={self.name}", f"runs_dir={self.out}", *self.place, *self.arguments]

    @cached_property
    def config(self) -> RunConfig:
        """What its arguments say; a ConfigError if one of them is wrong."""
        return composition.compose(self.words)

    def train(self) -> RunResult:
        """Trains in its own process, and returns what the log says.

        The command `train` renames the folder of an earlier run of the same name.

        Raises:
            ConfigError: there is no test bed.
            MegatronSparseError: the run failed; the end of its log is in the message.
        """
        command = local_ranks.command_line(["train"])
        log_path, load, start_s = self.out / f"{self.name}.log", HostLoad(), time.monotonic()
        with log_path.open("w") as log:
            code = self._start([*command, *self.words], log)
        elapsed_s, foreign_load = time.monotonic() - start_s, foreign_share(*load.spent())
        printed = log_path.read_text("utf-8", errors="replace")
        iterations, curve = read_iterations(printed), read_curve(printed)
        wanted = self.config.training.iterations
        # The last iteration that was validated (empty: none was) or, without validation, trained.
        reached = [number for number, _ in curve[-1:]] if self.validates else [len(iterations)]
        if code or reached != [wanted]:
            tail = "\n".join(printed.splitlines()[-TAIL_LINES:])
            raise MegatronSparseError(
                f"bench {self.bench}: the run {self.name} failed",
                expected=f"exit code 0, {wanted} iterations"
                + (" and a validation after them" if self.validates else ""),
                got=f"exit code {code}, {len(iterations)} iterations and {len(curve)} validations; "
                f"it ends with\n{tail}",
                remedy=f"see {log_path}",
            )
        times_ms, losses = [ms for ms, _ in iterations], [loss for _, loss in iterations]
        return RunResult(self, times_ms, losses, curve, elapsed_s, foreign_load)

    def _start(self, command: list[str], log: IO[str]) -> int:
        """Runs the command on the run's links, output to the log; returns the exit code."""
        cluster = self.config.cluster
        ranks = cluster.nodes * cluster.ranks_per_node
        if self.links is not None:
            return local_ranks.run_netbed(command, ranks, self.links, cluster.nodes, log)
        if cluster.nodes == 1:
            return local_ranks.run(command, log)
        # `train` starts ranks of one node only. Here all nodes' ranks are on this machine.
        return local_ranks.run_loopback(command, ranks, log)

    def saved(self) -> RunResult | None:
        """Loads the result of a finished run with the same arguments; None if there is none."""
        path = self.folder / OUTCOME_FILE
        values = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if values.pop("arguments", None) != self.arguments:
            return None
        curve = [(iteration, loss) for iteration, loss in values.pop("curve")]  # JSON has no tuples
        return RunResult(self, curve=curve, **values)


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        run: the run.
        iteration_ms: of each iteration; means where `megatron.log_interval` prints some together.
        losses: training losses, likewise.
        curve: (iteration, validation loss), the last iteration twice.
        elapsed_s: of the whole process.
        foreign_load: the share of the machine that other programs took during the run.
    """

    run: Run
    iteration_ms: list[float]
    losses: list[float]
    curve: list[tuple[int, float]]
    elapsed_s: float
    foreign_load: float

    @property
    def last(self) -> list[float]:
        """The validations after the last iteration."""
        return [loss for iteration, loss in self.curve if iteration == self.curve[-1][0]]

    @property
    def final(self) -> float:
        """The final validation loss."""
        return mean(self.last)

    @property
    def means(self) -> list[tuple[int, float]]:
        """The curve, with one mean of the validations after the last iteration."""
        return list((dict(self.curve) | {self.curve[-1][0]: self.final}).items())

    def summary(self) -> dict[str, Any]:
        """Loads the plugin's summary of the run; Megatron without the plugin writes none."""
        return load_summary(self.run.folder)

    def breakdown(self, iterations: int) -> list[dict[str, Any]]:
        """Loads what the plugin recorded of each of the last `iterations` iterations."""
        lines = (self.run.folder / BREAKDOWN_FILE).read_text("utf-8").splitlines()[-iterations:]
        return [json.loads(line) for line in lines]

    def save(self) -> None:
        """Writes the result and the run's arguments, for `Run.saved`, into the run's folder."""
        values = {name: value for name, value in vars(self).items() if name != "run"}
        self.run.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"arguments": self.run.arguments, **values}) + "\n"
        write_whole(self.run.folder / OUTCOME_FILE, text)


def read_iterations(printed: str) -> list[tuple[float, float]]:
    """Reads (milliseconds, loss) of each iteration from Megatron's output.

    Example:
        >>> line = "iteration 2/4 | elapsed time per iteration (ms): 7.5 | lm loss: 9.0E+00 |"
        >>> read_iterations(line)
        [(7.5, 9.0), (7.5, 9.0)]
    """
    found: list[tuple[float, float]] = []
    for number, ms, loss in ITERATION.findall(printed):
        # A line has the means of the iterations since the line before, up to `number`.
        found += [(float(ms), float(loss))] * (int(number) - len(found))
    return found


def read_curve(printed: str) -> list[tuple[int, float]]:
    """Reads (iteration, validation loss) of each validation from Megatron's output.

    Example:
        >>> read_curve("validation loss at iteration 5 | lm loss value: 4.5E+00 | lm loss PPL")
        [(5, 4.5)]
    """
    curve = [(int(number), float(loss)) for number, loss in VALIDATION.findall(printed)]
    # Two numbers may be equal: Megatron validates twice after the last iteration.
    assert all(first[0] <= second[0] for first, second in pairwise(curve))
    return curve


def begin(runs: Sequence[Run], header: str) -> None:
    """Checks all runs' arguments before anything runs, makes their folder and prints a header.

    Raises:
        ConfigError: an override is wrong.
    """
    for run in runs:
        total = run.config.training.iterations
        interval = run.config.megatron.get("log_interval", 1)
        # A printed line has means of `interval` iterations; they must be all timed, or all untimed.
        if not run.validates and (total % interval or run.untimed % interval):
            raise ConfigError(
                f"bench {run.bench}: Megatron would not print the timed iterations by themselves",
                expected=f"iterations that megatron.log_interval={interval} divides",
                got=f"{total}, the first {run.untimed} of them not timed",
                remedy="change --warmup or --iters, or megatron.log_interval",
            )
    runs[0].out.mkdir(parents=True, exist_ok=True)
    print(f"# {describe_cpu(1)}\n# {header}", flush=True)


def carry_out(runs: Sequence[Run]) -> list[RunResult]:
    """Trains the runs that have no saved result, prints a line for each run, returns all results.

    Raises:
        ConfigError: there is no test bed.
        MegatronSparseError: a run failed.
    """
    outcomes = []
    for number, run in enumerate(runs, 1):
        outcome, how = run.saved(), "done before"
        if outcome is None:
            outcome = run.train()
            outcome.save()
            share = f"{outcome.foreign_load:.0%} of the machine taken by others"
            how = f"{outcome.elapsed_s:.0f} s, {share}"
        outcomes.append(outcome)
        ended = f"final {outcome.final:.4f}" if run.validates else "timed"
        print(f"{number:>3}/{len(runs)} {run.name:<28} {ended} ({how})", flush=True)
    return outcomes


def draw(pictures: Sequence[Picture], folder: Path | None) -> None:
    """Writes each picture and its CSV to a folder, prints the files' names; None writes none.

    Raises:
        DependencyError: matplotlib is missing.
    """
    if folder is not None:
        for picture in pictures:
            print(*figures.write_picture(folder, *picture), sep="\n")


def picked(source: object, *names: str) -> figures.Row:
    """Some attributes, as columns of a picture's CSV."""
    return {name: getattr(source, name) for name in names}
