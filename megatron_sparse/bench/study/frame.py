"""The frame of benches that train whole runs: carries out runs, and keeps what each has left.

Each run is one `megatron-sparse train` in its own process and folder, over loopback or on the
network test bed; runs follow one another. Times and losses are those that Megatron itself prints,
so all runs are measured alike. The results of a study's run are in its folder. A run whose results
are there already, with the same arguments, is not repeated, so an interrupted study can be
continued.

A validation loss is Megatron's: the mean over the tokens of held-out documents. After the last
iteration Megatron validates twice, on different samples; the final loss is the mean of the two.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from megatron_sparse.bench.host_load import HostLoad, foreign_share
from megatron_sparse.bench.table import Columns, TableRow, print_table
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run import composition, local_ranks
from megatron_sparse.simulate import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

ITERATION = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+-]+)"
)
VALIDATION = re.compile(
    r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+)"
)
TAIL_LINES = 30

type Picture = tuple[str, list[figures.Row], Callable[[list[figures.Row], Canvas], None], float]
"""Its name, the rows of its CSV, what draws them, and its height in inches."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        bench: the command's name.
        name: of the run's folder and log.
        arguments: of `train`, without names and folders.
        out: where the run's folder and its log are.
        mbit: rate of the hosts' links on the test bed; None over loopback.
        place: more arguments that results do not name: the corpus, the machine.
    """

    bench: str
    name: str
    arguments: list[str]
    out: Path
    mbit: int | None = None
    place: Sequence[str] = ()

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration.

        Raises:
            ConfigError: an override is wrong.
        """
        return composition.compose(self._words)

    @property
    def _words(self) -> list[str]:
        return [f"name={self.name}", f"runs_dir={self.out}", *self.place, *self.arguments]

    @property
    def folder(self) -> Path:
        """Plain Megatron makes none."""
        return self.out / self.name

    @property
    def result_file(self) -> Path:
        """Of a finished run of a study."""
        return self.folder / f"{self.bench.replace('-', '_')}.json"

    def train(self, *, validates: bool = True) -> Outcome:
        """Trains; an earlier run of the same name moves aside.

        Args:
            validates: the run ends with a validation.

        Raises:
            ConfigError: there is no test bed.
            MegatronSparseError: the run failed; the end of its log is in the message.
        """
        log_path, load, start_s = self.out / f"{self.name}.log", HostLoad(), time.monotonic()
        with log_path.open("w") as log:
            command = local_ranks.command_line(["train", *self._words])
            cluster = self.config.cluster
            ranks = cluster.nodes * cluster.ranks_per_node
            if self.mbit is not None:
                code = local_ranks.run_netbed(command, ranks, self.mbit, cluster.nodes, log)
            elif cluster.nodes == 1:
                code = local_ranks.run(command, log)
            else:
                # `train` starts the ranks of one node only; here this machine's stand for all.
                code = local_ranks.run_loopback(command, ranks, log)
        elapsed_s, share = time.monotonic() - start_s, foreign_share(*load.spent())
        printed = log_path.read_text("utf-8", errors="replace")
        iterations, curve = ITERATION.findall(printed), read_curve(printed)
        wanted = self.config.training.iterations
        reached = curve[-1:] if validates else [(len(iterations), 0.0)]
        if code or not reached or reached[0][0] != wanted:
            ends = f"a validation after iteration {wanted}" if validates else f"{wanted} iterations"
            tail = "\n".join(printed.splitlines()[-TAIL_LINES:])
            raise MegatronSparseError(
                f"bench {self.bench}: the run {self.name} failed",
                expected=f"exit code 0 and {ends}",
                got=f"exit code {code}, {len(iterations)} iterations and {len(curve)} validations; "
                f"it ends with\n{tail}",
                remedy=f"see {log_path}",
            )
        times_ms, losses = ([float(each[i]) for each in iterations] for i in (1, 2))
        return Outcome(self.folder, times_ms, losses, curve, elapsed_s, share)


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Attributes:
        folder: of the run.
        iteration_ms: of each iteration.
        losses: of each iteration.
        curve: (iteration, validation loss), the last iteration twice.
        elapsed_s: of the whole process.
        foreign_load: the share of the machine that other programs took during the run.
    """

    folder: Path
    iteration_ms: list[float]
    losses: list[float]
    curve: list[tuple[int, float]]
    elapsed_s: float
    foreign_load: float

    def summary(self) -> dict[str, Any]:
        """The plugin's own summary; plain Megatron writes none."""
        return json.loads((self.folder / "summary.json").read_text("utf-8"))


