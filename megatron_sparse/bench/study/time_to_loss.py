"""`bench time-to-loss`: seconds of training until a small GPT reaches plain Megatron's losses.

Runs train on real text with Megatron's own distributed optimizer. Time is the sum of the
iterations' times as Megatron prints them: validations and the program's start do not count. A run
reaches a loss between the two validations that it lies between, at the place of a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megatron_sparse.bench.row import CellRow, cell, ratio
from megatron_sparse.bench.study import frame
from megatron_sparse.bench.study.frame import Picture, Run, RunResult, line_panels, picked
from megatron_sparse.bench.study.options import RaceOptions
from megatron_sparse.bench.study.settings import (
    PLAIN,
    TIME_TO_LOSS,
    VALIDATIONS,
    Setting,
    by_name,
    schedule,
)
from megatron_sparse.megatron import corpus
from megatron_sparse.simulate import figures
from megatron_sparse.transport.netbed import BedLinks

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SETTINGS = by_name(TIME_TO_LOSS)
CORPUS, VOCAB_SIZE = "prose", 8192
"""Text, with a vocabulary that makes the test bed's GPT one of 10 million parameters."""
VALIDATION_ITERS = 100
"""Each setting's k-th validation sees the same samples. With fewer iterations of each, samples
matter more than half a percent of the loss."""
LR_WARMUP_SHARE = 0.1
PICTURE, BYTES = "time-to-loss", "loss-over-bytes"
"""Names of the pictures and their CSV."""
HEIGHT_IN = 4.2
EARLY_SHARE = 0.8
"""The first target: plain Megatron's loss after this share of its run."""
FINAL_MARGIN = 1.005
"""The second target: plain Megatron's final loss, and half a percent."""


@dataclass
class TimeToLossRow(CellRow):
    """One run; times are of training, without validations.

    Plain Megatron's `to_plain` is null, and so are seconds to a loss that was never reached.
    """

    op: str = cell("`time_to_loss`")
    setting: str = cell("its name")
    label: str = cell("the setting in words", ">34 setting")
    mbit: int | None = cell("rate of the test bed's slow links; null over loopback", ">6")
    delay_ms: int = cell("their round trip")
    sites: int = cell("1, or 2 that one slow link joins")
    iterations: int = cell("how many the run had", ">5 iters")
    iteration_ms: float = cell("median", ">13.1f iteration(ms)")
    wire_ratio: float = cell(
        "bytes of gradients and parameters of the whole run, over plain Megatron's", ">6.3f wire"
    )
    final: float = cell("validation loss", ">7.4f loss")
    to_plain: float | None = cell(
        "the final loss over plain Megatron's, in %", ">+11.2f to plain(%)"
    )
    early_s: float | None = cell(
        "seconds to plain Megatron's loss at 80 % of its run", ">11.1f 80 % loss(s)"
    )
    early_speedup: float | None = cell("plain Megatron's `early_s` over it", ">8.2f speedup")
    final_s: float | None = cell(
        "seconds to plain Megatron's final loss + 0.5 %", ">10.1f +0.5 %(s)"
    )
    final_speedup: float | None = cell("plain Megatron's `final_s` over it", ">8.2f speedup")
    foreign_load: float = cell("the share of the machine that other programs took meanwhile")
    noisy: bool = cell("whether `foreign_load` was too high to trust the times")


def points(outcome: RunResult) -> list[tuple[float, float]]:
    """(seconds from the first iteration's begin, validation loss)."""
    ends_s = [ms / 1e3 for ms in accumulate(outcome.iteration_ms)]
    return [(ends_s[iteration - 1], loss) for iteration, loss in outcome.means]


def seconds_to(outcome: RunResult, loss: float) -> float | None:
    """Seconds of training until the validation loss is at most this; None if it never is."""
    first, *_ = reached = points(outcome)
    if first[1] <= loss:
        return first[0]
    for (begin_s, above), (end_s, below) in pairwise(reached):
        if below <= loss:
            return begin_s + (end_s - begin_s) * (above - loss) / (above - below)
    return None


def runs_of(options: RaceOptions) -> list[Run]:
    """Rate after rate; plain Megatron first."""
    rates = [BedLinks(mbit, options.delay_ms, options.sites) for mbit in options.mbits or ()]
    places = rates if options.netbed else [None]
    chosen = [setting for setting in TIME_TO_LOSS if setting.name in options.settings]
    return [_run_of(options, setting, links) for links in places for setting in chosen]


