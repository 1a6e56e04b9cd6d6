"""`bench convergence`: the final validation loss of small models, compressed beside dense.

Runs of one seed start from the same weights and see the same samples in the same order. So a
difference to dense is computed for each seed, then averaged. The spread is the difference between
the seeds' largest and smallest value of a quantity. A setting's baseline is dense, trained with the
same optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_sparse.bench.study import frame
from megatron_sparse.bench.study.frame import Picture, Run, RunResult, picked
from megatron_sparse.bench.study.options import (
    BATCH,
    CONVERGENCE,
    CORPORA,
    ConvergenceOptions,
    Setting,
    by_name,
    schedule,
)
from megatron_sparse.megatron import corpus
from megatron_sparse.run.rows import CellRow, cell, print_table
from megatron_sparse.simulate import figures
from megatron_sparse.telemetry.quantities import at_target

SETTINGS = by_name(CONVERGENCE)
VOCAB_SIZE = 1024
"""Small, for even so half of the model's weights belong to the vocabulary."""
CURVES, FINAL, BITS = "convergence-curves", "convergence-final", "convergence-bits"
"""Names of the pictures and their CSV."""
DENSITIES = ("topk01", "topk1", "topk5", "dense")
"""Settings that differ by nothing but density."""


@dataclass
class ConvergenceRow(CellRow):
    """A setting of a model; percentages, and ratios of bytes.

    `to_dense` is null for the baseline, or if the baseline has not run; spreads are null with one
    seed. The target is the target density.
    """

    op: str = cell("`convergence`")
    model: str = cell("of `CORPORA`", ">10")
    setting: str = cell("its name")
    label: str = cell("the setting in words", ">28 setting")
    seeds: int = cell("how many", ">5")
    final: float = cell("mean of the final validation losses", ">7.4f loss")
    spread: float | None = cell(
        "between the seeds' final losses, in % of their mean", ">9.2f spread(%)"
    )
    to_dense: float | None = cell(
        "mean difference to the baseline's final loss of the same seed, in %", ">+11.2f to dense(%)"
    )
    to_dense_spread: float | None = cell(
        "between the seeds' differences, in percentage points", ">9.2f spread(%)"
    )
    noise: float | None = cell(
        "how much `to_dense` differs between the two validations after the last iteration, in "
        "percentage points; the largest of the runs; null if `to_dense` is",
        ">8.2f noise(%)",
    )
    wire_ratio: float = cell("bytes sent over dense's, over the whole run", ">6.3f wire")
    wire_ratio_target: float = cell(
        "of the iterations at the target, or all", ">12.4f wire, target"
    )
    bits: float = cell("of a rank's own messages for each element, whole run", ">6.2f bits")
    bits_target: float = cell("of the iterations at the target, or all", ">12.2f bits, target")


def runs_of(options: ConvergenceOptions) -> list[Run]:
    """Lists the runs: setting by setting, each with all models and seeds; dense comes first."""
    chosen = [setting for setting in CONVERGENCE if setting.name in options.settings]
    every = product(chosen, options.models, options.seeds)
    return [_run_of(options, model, setting, seed) for setting, model, seed in every]


