"""Charts of one run: its iterations stage by stage, its buckets, and their sparsity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.recording import BUCKET_STAGES, STEP_STAGES
from megatron_sparse.report import exposed, theme
from megatron_sparse.report.charts import (
    TARGET_NOTE,
    Chart,
    legend_below,
    mark_target,
    short,
    stacked_areas,
    stacked_bars,
    thinned,
    thinned_note,
)
from megatron_sparse.report.run_charts import AXIS_IN, BAR_IN, label_of
from megatron_sparse.report.run_data import BucketMedians, RunData
from megatron_sparse.telemetry.quantities import REST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BUCKETS = 16
"""Bars in a chart; the table below it has more rows."""


def charts_of(run: RunData, runs: Sequence[RunData]) -> dict[str, list[Chart]]:
    """The charts of a run, by section.

    Args:
        run: the run to draw.
        runs: all runs of the report; if there are several, titles name the run.
    """
    end = "" if len(runs) == 1 else f", {label_of(run, runs)}"
    suffix = "" if len(runs) == 1 else f"-{run.key.lower()}"

    def mark(axes: Axes) -> None:
        mark_target(axes, run.iterations.target_begins)
        # The same scales for all runs.
        first, last = (axes.get_xlim()[0], max(one.iterations.number[-1] for one in runs))
        axes.set_xlim(first, max(last, axes.get_xlim()[1]))

    top = max(one.exposed.top() for one in runs)
    by_bucket = exposed.chart(run.exposed, len(run.iterations.number), suffix, end, top, mark)
    found = {
        "exposed": [
            *([] if by_bucket is None else [by_bucket]),
            _breakdown(run, suffix, end, _slowest_ms(runs), mark),
        ],
        "buckets": [],
        "sparsity": [],
    }
    if run.buckets:
        found["buckets"] = [_buckets(run, suffix, end, runs)]
    if run.profiles:
        profiles = [profile for one in runs for profile in one.profiles.values()]
        found["sparsity"] = [
            _densification(run, suffix, end, profiles),
            _skewness(run, suffix, end, profiles),
        ]
    return found


def _slowest_ms(runs: Sequence[RunData]) -> float:
    """The end of a scale of iterations' times."""
    return max(float(np.percentile(one.iterations.iteration_ms, 98)) for one in runs) * 1.15


def _breakdown(
    run: RunData, suffix: str, end: str, top: float, mark: Callable[[Axes], None]
) -> Chart:
    columns = run.iterations

    def draw(axes: Axes) -> None:
        claimed = sum(columns.stage_ms[stage] for stage in STEP_STAGES)
        other = np.maximum(columns.iteration_ms - claimed, 0.0)
        stages = {stage: columns.stage_ms[stage] for stage in STEP_STAGES} | {REST: other}
        thin = {stage: thinned(columns.number, value) for stage, value in stages.items()}
        stacked_areas(
            axes,
            thin[REST][0],
            {stage: y for stage, (_, y) in thin.items()},
            [theme.STAGES[stage].light for stage in thin],
            top,
        )
        mark(axes)
        axes.set_ylabel("ms")
        legend_below(axes, 4)

    note = "The training thread's stages, stacked; host_wait and param_wait are exposed."
    return Chart(
        f"breakdown{suffix}",
        f"Where the time went (ms){end}",
        note + TARGET_NOTE + thinned_note([len(columns.number)]),
        draw,
        kind="breakdown" if suffix else "",
    )


def slowest(run: RunData, most: int) -> list[BucketMedians]:
    """The buckets whose stages take longest together, in the order in which they are launched."""
    chosen = sorted(run.buckets.values(), key=lambda bucket: -bucket.measured_us)[:most]
    names = {bucket.name for bucket in chosen}
    return [bucket for bucket in run.buckets.values() if bucket.name in names]


