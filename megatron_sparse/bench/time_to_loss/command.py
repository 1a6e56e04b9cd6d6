"""`bench time-to-loss`: seconds of training until a small GPT reaches plain Megatron's losses.

Each run is one `megatron-sparse train experiment=testbed` on real text with Megatron's own
distributed optimizer, in its own process and folder, over the network test bed or loopback; runs
follow one another. A finished run with the same arguments is not repeated, so an interrupted
comparison can be continued.

Time is the sum of the iterations' times as Megatron prints them: validations and the program's
start do not count. Losses are Megatron's validation losses on held-out documents. A run reaches a
loss between the two validations that it lies between, at the place of a straight line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import mean, median

from megatron_sparse.bench.host_load import HostLoad, foreign_share
from megatron_sparse.bench.table import describe_cpu
from megatron_sparse.bench.time_to_loss.settings import CORPUS, PLAIN, VOCAB_SIZE, Race, Run
from megatron_sparse.bench.training import ITERATION
from megatron_sparse.bench.training_runs import finished_curve, save_result, saved_result
from megatron_sparse.megatron import corpus
from megatron_sparse.run import composition, local_ranks

RESULT_FILE = "time_to_loss.json"


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        setting: name of the setting.
        mbit: rate of each rank's link; None over loopback.
        arguments: of `train`, without names and folders.
        iteration_ms: of each iteration.
        curve: (iteration, validation loss), each iteration once.
        foreign_load: the share of the machine that other programs took during the run.
        wire_ratio: bytes of gradients and parameters that were sent, over those of plain Megatron's
            whole run.
    """

    setting: str
    mbit: int | None
    arguments: list[str]
    iteration_ms: list[float]
    curve: list[tuple[int, float]]
    foreign_load: float
    wire_ratio: float

    @property
    def points(self) -> list[tuple[float, float]]:
        """(seconds from the first iteration's begin, validation loss)."""
        ends_s = [ms / 1e3 for ms in accumulate(self.iteration_ms)]
        return [(ends_s[iteration - 1], loss) for iteration, loss in self.curve]

    @property
    def median_ms(self) -> float:
        """Of an iteration."""
        return median(self.iteration_ms)

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of training until the validation loss is at most this; None if it never is."""
        points = self.points
        if points[0][1] <= loss:
            return points[0][0]
        for (begin_s, above), (end_s, below) in pairwise(points):
            if below <= loss:
                return begin_s + (end_s - begin_s) * (above - loss) / (above - below)
        return None


def run(race: Race) -> list[Result]:
    """Trains the runs that have no results yet, and prints a line for each run.

    Raises:
        ConfigError: an override is wrong, or there is no test bed.
        DatasetError: the corpus cannot be made.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = list(race.runs())
    for each in runs:
        composition.compose([*race.arguments(each), *_place(race, each)])
    race.out.mkdir(parents=True, exist_ok=True)
    print(
        f"# {describe_cpu(1)}\n# {len(runs)} runs, {race.ranks} ranks, gloo, {race.iters} "
        "iterations of plain Megatron",
        flush=True,
    )
    corpus.prepare(CORPUS, race.corpus_dir, VOCAB_SIZE)
    results = []
    for number, each in enumerate(runs, 1):
        result = _find(race, each)
        how = "done before"
        if result is None:
            result = _train(race, each)
            how = f"{result.foreign_load:.0%} of the machine taken by others"
        results.append(result)
        print(
            f"{number:>3}/{len(runs)} {each.name:<20} {result.median_ms:8.1f} ms an iteration, "
            f"final {result.final:.4f} ({how})",
            flush=True,
        )
    return results


def _find(race: Race, each: Run) -> Result | None:
    values = saved_result(race.out / each.name / RESULT_FILE, race.arguments(each))
    return None if values is None else Result(**values)


def _place(race: Race, each: Run) -> list[str]:
    return [
        f"name={each.name}",
        f"runs_dir={race.out}",
        f"data={CORPUS}",
        f"data.dir={race.corpus_dir}",
    ]


def _train(race: Race, each: Run) -> Result:
    arguments, log_path = race.arguments(each), race.out / f"{each.name}.log"
    command = local_ranks.command_line(["train", *arguments, *_place(race, each)])
    load = HostLoad()
    with log_path.open("w") as log:
        if each.mbit is None:
            code = local_ranks.run(command, log)
        else:
            code = local_ranks.run_netbed(command, race.ranks, each.mbit, race.ranks, log)
    share = foreign_share(*load.spent())
    printed = log_path.read_text("utf-8", errors="replace")
    times_ms = [float(time_ms) for time_ms, _ in ITERATION.findall(printed)]
    curve = _merged(finished_curve("time-to-loss", log_path, code, len(times_ms)))
    ratio = _wire_ratio(race, each, len(times_ms))
    result = Result(each.setting.name, each.mbit, arguments, times_ms, curve, share, ratio)
    save_result(race.out / each.name / RESULT_FILE, asdict(result))
    return result


def _wire_ratio(race: Race, each: Run, iterations: int) -> float:
    if each.setting.name == PLAIN:
        return 1.0
    summary = json.loads((race.out / each.name / "summary.json").read_text("utf-8"))
    return summary["total_wire_ratio"] * iterations / race.iters


def _merged(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Megatron validates twice after the last iteration: their mean."""
    return [
        (iteration, mean(loss for number, loss in curve if number == iteration))
        for iteration in dict.fromkeys(number for number, _ in curve)
    ]
