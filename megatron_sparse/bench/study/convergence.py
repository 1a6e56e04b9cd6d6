"""`bench convergence`: the final validation loss of small models, compressed beside dense.

Runs of one seed start from the same weights and see the same samples in the same order. So a
difference to dense is computed for each seed, then averaged. The spread is the difference between
the seeds' largest and smallest value of a quantity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from megatron_sparse.bench.study import frame
from megatron_sparse.bench.study.frame import Outcome, Picture, Run, line_panels
from megatron_sparse.bench.study.options import BATCH, RANKS, ConvergenceOptions
from megatron_sparse.bench.study.settings import CONVERGENCE, CORPORA, Setting, by_name, schedule
from megatron_sparse.bench.table import Columns, TableRow, describe_cpu
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import corpus
from megatron_sparse.simulate import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SETTINGS = by_name(CONVERGENCE)
VOCAB_SIZE = 1024
"""Small, for even so half of the model's weights belong to the vocabulary."""
CURVES, FINAL, BITS = "convergence-curves", "convergence-final", "convergence-bits"
"""Names of the pictures and their CSV."""
DENSITIES = ("topk01", "topk1", "topk5", "dense")
"""Settings that differ by nothing but density."""


@dataclass(frozen=True)
class TrainingRun(Run):
    """One training run of the study.

    Attributes:
        model: of `CORPORA`.
        setting: of `CONVERGENCE`.
        seed: of weights, the order of samples and the sample positions of thresholds.
    """

    model: str = ""
    setting: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Result(frame.Result):
    """The results of a run.

    Attributes:
        model: of `CORPORA`.
        seed: its seed.
        wire_ratio: bytes sent over a dense ring's, over the whole run; 1 without compression.
        wire_ratio_target: the same over the iterations at the target density.
        elapsed_s: of the whole process.
        bits: of a rank's own messages for each element, over the whole run.
        bits_target: the same over the iterations at the target density.
    """

    model: str
    seed: int
    wire_ratio: float
    wire_ratio_target: float
    elapsed_s: float
    bits: float
    bits_target: float


def runs_of(options: ConvergenceOptions) -> list[TrainingRun]:
    """The most important first; runs that are compared with one another follow one another."""
    chosen = [setting for setting in CONVERGENCE if setting.name in options.settings]
    return [
        _run_of(options, model, setting, seed)
        for tier in sorted({setting.tier for setting in chosen})
        for model in options.models
        for seed in options.seeds
        for setting in chosen
        if setting.tier == tier
    ]


