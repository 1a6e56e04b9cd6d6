"""`bench time-to-loss`: seconds of training until a small GPT reaches plain Megatron's final loss.

Runs train in bf16 on real text with Megatron's own distributed optimizer. Time is the sum of the
iterations' times as Megatron prints them: validations and the program's start do not count. The
time at which a run reaches a loss is interpolated between two validations, on a straight line.

Some settings are Megatron without the plugin; `plain` is one of them. Links do not change their
losses, and each iteration sends the same bytes. So they train over loopback, once for all rates of
the test bed, and on the test bed a few of their iterations are timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_sparse.bench.study import frame
from megatron_sparse.bench.study.frame import Picture, Run, RunResult, picked
from megatron_sparse.bench.study.options import (
    PLAIN,
    TIME_TO_LOSS,
    VALIDATIONS,
    RaceOptions,
    Setting,
    by_name,
    schedule,
)
from megatron_sparse.megatron import corpus
from megatron_sparse.run.rows import CellRow, cell, print_table
from megatron_sparse.simulate import figures
from megatron_sparse.telemetry.quantities import ratio
from megatron_sparse.transport.netbed import BedLinks

SETTINGS = by_name(TIME_TO_LOSS)
CORPUS, VOCAB_SIZE = "prose", 8192
"""Text, with a vocabulary that makes the test bed's GPT one of 10 million parameters."""
VALIDATION_ITERS = 50
"""Each setting's k-th validation sees the same samples."""
LR_WARMUP_SHARE, MIN_LR = 0.1, 1e-4
PLAIN_WARMUP, PLAIN_TIMED = 2, 8
"""Iterations of plain Megatron on the test bed: those that are not timed, and those that are."""
PICTURE, BYTES = "time-to-loss", "loss-over-bytes"
"""Names of the pictures and their CSV."""
HEIGHT_IN = 4.2
MARGIN = 1.005
"""A run has to reach plain Megatron's final loss, and half a percent."""


@dataclass
class TimeToLossRow(CellRow):
    """One run; times are of training, without validations.

    Plain Megatron's `to_plain` is null, and so is what belongs to a loss that was never reached.
    """

    op: str = cell("`time_to_loss`")
    setting: str = cell("its name")
    label: str = cell("the setting in words", ">27 setting")
    seed: int = cell("of weights and samples", ">4")
    mbit: int | None = cell("rate of the test bed's slow links; null over loopback", ">6")
    delay_ms: int = cell("their round trip")
    sites: int = cell("1, or 2 that one slow link joins")
    iterations: int = cell("how many the run had", ">5 iters")
    iteration_ms: float = cell("median", ">13.1f iteration(ms)")
    wire_ratio: float = cell(
        "bytes of gradients and parameters of the whole run, over plain Megatron's", ">6.3f wire"
    )
    bits: float = cell(
        "that a step of the last tenth sends for an element, gradients and parameters, over those "
        "of rings that send 1 bit",
        ">5.2f bits",
    )
    final: float = cell("validation loss", ">7.4f loss")
    to_plain: float | None = cell(
        "the final loss over plain Megatron's, in %", ">+11.2f to plain(%)"
    )
    final_s: float | None = cell(
        "seconds to plain Megatron's final loss + 0.5 %", ">10.1f +0.5 %(s)"
    )
    speedup: float | None = cell("plain Megatron's `final_s` over it", ">8.2f speedup")
    over_best: float | None = cell(
        "the shortest `final_s` of Megatron without the plugin over it", ">10.2f over best"
    )
    foreign_load: float = cell("the share of the machine that other programs took meanwhile")


def points(outcome: RunResult) -> list[tuple[float, float]]:
    """Returns (seconds of training, validation loss) at each validation."""
    ends_s = [ms / 1e3 for ms in accumulate(outcome.iteration_ms)]
    return [(ends_s[iteration - 1], loss) for iteration, loss in outcome.means]


def seconds_to(outcome: RunResult, loss: float) -> float | None:
    """Seconds of training until the validation loss is at most `loss`; None if it never is.

    Between two validations the loss is taken to fall on a straight line.
    """
    curve = points(outcome)
    first_s, first_loss = curve[0]
    if first_loss <= loss:
        return first_s
    for (begin_s, above), (end_s, below) in pairwise(curve):
        if below <= loss:
            return begin_s + (end_s - begin_s) * (above - loss) / (above - below)
    return None


def runs_of(options: RaceOptions) -> list[Run]:
    """Lists the runs: first the settings without the plugin, over loopback, with each seed.

    Then, for each rate of the test bed, a short run of each of these settings, only to time it, and
    the plugin's settings with each seed. Without the test bed the latter run over loopback.
    """
    chosen = [setting for setting in TIME_TO_LOSS if setting.name in options.settings]
    plain = [setting for setting in chosen if setting.plain_bits]  # without the plugin
    sparse = [setting for setting in chosen if not setting.plain_bits]
    runs = [_run_of(options, setting, seed, None) for setting in plain for seed in options.seeds]
    rates = [BedLinks(mbit, options.delay_ms, options.sites) for mbit in options.mbits or ()]
    for links in rates if options.netbed else [None]:  # None: over loopback
        if links is not None:
            runs += [_timed(options, setting, links) for setting in plain]
        runs += [_run_of(options, each, seed, links) for seed in options.seeds for each in sparse]
    return runs