def _run_of(options: RaceOptions, setting: Setting, links: BedLinks | None) -> Run:
    nodes = 1 if links is None else options.ranks
    iterations = round(options.iters * setting.stretch / VALIDATIONS) * VALIDATIONS
    arguments = [
        "experiment=testbed",
        f"cluster.nodes={nodes}",
        f"cluster.ranks_per_node={options.ranks // nodes}",
        "cluster.device=cpu",
        f"training.micro_batch_size={options.batch}",
        f"training.global_batch_size={options.batch * options.ranks}",
        "training.use_distributed_optimizer=true",
        f"training.eval_iters={VALIDATION_ITERS}",
        *schedule(setting, iterations, round(iterations * LR_WARMUP_SHARE), options.seed),
        *options.overrides,
    ]
    # 100 or 100_30_2
    where = "loopback" if links is None else "_".join(map(str, links)).removesuffix("_0_1")
    name = f"{setting.name}-{where}"
    place = [f"data={CORPUS}", f"data.dir={options.out / 'corpus'}"]
    return Run("time-to-loss", name, arguments, options.out, place, links, setting.name)


def run(
    options: RaceOptions, folder: Path | None = None, json_path: Path | None = None
) -> list[TimeToLossRow]:
    """Carries out the runs that have not finished, and prints the table.

    Args:
        options: the runs.
        folder: for the pictures, made if missing; None draws none.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: an override is wrong, there is no test bed, or a file cannot be written.
        DatasetError: the corpus cannot be made.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = runs_of(options)
    size = f"{len(runs)} runs, {options.ranks} ranks, gloo, {options.iters} iterations of Megatron"
    frame.begin(runs, size)
    corpus.prepare(CORPUS, options.out / "corpus", VOCAB_SIZE)
    outcomes = frame.carry_out(runs)
    rows = rows_of(outcomes, options.iters)
    return frame.report(rows, json_path, lambda rows: pictures(outcomes, rows), folder)


def rows_of(outcomes: Sequence[RunResult], plain_iters: int) -> list[TimeToLossRow]:
    """One row for each run, in their order; each rate's plain Megatron is among them."""
    plains = {each.run.links: each for each in outcomes if each.run.setting == PLAIN}
    return [_row(each, plains[each.run.links], plain_iters) for each in outcomes]


def _row(each: RunResult, plain: RunResult, plain_iters: int) -> TimeToLossRow:
    early_loss = plain.means[round(EARLY_SHARE * VALIDATIONS) - 1][1]
    targets = early_loss, FINAL_MARGIN * plain.final
    early_s, final_s = (seconds_to(each, loss) for loss in targets)
    plain_early_s, plain_final_s = (seconds_to(plain, loss) for loss in targets)
    iterations = len(each.iteration_ms)
    is_plain = each.run.setting == PLAIN
    sent = 1.0 if is_plain else each.summary()["total_wire_ratio"] * iterations / plain_iters
    return TimeToLossRow(
        op="time_to_loss",
        setting=each.run.setting,
        label=SETTINGS[each.run.setting].label,
        **each.run.where,
        iterations=iterations,
        iteration_ms=median(each.iteration_ms),
        wire_ratio=sent,
        final=each.final,
        to_plain=None if is_plain else 100 * (each.final / plain.final - 1),
        early_s=early_s,
        early_speedup=ratio(plain_early_s, early_s),
        final_s=final_s,
        final_speedup=ratio(plain_final_s, final_s),
        **each.noise,
    )


def pictures(outcomes: Sequence[RunResult], rows: Sequence[TimeToLossRow]) -> list[Picture]:
    """Loss over seconds, and loss over bytes."""
    curves = [
        {"series": SETTINGS[each.run.setting].label, "mbit": each.run.where["mbit"]}
        | {"seconds": seconds, "loss": loss}
        for each in outcomes
        for seconds, loss in points(each)
    ]
    bytes_sent = [
        {"series": row.label, **picked(row, "mbit", "wire_ratio"), "to_plain": row.to_plain or 0.0}
        for row in rows
    ]
    drawn = [(PICTURE, curves, _draw_curves), (BYTES, bytes_sent, _draw_bytes)]
    return [(*picture, HEIGHT_IN) for picture in drawn]


def _draw_curves(rows: list[figures.Row], canvas: Canvas) -> None:
    for mbit, axes in line_panels(canvas, rows, "mbit", "seconds", "loss").items():
        figures.log_axis(axes, "x")
        axes.set(title=_where(mbit), xlabel="seconds of training", ylabel="validation loss")


def _draw_bytes(rows: list[figures.Row], canvas: Canvas) -> None:
    panels = line_panels(canvas, rows, "mbit", "wire_ratio", "to_plain", sharey=True)
    for mbit, axes in panels.items():
        figures.log_axis(axes, "x")
        axes.axhline(0, color="black", linestyle="--", linewidth=1)
        axes.set(title=_where(mbit), xlabel="bytes of the whole run, over Megatron's")
    next(iter(panels.values())).set_ylabel("final validation loss, % above Megatron's")


def _where(mbit: int | None) -> str:
    return "loopback" if mbit is None else f"{mbit} Mbit/s"