def _run_of(options: ConvergenceOptions, model: str, setting: Setting, seed: int) -> TrainingRun:
    ranks = [f"cluster.ranks_per_node={options.ranks}"]
    share = f"training.micro_batch_size={BATCH // options.ranks}"
    usual = options.ranks == RANKS  # results of the usual number of ranks do not name it
    arguments = [
        "experiment=convergence",
        f"model={model}_tiny",
        f"data={CORPORA[model]}",
        *schedule(setting, options.iters, min(100, options.iters // 4), seed),
        *([] if usual else [*ranks, share]),
        *options.overrides,
    ]
    place = [f"data.dir={_corpus_dir(options, model)}", "cluster.device=cpu"]
    return TrainingRun(
        "convergence",
        f"{model}-{setting.name}-{seed}",
        arguments,
        options.out,
        place=[*place, *(ranks if usual else [])],
        model=model,
        setting=setting.name,
        seed=seed,
    )


def _corpus_dir(options: ConvergenceOptions, model: str) -> Path:
    return options.out / "corpora" / CORPORA[model]


def run(options: ConvergenceOptions) -> list[Result]:
    """Trains the runs that have no results yet; see `frame.carry_out`."""

    def prepare() -> None:
        for model in options.models:
            kind = CORPORA[model]
            corpus.prepare(kind, _corpus_dir(options, model), VOCAB_SIZE)  # type: ignore[arg-type]

    runs = runs_of(options)
    size = f"{len(runs)} runs of {options.iters} iterations, {options.ranks} ranks, gloo"
    return frame.carry_out(runs, Result, _result, f"# {describe_cpu(1)}\n# {size}", prepare)


def found(options: ConvergenceOptions) -> list[Result]:
    """The results of all finished runs of the study.

    Raises:
        ConfigError: no run has finished.
    """
    runs = runs_of(options)
    results = [result for each in runs if (result := frame.saved(each, Result))]
    if not results:
        raise ConfigError(
            "bench convergence: there is nothing to report",
            expected=f"{runs[0].result_file.name} of a finished run with these arguments in "
            f"{options.out}",
            got="none",
            remedy="leave out --report, or give the --out and --iters of the study",
        )
    return results


def _result(run: TrainingRun, outcome: Outcome) -> Result:
    summary = outcome.summary()
    at_target = summary["phases"].get("target", {"wire_ratio": 1.0})
    bits = summary["bits_per_element"]
    return Result(
        model=run.model,
        setting=run.setting,
        seed=run.seed,
        arguments=run.arguments,
        curve=outcome.curve,
        wire_ratio=summary["wire_ratio"],
        wire_ratio_target=at_target["wire_ratio"],
        elapsed_s=outcome.elapsed_s,
        bits=bits,
        bits_target=at_target.get("bits_per_element", bits),
    )


@dataclass
class Row(TableRow):
    """A setting of a model; percentages, and ratios of bytes.

    Attributes:
        op: `convergence`.
        model: of `CORPORA`.
        setting: its name.
        label: the setting in words.
        seeds: how many.
        final: mean of the final validation losses.
        spread: between the seeds' final losses, in % of their mean; null with one seed.
        to_dense: mean difference to the baseline's final loss of the same seed, in %; null for the
            baseline, or if the baseline has not run.
        to_dense_spread: between the seeds' differences, in percentage points; null with one seed.
        noise: how much `to_dense` differs between the two validations after the last iteration, in
            percentage points; the largest of the runs; null if `to_dense` is.
        wire_ratio: bytes sent over dense's, over the whole run.
        wire_ratio_target: the same over the iterations at the target density.
        bits: of a rank's own messages for each element, over the whole run.
        bits_target: the same over the iterations at the target density.
    """

    COLUMNS = Columns(
        "model >10 | label >28 setting | seeds >5 | final >7.4f loss | spread >9.2f spread(%) | "
        "to_dense >+11.2f to dense(%) | to_dense_spread >9.2f spread(%) | noise >8.2f noise(%) | "
        "wire_ratio >6.3f wire | wire_ratio_target >12.4f wire, target | "
        "bits >6.2f bits | bits_target >12.2f bits, target"
    )

    op: str
    model: str
    setting: str
    label: str
    seeds: int
    final: float
    spread: float | None
    to_dense: float | None
    to_dense_spread: float | None
    noise: float | None
    wire_ratio: float
    wire_ratio_target: float
    bits: float
    bits_target: float


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each model and setting, in the order of `CONVERGENCE`."""
    by_run = {(each.model, each.setting, each.seed): each for each in results}
    rows = []
    for model in CORPORA:
        for setting in CONVERGENCE:
            runs = [each for key, each in by_run.items() if key[:2] == (model, setting.name)]
            if runs:
                denses = [by_run.get((model, setting.baseline, each.seed)) for each in runs]
                rows.append(_row(setting, runs, denses))
    return rows


def _row(setting: Setting, runs: Sequence[Result], denses: Sequence[Result | None]) -> Row:
    pairs = [(a, b) for a, b in zip(runs, denses, strict=True) if b is not None and a is not b]
    against = [_to_dense(each.final, dense.final) for each, dense in pairs]
    noises = [_spread(list(map(_to_dense, each.last, dense.last))) for each, dense in pairs]
    finals = [each.final for each in runs]
    return Row(
        op="convergence",
        model=runs[0].model,
        setting=setting.name,
        label=setting.label,
        seeds=len(runs),
        final=mean(finals),
        spread=100 * _spread(finals) / mean(finals) if len(finals) > 1 else None,
        to_dense=mean(against) if against else None,
        to_dense_spread=_spread(against) if len(against) > 1 else None,
        noise=max(noises, default=None),
        wire_ratio=mean(each.wire_ratio for each in runs),
        wire_ratio_target=mean(each.wire_ratio_target for each in runs),
        bits=mean(each.bits for each in runs),
        bits_target=mean(each.bits_target for each in runs),
    )


def _to_dense(loss: float, dense: float) -> float:
    return 100 * (loss / dense - 1)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def report(results: Sequence[Result], folder: Path | None, json_path: Path | None) -> None:
    """See `frame.report`."""
    rows = rows_of(results)
    frame.report(Row.COLUMNS, rows, lambda: pictures(results, rows), folder, json_path)


def pictures(results: Sequence[Result], rows: Sequence[Row]) -> list[Picture]:
    """Curves, final losses and, where runs have a curve of it, loss over bits."""
    curves = [
        {
            "series": SETTINGS[each.setting].label,
            "model": each.model,
            "setting": each.setting,
            "seed": each.seed,
            "iteration": iteration,
            "loss": loss,
        }
        for each in results
        for iteration, loss in each.means
    ]
    bits = [
        {
            "series": f"{row.model}, {curve}",
            "setting": row.setting,
            "label": row.label,
            "bits_target": row.bits_target,
            "bits": row.bits,
            "to_dense": row.to_dense,
            "to_dense_spread": row.to_dense_spread,
        }
        for row in rows
        if (curve := SETTINGS[row.setting].curve) and row.to_dense is not None
    ]
    finals = [row.to_dict() for row in rows]
    drawn = [(CURVES, curves, _draw_curves, 4.8), (FINAL, finals, _draw_final, 4.2)]
    return [*drawn, (BITS, bits, _draw_bits, 4.8)] if bits else drawn


def _draw_curves(rows: list[figures.Row], canvas: Canvas) -> None:
    keys = ("model", "series", "iteration")
    means = [
        dict(zip(keys, at, strict=True)) | {"loss": mean(row["loss"] for row in seeds)}
        for at, seeds in figures.groups(rows, *keys).items()
    ]
    for model, axes in line_panels(canvas, means, "model", "iteration", "loss").items():
        lowest = min(row["loss"] for row in means if row["model"] == model)
        # With the first drop in the picture, the differences between settings would not be visible.
        axes.set_ylim(lowest - 0.05, lowest + 1.0)
        axes.set(title=model, xlabel="iteration", ylabel="validation loss, mean of the seeds")
    canvas.suptitle("Validation loss by setting, measured on two CPU ranks", fontsize=9)


def _draw_final(rows: list[figures.Row], canvas: Canvas) -> None:
    left, right = canvas.subplots(1, 2)
    order = list(SETTINGS)
    for (model, members), colour in zip(
        figures.groups(rows, "model").items(), figures.COLOURS, strict=False
    ):
        style: dict[str, Any] = {"label": model, "color": colour, "marker": "o", "capsize": 3}
        named = {row["setting"]: row for row in members}
        points = [named[name] for name in DENSITIES if name in named]
        left.errorbar(
            [row["wire_ratio_target"] for row in points],
            [row["final"] for row in points],
            yerr=[row["final"] * (row["spread"] or 0) / 200 for row in points],
            **style,
        )
        others = [row for row in members if row["to_dense"] is not None]
        right.errorbar(
            [row["to_dense"] for row in others],
            [order.index(row["setting"]) for row in others],
            xerr=[(row["to_dense_spread"] or 0) / 2 for row in others],
            linestyle="",
            **style,
        )
    figures.log_axis(left, "x")
    left.set(xlabel="bytes sent at the target density, of dense's", ylabel="final validation loss")
    labels = {row["setting"]: row["label"] for row in rows if row["to_dense"] is not None}
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


def _draw_bits(rows: list[figures.Row], canvas: Canvas) -> None:
    styles = figures.styles_of(rows)
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, key, of in (
        (panels[0], "bits_target", "at the target density"),
        (panels[1], "bits", "over the whole run"),
    ):
        ordered = sorted(rows, key=lambda row: row[key])
        figures.draw_lines(axes, ordered, key, "to_dense", styles)
        figures.log_axis(axes, "x")
        axes.axhline(0, color="black", linestyle="--", linewidth=1)
        axes.set(xlabel=f"bits an element, {of}", ylabel="% above dense (mean of the seeds)")
    # Once each: the models' points of a setting lie close together.
    for row in {row["label"]: row for row in reversed(rows)}.values():
        panels[0].annotate(
            row["label"],
            (row["bits_target"], row["to_dense"]),
            textcoords="offset points",
            xytext=(3, 3),
            fontsize=5,
        )
    figures.shared_legend(canvas, panels)
    canvas.suptitle(
        "Final validation loss over bits of a rank's own messages, measured", fontsize=9
    )