def _run_of(options: RaceOptions, setting: Setting, seed: int, links: BedLinks | None) -> Run:
    iterations = round(options.iters * setting.stretch / VALIDATIONS) * VALIDATIONS
    extra = schedule(setting, iterations, round(iterations * LR_WARMUP_SHARE), seed)
    return _make_run(options, setting, f"{seed}", links, extra, seed=seed)


def _timed(options: RaceOptions, setting: Setting, links: BedLinks) -> Run:
    iterations = f"training.iterations={PLAIN_WARMUP + PLAIN_TIMED}"
    extra = [iterations, "training.lr_warmup_iters=0", *setting.overrides]
    return _make_run(options, setting, "timed", links, extra, validates=False, untimed=PLAIN_WARMUP)


def _make_run(
    options: RaceOptions,
    setting: Setting,
    name_end: str,
    links: BedLinks | None,
    extra: Sequence[str],
    **more: Any,
) -> Run:
    """Makes a run of a setting: on `links` with a host for each rank, or (None) over loopback.

    `name_end` ends the run's name, `extra` are the arguments of `train` that not all runs share,
    and `more` are other attributes of `Run`.
    """
    nodes = 1 if links is None else options.ranks
    arguments = [
        "experiment=testbed",
        f"cluster.nodes={nodes}",
        f"cluster.ranks_per_node={options.ranks // nodes}",
        "cluster.device=cpu",
        f"training.micro_batch_size={options.batch}",
        f"training.global_batch_size={options.batch * options.ranks}",
        "training.precision=bf16",
        "training.use_distributed_optimizer=true",
        f"training.min_lr={MIN_LR}",
        f"training.eval_iters={VALIDATION_ITERS}",
        *extra,
        *options.overrides,
    ]
    # Rate, delay and sites, such as 100_30_2; 100 if there is neither delay nor a second site.
    where = "loopback" if links is None else "_".join(map(str, links)).removesuffix("_0_1")
    name = f"{setting.name}-{where}-{name_end}"
    place = [f"data={CORPUS}", f"data.dir={options.out / 'corpus'}"]
    return Run("time-to-loss", name, arguments, options.out, place, links, setting.name, **more)