def _run_of(options: ConvergenceOptions, model: str, setting: Setting, seed: int) -> Run:
    """Makes the run that trains a model in a setting; the ranks share the batch."""
    lr_warmup = min(100, options.iters // 4)  # iterations; a quarter of a short run
    arguments = [
        "experiment=convergence",
        f"model={model}_tiny",
        f"data={CORPORA[model]}",
        *schedule(setting, options.iters, lr_warmup, seed),
        f"cluster.ranks_per_node={options.ranks}",
        f"training.micro_batch_size={BATCH // options.ranks}",
        *options.overrides,
    ]
    place = [f"data.dir={_corpus_dir(options, model)}", "cluster.device=cpu"]
    name = f"{model}-{setting.name}-{seed}"
    described = {"setting": setting.name, "model": model, "seed": seed}
    return Run("convergence", name, arguments, options.out, place, **described)


def _corpus_dir(options: ConvergenceOptions, model: str) -> Path:
    return options.out / "corpora" / CORPORA[model]


def run(
    options: ConvergenceOptions, folder: Path | None = None, json_path: Path | None = None
) -> list[ConvergenceRow]:
    """Carries out the study and prints its table.

    `folder`, made if missing, gets the pictures, `json_path` one JSON object a line; None: none.

    Raises:
        ConfigError: an override is wrong, or a file cannot be written.
        DatasetError: a corpus cannot be made.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = runs_of(options)
    header = f"{len(runs)} runs of {options.iters} iterations, {options.ranks} ranks, gloo"
    frame.begin(runs, header)
    for model in options.models:
        kind = CORPORA[model]
        corpus.prepare(kind, _corpus_dir(options, model), VOCAB_SIZE)  # type: ignore[arg-type]
    outcomes = frame.carry_out(runs)
    rows = print_table(rows_of(outcomes), json_path)
    frame.draw(pictures(outcomes, rows), folder)
    return rows


def rows_of(outcomes: Sequence[RunResult]) -> list[ConvergenceRow]:
    """Makes a row for each model and setting that has run, in the order of `CONVERGENCE`."""
    by_run = {(each.run.model, each.run.setting, each.run.seed): each for each in outcomes}
    rows = []
    for model, setting in product(CORPORA, CONVERGENCE):
        runs = [each for key, each in by_run.items() if key[:2] == (model, setting.name)]
        if runs:
            baselines = [by_run.get((model, setting.baseline, each.run.seed)) for each in runs]
            rows.append(_row(setting, runs, baselines))
    return rows


def _row(
    setting: Setting, runs: Sequence[RunResult], baselines: Sequence[RunResult | None]
) -> ConvergenceRow:
    """Makes the row of a setting: means over its runs of one model, one run for each seed.

    `baselines` has for each run the baseline's run with the same seed; None if it has not run.
    """
    # The baseline is not compared with itself.
    pairs = [
        (each, baseline)
        for each, baseline in zip(runs, baselines, strict=True)
        if baseline is not None and each is not baseline
    ]
    differences = [_to_dense(each.final, baseline.final) for each, baseline in pairs]
    # How much a difference changes between the two validations after the last iteration.
    noises = [_spread(list(map(_to_dense, each.last, other.last))) for each, other in pairs]
    finals, summaries = [each.final for each in runs], [each.summary() for each in runs]
    bits = [summary["bits_per_element"] for summary in summaries]
    targets = [at_target(summary) for summary in summaries]
    return ConvergenceRow(
        op="convergence",
        model=runs[0].run.model,
        setting=setting.name,
        label=setting.label,
        seeds=len(runs),
        final=mean(finals),
        spread=100 * _spread(finals) / mean(finals) if len(finals) > 1 else None,
        to_dense=mean(differences) if differences else None,
        to_dense_spread=_spread(differences) if len(differences) > 1 else None,
        noise=max(noises, default=None),
        wire_ratio=mean(summary["wire_ratio"] for summary in summaries),
        wire_ratio_target=mean(phase["wire_ratio"] for phase in targets),
        bits=mean(bits),
        bits_target=mean(phase["bits_per_element"] for phase in targets),
    )


def _to_dense(loss: float, baseline: float) -> float:
    """How far a loss is above the baseline's, in percent."""
    return 100 * (loss / baseline - 1)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def pictures(outcomes: Sequence[RunResult], rows: Sequence[ConvergenceRow]) -> list[Picture]:
    """Returns pictures: losses by iteration, final losses and, if settings have a `curve`, bits."""
    curves = []
    for each in outcomes:
        series = SETTINGS[each.run.setting].label
        of_run = {"series": series, **picked(each.run, "model", "setting", "seed")}
        curves += [of_run | {"iteration": step, "loss": loss} for step, loss in each.means]
    shown = ("setting", "label", "bits_target", "bits", "to_dense", "to_dense_spread")
    bits = []
    for row in rows:
        curve = SETTINGS[row.setting].curve
        if curve and row.to_dense is not None:
            bits.append({"series": f"{row.model}, {curve}", **picked(row, *shown)})
    finals = [row.to_dict() for row in rows]
    drawn = [(CURVES, curves, _draw_curves, 4.8), (FINAL, finals, _draw_final, 4.2)]
    return [*drawn, (BITS, bits, _draw_bits, 4.8)] if bits else drawn


def _draw_curves(rows: list[figures.Row], canvas: figures.Canvas) -> None:
    """Draws a panel for each model: a line for each setting, the mean of its seeds."""
    keys = ("model", "series", "iteration")
    means = []
    for values, seeds in figures.groups(rows, *keys).items():
        loss = mean(row["loss"] for row in seeds)
        means.append(dict(zip(keys, values, strict=True)) | {"loss": loss})
    for model, axes in figures.line_panels(canvas, means, "model", "iteration", "loss").items():
        lowest = min(row["loss"] for row in means if row["model"] == model)
        # With the first drop in the picture, the differences between settings would not be visible.
        axes.set_ylim(lowest - 0.05, lowest + 1.0)
        axes.set(title=model, xlabel="iteration", ylabel="validation loss, mean of the seeds")
    canvas.suptitle("Validation loss by setting, measured on two CPU ranks", fontsize=9)


def _draw_final(rows: list[figures.Row], canvas: figures.Canvas) -> None:
    """Draws final losses, each model in its colour; error bars span the spread of the seeds.

    Left: loss over bytes sent, of `DENSITIES`. Right: each setting's loss against dense's.
    """
    left, right = canvas.subplots(1, 2)
    order = list(SETTINGS)
    compared = [row for row in rows if row["to_dense"] is not None]
    for model, colour in zip(figures.groups(rows, "model"), figures.COLOURS, strict=False):
        style: dict[str, Any] = {"label": model, "color": colour, "marker": "o", "capsize": 3}
        named = {row["setting"]: row for row in rows if row["model"] == model}
        points = [named[name] for name in DENSITIES if name in named]
        left.errorbar(
            [row["wire_ratio_target"] for row in points],
            [row["final"] for row in points],
            # Half the spread, which is in % of the loss.
            yerr=[row["final"] * (row["spread"] or 0) / 200 for row in points],
            **style,
        )
        others = [row for row in compared if row["model"] == model]
        right.errorbar(
            [row["to_dense"] for row in others],
            [order.index(row["setting"]) for row in others],
            xerr=[(row["to_dense_spread"] or 0) / 2 for row in others],
            linestyle="",
            **style,
        )
    figures.log_axis(left, "x")
    left.set(xlabel="bytes sent at the target density, of dense's", ylabel="final validation loss")
    labels = {row["setting"]: row["label"] for row in compared}
    right.set_yticks([order.index(name) for name in labels], list(labels.values()))
    right.invert_yaxis()
    right.axvline(1, color="black", linestyle="--", linewidth=1)
    right.set(xlabel="% above dense (dashed: the target, 1 %)")
    for axes in (left, right):
        axes.grid(True, which="both", alpha=0.25, linewidth=0.5)
    figures.shared_legend(canvas, [left])
    canvas.suptitle(
        "Final validation loss, mean and spread of the seeds, measured on two CPU ranks", fontsize=9
    )


def _draw_bits(rows: list[figures.Row], canvas: figures.Canvas) -> None:
    """Draws the loss against dense's over bits: left at the target density, right the whole run."""
    styles = figures.styles_of(rows)
    panels = canvas.subplots(1, 2, sharey=True)
    spans = {"bits_target": "at the target density", "bits": "over the whole run"}
    for axes, (key, span) in zip(panels, spans.items(), strict=True):
        figures.draw_lines(axes, sorted(rows, key=lambda row: row[key]), key, "to_dense", styles)
        figures.log_axis(axes, "x")
        axes.axhline(0, color="black", linestyle="--", linewidth=1)
        axes.set(xlabel=f"bits an element, {span}", ylabel="% above dense (mean of the seeds)")
    # One text for each label, at its first row: the models' points of a setting are close together.
    for row in {row["label"]: row for row in reversed(rows)}.values():
        point = row["bits_target"], row["to_dense"]
        beside = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": 5}
        panels[0].annotate(row["label"], point, **beside)
    figures.shared_legend(canvas, panels)
    canvas.suptitle(
        "Final validation loss over bits of a rank's own messages, measured", fontsize=9
    )