def read_curve(printed: str) -> list[tuple[int, float]]:
    """(iteration, validation loss) of each of Megatron's validations.

    Example:
        >>> read_curve("validation loss at iteration 5 | lm loss value: 4.5E+00 | lm loss PPL")
        [(5, 4.5)]
    """
    curve = [(int(number), float(loss)) for number, loss in VALIDATION.findall(printed)]
    assert all(first[0] <= second[0] for first, second in pairwise(curve))
    return curve


@dataclass(frozen=True)
class Result:
    """The results of a study's run, as its folder keeps them.

    Attributes:
        setting: name of the setting.
        arguments: of `train`, without names and folders.
        curve: (iteration, validation loss), the last iteration twice.
    """

    setting: str
    arguments: list[str]
    curve: list[tuple[int, float]]

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
        """The curve, with the mean of those after the last iteration."""
        end = self.curve[-1][0]
        return [*((number, loss) for number, loss in self.curve if number < end), (end, self.final)]


def saved[Kept: Result](run: Run, kind: type[Kept]) -> Kept | None:
    """The result that a run with the same arguments has left; None if there is none."""
    if not run.result_file.is_file():
        return None
    values = json.loads(run.result_file.read_text("utf-8"))
    if sorted(values["arguments"]) != sorted(run.arguments):
        return None
    curve = [(iteration, loss) for iteration, loss in values["curve"]]
    return kind(**values | {"curve": curve})


def carry_out[Each: Run, Kept: Result](
    runs: Sequence[Each],
    kind: type[Kept],
    result_of: Callable[[Each, Outcome], Kept],
    header: str,
    prepare: Callable[[], object],
) -> list[Kept]:
    """Trains the runs that have no results yet, keeps theirs, and prints a line for each run.

    Args:
        runs: in their order.
        kind: of their results.
        result_of: makes a run's result.
        header: printed first.
        prepare: makes what the runs read.

    Raises:
        ConfigError: an override is wrong, there is no test bed, or the folder cannot be made.
        DatasetError: a corpus cannot be made.
        MegatronSparseError: a run failed.
    """
    make_folder(runs)
    print(header, flush=True)
    prepare()
    results = []
    for number, run in enumerate(runs, 1):
        result, how = saved(run, kind), "done before"
        if result is None:
            outcome = run.train()
            result = result_of(run, outcome)
            run.folder.mkdir(parents=True, exist_ok=True)
            run.result_file.write_text(json.dumps(asdict(result)) + "\n", "utf-8")
            share = f"{outcome.foreign_load:.0%} of the machine taken by others"
            how = f"{outcome.elapsed_s:.0f} s, {share}"
        results.append(result)
        print(
            f"{number:>3}/{len(runs)} {run.name:<28} final {result.final:.4f} ({how})", flush=True
        )
    return results


def make_folder(runs: Sequence[Run]) -> None:
    """Checks all runs' arguments, then makes the folder of the runs.

    Raises:
        ConfigError: an override is wrong, or the folder cannot be made.
    """
    for run in runs:
        assert run.config, "composed here, so that a mistake is found before anything runs"
    try:
        runs[0].out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"bench {runs[0].bench}: the folder of the runs cannot be made",
            expected="a folder that can be made and written",
            got=error,
            remedy="give another --out",
        ) from None


def report[Row: TableRow](
    columns: Columns,
    rows: Sequence[Row],
    pictures: Callable[[], Sequence[Picture]],
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Prints a study's table; on request writes its rows, and its pictures with their CSV.

    Args:
        columns: of the table.
        rows: of the table.
        pictures: makes what is drawn.
        folder: for the pictures, made if missing; None draws none.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: a file cannot be written.
        DependencyError: matplotlib is missing.
    """
    print_table(columns, rows, json_path)
    for picture in [] if folder is None else pictures():
        for path in figures.write_picture(folder, *picture):  # type: ignore[arg-type]
            print(path)


def line_panels(
    canvas: Canvas, rows: list[figures.Row], by: str, x: str, y: str, *, sharey: bool = False
) -> dict[Any, Axes]:
    """A panel of lines for each value of a column, and one legend; returns the panels."""
    styles, members = figures.styles_of(rows), figures.groups(rows, by)
    panels = canvas.subplots(1, len(members), squeeze=False, sharey=sharey)[0]
    for axes, part in zip(panels, members.values(), strict=True):
        figures.draw_lines(axes, part, x, y, styles)
    figures.shared_legend(canvas, panels)
    return dict(zip(members, panels, strict=True))