def run(
    options: RaceOptions, folder: Path | None = None, json_path: Path | None = None
) -> list[TimeToLossRow]:
    """Carries out the runs that have not finished, and prints the table.

    `folder`, made if missing, gets the pictures, `json_path` one JSON object a line; None: none.

    Raises:
        ConfigError: an override is wrong, there is no test bed, or a file cannot be written.
        DatasetError: the corpus cannot be made.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = runs_of(options)
    place = f"{options.ranks} ranks, gloo"
    frame.begin(runs, f"{len(runs)} runs, {place}, {options.iters} iterations of Megatron")
    corpus.prepare(CORPUS, options.out / "corpus", VOCAB_SIZE)
    complete = at_all_rates(frame.carry_out(runs))
    rows = print_table(rows_of(complete), json_path)
    frame.draw(pictures(complete, rows), folder)
    return rows


def at_all_rates(outcomes: Sequence[RunResult]) -> list[RunResult]:
    """Returns a whole run for each setting, seed and rate of the test bed.

    Runs without the plugin were trained over loopback, and their settings timed at each rate: from
    these two results `_at_rate` makes the run at a rate.
    """
    timed = [each for each in outcomes if not each.run.validates]
    whole = [each for each in outcomes if each.run.validates]
    if not timed:  # there is no test bed: all runs were over loopback
        return whole
    found = [each for each in whole if each.run.links is not None]
    over_loopback = [each for each in whole if each.run.links is None]
    for times in timed:
        same_setting = [each for each in over_loopback if each.run.setting == times.run.setting]
        found += [_at_rate(each, times) for each in same_setting]
    order = list(SETTINGS)
    # By rate, then setting, then seed.
    return sorted(
        found, key=lambda each: (each.run.links, order.index(each.run.setting), each.run.seed)
    )


def _at_rate(whole: RunResult, timed: RunResult) -> RunResult:
    """Makes a result with the losses of a run over loopback and the times of a run on links."""
    times_ms = [median(timed.iteration_ms[PLAIN_WARMUP:])] * len(whole.iteration_ms)
    run = replace(whole.run, links=timed.run.links)
    return replace(whole, run=run, iteration_ms=times_ms, foreign_load=timed.foreign_load)


def rows_of(outcomes: Sequence[RunResult]) -> list[TimeToLossRow]:
    """Makes a row for each run. Runs of the same links and seed (`_race`) are compared."""
    plains = {_race(each): each for each in outcomes if each.run.setting == PLAIN}
    rows = []
    for each in outcomes:
        race = _race(each)
        target_loss = MARGIN * plains[race].final
        # The race's runs without the plugin. Plain reaches its own target, so `min` finds a time.
        rivals = [other for other in outcomes if _race(other) == race and _bits_of_plain(other)]
        reached_s = [seconds_to(rival, target_loss) for rival in rivals]
        best_s = min(seconds for seconds in reached_s if seconds is not None)
        rows.append(_row(each, plains[race], seconds_to(each, target_loss), best_s))
    return rows


def _race(each: RunResult) -> tuple[BedLinks | None, int]:
    """The links and the seed, which runs that are compared share."""
    return each.run.links, each.run.seed


def _bits_of_plain(each: RunResult) -> int | None:
    """The bits that Megatron without the plugin sends for an element; None with the plugin."""
    return SETTINGS[each.run.setting].plain_bits


def _row(each: RunResult, plain: RunResult, final_s: float | None, best_s: float) -> TimeToLossRow:
    """Makes the row of a run; `plain` is plain Megatron's run on the same links, of the same seed.

    `final_s` are the seconds in which the run reached the target loss, None if it never did;
    `best_s` is the shortest such time of Megatron without the plugin.
    """
    iterations, is_plain = len(each.iteration_ms), each.run.setting == PLAIN
    plain_bits, own_bits = _bits_of_plain(plain), _bits_of_plain(each)
    assert plain_bits is not None
    iterations_ratio = iterations / len(plain.iteration_ms)
    # `bytes_ratio`: an iteration's bytes over those of plain Megatron's.
    if own_bits is not None:  # without the plugin: all iterations send the same bytes
        bytes_ratio, bits = own_bits / plain_bits, float(own_bits)
    else:
        bytes_ratio = each.summary()["total_wire_ratio"]
        last = each.breakdown(iterations // VALIDATIONS)  # the last tenth of the iterations
        bits = plain_bits * _both(last, "wire_bytes") / _both(last, "dense_bytes")
    return TimeToLossRow(
        op="time_to_loss",
        setting=each.run.setting,
        label=SETTINGS[each.run.setting].label,
        seed=each.run.seed,
        **each.run.where,
        iterations=iterations,
        iteration_ms=median(each.iteration_ms),
        wire_ratio=bytes_ratio * iterations_ratio,
        bits=bits,
        final=each.final,
        to_plain=None if is_plain else 100 * (each.final / plain.final - 1),
        final_s=final_s,
        speedup=ratio(seconds_to(plain, MARGIN * plain.final), final_s),
        over_best=ratio(best_s, final_s),
        foreign_load=each.foreign_load,
    )


def _both(iterations: Sequence[dict[str, Any]], name: str) -> int:
    """The sum of a figure over the iterations, of gradients and parameters together."""
    return sum(each[name] + each[f"param_{name}"] for each in iterations)


def pictures(outcomes: Sequence[RunResult], rows: Sequence[TimeToLossRow]) -> list[Picture]:
    """Returns pictures: losses over seconds (of the first seed), final losses over bytes (all)."""
    first_seed = min(each.run.seed for each in outcomes)
    of_first_seed = [each for each in outcomes if each.run.seed == first_seed]
    curves = []
    for each in of_first_seed:
        of_run = {"series": SETTINGS[each.run.setting].label, "mbit": each.run.where["mbit"]}
        curves += [of_run | {"seconds": seconds, "loss": loss} for seconds, loss in points(each)]
    finals = [  # `to_plain` of plain itself is null
        {"series": row.label, **picked(row, "mbit", "wire_ratio"), "to_plain": row.to_plain or 0.0}
        for row in rows
    ]
    drawn = [(PICTURE, curves, _draw_curves), (BYTES, finals, _draw_bytes)]
    return [(*picture, HEIGHT_IN) for picture in drawn]


def _draw_curves(rows: list[figures.Row], canvas: figures.Canvas) -> None:
    for mbit, axes in figures.line_panels(canvas, rows, "mbit", "seconds", "loss").items():
        figures.log_axis(axes, "x")
        axes.set(title=_where(mbit), xlabel="seconds of training", ylabel="validation loss")


def _draw_bytes(rows: list[figures.Row], canvas: figures.Canvas) -> None:
    """Draws a panel for each rate: over a run's bytes, how far its loss is above plain's."""
    panels = figures.line_panels(canvas, rows, "mbit", "wire_ratio", "to_plain", sharey=True)
    for mbit, axes in panels.items():
        figures.log_axis(axes, "x")
        axes.axhline(0, color="black", linestyle="--", linewidth=1)  # plain Megatron's loss
        axes.set(title=_where(mbit), xlabel="bytes of the whole run, over Megatron's")
    next(iter(panels.values())).set_ylabel("final validation loss, % above Megatron's")


def _where(mbit: int | None) -> str:
    return "loopback" if mbit is None else f"{mbit} Mbit/s"