def _buckets(run: RunData, suffix: str, end: str, runs: Sequence[RunData]) -> Chart:
    shown = slowest(run, MOST_BUCKETS)
    predicted = any(bucket.predicted_us is not None for bucket in shown)
    # Bars and scales of all runs are alike.
    shown_of = [slowest(one, MOST_BUCKETS) for one in runs]
    places = max(map(len, shown_of))
    times_us = [max(b.measured_us, b.predicted_us or 0.0) for of in shown_of for b in of]

    def draw(axes: Axes) -> None:
        parts = [{s: us / 1e3 for s, us in bucket.stage_us.items()} for bucket in shown]
        stacked_bars(axes, [short(bucket.name) for bucket in shown], parts, BUCKET_STAGES)
        if predicted:
            known = [(i, b.predicted_us / 1e3) for i, b in enumerate(shown) if b.predicted_us]
            axes.plot(
                [time_ms for _, time_ms in known],
                [place for place, _ in known],
                marker="D",
                linestyle="none",
                markersize=4,
                color=theme.INK.light,
                label="predicted",
            )
        axes.set_ylim(max(places, 2) - 0.5, -0.5)
        axes.set_xlim(0, max(times_us) / 1e3 * 1.05 or 1.0)
        legend_below(axes, 4)

    count = max(bucket.count for bucket in shown)
    few = (
        f"The {len(shown)} slowest of {len(run.buckets)} buckets"
        if (len(run.buckets) > len(shown))
        else "Each bucket"
    )
    note = f"{few}, medians of the last {count} iterations." + (
        " The diamond is the planner's predicted time of all stages." if predicted else ""
    )
    return Chart(
        f"buckets{suffix}",
        f"Buckets, stage by stage (ms){end}",
        note,
        draw,
        AXIS_IN + 0.2 + BAR_IN * max(places, 2),
        "buckets" if suffix else "",
    )


def _profile_lines(axes: Axes, run: RunData, values: Sequence[dict[int, float]]) -> None:
    """A line for each bucket: coloured if there are enough colours for all, else grey."""
    for index, (name, points) in enumerate(zip(run.profiles, values, strict=True)):
        named = len(values) <= len(theme.SERIES)
        axes.plot(
            list(points),
            list(points.values()),
            marker="o",
            markersize=3,
            color=theme.of_run(index).light if named else theme.MUTED.light,
            label=short(name) if named else None,
            alpha=1.0 if named else 0.5,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_below(axes)


def _densification(
    run: RunData, suffix: str, end: str, profiles: Sequence[SparsityProfile]
) -> Chart:
    highest = max(p.sum_density(k) for p in profiles for k in p.densification)

    def draw(axes: Axes) -> None:
        values = [
            {k: profile.sum_density(k) * 100 for k in profile.densification}
            for profile in run.profiles.values()
        ]
        _profile_lines(axes, run, values)
        axes.set(xlabel="ranks in the sum", ylabel="non-zero %")
        axes.set_ylim(0, highest * 105)

    note = (
        f"Density of the sum of k ranks' gradients, {run.profiled} (ZEN, definition 4): constant "
        "if ranks share all elements, proportional to k if they share none."
    )
    kind = "densification" if suffix else ""
    return Chart(f"densification{suffix}", f"How sums fill up{end}", note, draw, kind=kind)


def _skewness(run: RunData, suffix: str, end: str, profiles: Sequence[SparsityProfile]) -> Chart:
    highest = max((s for p in profiles for s in p.skewness.values()), default=1.0)

    def draw(axes: Axes) -> None:
        _profile_lines(axes, run, [profile.skewness for profile in run.profiles.values()])
        axes.set(xlabel="partitions", ylabel="densest / mean", ylim=(0.95, highest * 1.05))

    note = (
        "Density of the densest of p equal ranges over the mean density (ZEN, definition 5): 1 if "
        "the elements are spread evenly."
    )
    kind = "skewness" if suffix else ""
    return Chart(
        f"skewness{suffix}", f"How unevenly non-zeros are spread{end}", note, draw, kind=kind
    )
