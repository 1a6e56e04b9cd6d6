"""The table, the JSON lines and the pictures of `bench convergence`.

Means are over the seeds. A difference to dense is computed for each seed, then averaged, because
runs of one seed start from the same weights and see the same samples. The spread is the difference
between the seeds' largest and smallest value of a quantity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from megatron_sparse.bench.convergence.command import Result, label_of
from megatron_sparse.bench.convergence.settings import BY_NAME, CORPORA, SETTINGS
from megatron_sparse.bench.table import Columns, TableRow, print_table
from megatron_sparse.simulate import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

CURVES, FINAL, BITS = "convergence-curves", "convergence-final", "convergence-bits"
"""Names of the pictures and their CSV."""
DENSITIES = ("topk01", "topk1", "topk5", "dense")
"""Settings that differ by nothing but density."""


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
        bits: of a rank's own messages for each element, over the whole run; null if a run did not
            count them.
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
    bits: float | None
    bits_target: float | None


def report(results: Sequence[Result], folder: Path | None, json_path: Path | None) -> None:
    """Prints the table; on request writes its rows and draws the pictures.

    Args:
        results: of finished runs.
        folder: for pictures and their CSV, made if missing; None draws none.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: a file cannot be written.
        DependencyError: matplotlib is missing.
    """
    rows = print_table(Row.COLUMNS, rows_of(results), json_path)
    if folder is not None:
        for path in draw(results, rows, folder):
            print(path)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each model and setting, in the order of `SETTINGS`."""
    by_run = {(each.model, each.setting, each.seed): each for each in results}
    rows = []
    for model in CORPORA:
        for setting in SETTINGS:
            runs = [each for key, each in by_run.items() if key[:2] == (model, setting.name)]
            if not runs:
                continue
            pairs = [
                (each, dense)
                for each in runs
                if (dense := by_run.get((model, setting.baseline, each.seed))) not in (None, each)
            ]
            against = [_to_dense(each.final, dense.final) for each, dense in pairs]
            noises = [_spread(list(map(_to_dense, each.last, dense.last))) for each, dense in pairs]
            finals = [each.final for each in runs]
            rows.append(
                Row(
                    op="convergence",
                    model=model,
                    setting=setting.name,
                    label=setting.label,
                    seeds=len(runs),
                    final=mean(finals),
                    spread=100 * _spread(finals) / mean(finals) if len(finals) > 1 else None,
                    to_dense=mean(against) if against else None,
                    to_dense_spread=_spread(against) if len(against) > 1 else None,
                    noise=max(noises) if noises else None,
                    wire_ratio=mean(each.wire_ratio for each in runs),
                    wire_ratio_target=mean(each.wire_ratio_target for each in runs),
                    bits=_mean_known([each.bits for each in runs]),
                    bits_target=_mean_known([each.bits_target for each in runs]),
                )
            )
    return rows


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _to_dense(loss: float, dense: float) -> float:
    return 100 * (loss / dense - 1)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def draw(results: Sequence[Result], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the pictures and the CSV that each is drawn from.

    Loss over bits is drawn where runs with a curve have counted their bits.

    Raises:
        DependencyError: matplotlib is missing.
    """
    finals = [row.to_dict() for row in rows]
    pictures = [
        (CURVES, curve_rows(results), _draw_curves, 4.8),
        (FINAL, finals, _draw_final, 4.2),
    ]
    if bits := bits_rows(rows):
        pictures.append((BITS, bits, _draw_bits, 4.8))
    return [path for picture in pictures for path in figures.write_picture(folder, *picture)]


def curve_rows(results: Sequence[Result]) -> list[figures.Row]:
    """A row for each validation of each run; those after the last iteration become one mean."""
    return [
        {
            "series": label_of(each),
            "model": each.model,
            "setting": each.setting,
            "seed": each.seed,
            "iteration": iteration,
            "loss": mean(loss for number, loss in each.curve if number == iteration),
        }
        for each in results
        for iteration in dict.fromkeys(number for number, _ in each.curve)
    ]


def bits_rows(rows: Sequence[Row]) -> list[figures.Row]:
    """A row for each model and setting that is a point of a curve of loss over bits."""
    return [
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
        if (curve := BY_NAME[row.setting].curve) and None not in (row.bits, row.to_dense)
    ]


def _draw_curves(rows: list[figures.Row], canvas: Canvas) -> None:
    by_model = figures.groups(rows, "model")
    styles = figures.styles_of(rows)
    panels = canvas.subplots(1, len(by_model), squeeze=False)[0]
    for axes, (model, members) in zip(panels, by_model.items(), strict=True):
        means = [
            {"series": series, "iteration": iteration, "loss": mean(row["loss"] for row in group)}
            for (series, iteration), group in figures.groups(members, "series", "iteration").items()
        ]
        figures.draw_lines(axes, means, "iteration", "loss", styles)
        lowest = min(row["loss"] for row in means)
        # With the first drop in the picture, the differences between settings would not be visible.
        axes.set_ylim(lowest - 0.05, lowest + 1.0)
        axes.set(title=model, xlabel="iteration", ylabel="validation loss, mean of the seeds")
    figures.shared_legend(canvas, panels)
    canvas.suptitle("Validation loss by setting, measured on two CPU ranks", fontsize=9)


def _draw_final(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    by_model = figures.groups(rows, "model")
    left, right = canvas.subplots(1, 2)
    for (model, members), colour in zip(by_model.items(), figures.COLOURS, strict=False):
        named = {row["setting"]: row for row in members}
        points = [named[name] for name in DENSITIES if name in named]
        left.errorbar(
            [row["wire_ratio_target"] for row in points],
            [row["final"] for row in points],
            yerr=[row["final"] * (row["spread"] or 0) / 200 for row in points],
            label=model,
            color=colour,
            marker="o",
            capsize=3,
        )
        others = [row for row in members if row["to_dense"] is not None]
        places = [list(BY_NAME).index(row["setting"]) for row in others]
        right.errorbar(
            [row["to_dense"] for row in others],
            places,
            xerr=[(row["to_dense_spread"] or 0) / 2 for row in others],
            label=model,
            color=colour,
            marker="o",
            linestyle="",
            capsize=3,
        )
    figures.log_axis(left, "x")
    left.set(xlabel="bytes sent at the target density, of dense's", ylabel="final validation loss")
    labels = {row["setting"]: row["label"] for row in rows if row["to_dense"] is not None}
    right.set_yticks([list(BY_NAME).index(name) for name in labels], list(labels.values()))
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
