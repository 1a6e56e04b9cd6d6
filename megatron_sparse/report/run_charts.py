"""The charts of a report.

First those with a line for each run: loss, bytes, time. Then those of one run: its iterations and
its buckets, stage by stage. Exposed communication is the time in which the training thread waits
for gradients (the stage host_wait) or parameters (param_wait).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_sparse.recording import BUCKET_STAGES, STEP_STAGES
from megatron_sparse.report import theme
from megatron_sparse.report.charts import (
    TARGET_NOTE,
    Chart,
    legend_below,
    mark_target,
    short,
    thinned,
    thinned_note,
)
from megatron_sparse.report.run_data import BucketMedians, RunData
from megatron_sparse.simulate.figures import Axes, log_axis
from megatron_sparse.telemetry.quantities import REST

BAR_IN, AXIS_IN = 0.3, 1.1
"""Inches of a bar with its gap, and of everything else in a bar chart."""
MOST_BUCKETS = 16
"""Bars in a chart; the table below it has more rows."""


def charts_of(runs: Sequence[RunData]) -> dict[str, list[list[Chart]]]:
    """Section name -> rows of charts; a row is shown side by side, charts without data left out."""
    # A run of one rank synchronises nothing, and has no bytes to compare.
    with_traffic = [run for run in runs if run.iterations.dense_bytes.any()]
    has_loss = any(np.isfinite(run.iterations.loss).any() for run in runs)
    with_buckets = [run for run in runs if run.buckets]
    return {
        "exposed": [
            [_exposed_share(runs), _iteration_time(runs)],
            [_breakdown(run, runs) for run in runs],
        ],
        "loss": [[_loss(runs)]] if has_loss else [],
        "bytes": [[_wire_ratio(with_traffic)]] if with_traffic else [],
        "buckets": [[_buckets(run, runs) for run in with_buckets]] if with_buckets else [],
    }


def label_of(run: RunData, of: Sequence[RunData]) -> str:
    """The run's letter and name; the name alone if there is only one run."""
    return short(run.name) if len(of) == 1 else f"{run.key}: {short(run.name)}"


def _lengths(runs: Sequence[RunData]) -> list[int]:
    return [len(run.iterations.number) for run in runs]


def _lines(axes: Axes, runs: Sequence[RunData], values: Sequence[np.ndarray]) -> None:
    """Draws each run's array in `values` as a line; marks where its target density begins."""
    handles = []
    for run, value in zip(runs, values, strict=True):
        x, y = thinned(run.iterations.number, value)
        marker = "o" if np.isfinite(y).sum() == 1 else None  # a line of one point is invisible
        handles += axes.plot(x, y, color=theme.SERIES[run.index], marker=marker)
        mark_target(axes, run.iterations.target_begins, theme.SERIES[run.index])
    axes.set_xlabel("iteration")
    if len(runs) > 1:
        axes.legend(handles, [label_of(run, runs) for run in runs])


def _loss(runs: Sequence[RunData]) -> Chart:
    def draw(axes: Axes) -> None:
        _lines(axes, runs, [run.iterations.loss for run in runs])
        axes.set_ylabel("loss")

    note = "Training loss; iterations without a finite logged loss are left out." + TARGET_NOTE
    return Chart("loss", "Training loss", note + thinned_note(_lengths(runs)), draw)


def _wire_ratio(runs: Sequence[RunData]) -> Chart:
    """The chart of each run's bytes on the wire, in percent of a dense ring's."""

    def draw(axes: Axes) -> None:
        _lines(axes, runs, [run.iterations.wire_ratio * 100 for run in runs])
        log_axis(axes, "y")
        axes.set_ylabel("% of a dense ring")

    note = (
        "Bytes that the rank of this log sent, headers included, over the bytes that each rank of "
        "a dense ring would send. The scale is logarithmic." + TARGET_NOTE
    )
    return Chart("wire-ratio", "Bytes on the wire against dense", note, draw)


def _exposed_share(runs: Sequence[RunData]) -> Chart:
    """The chart of each run's exposed communication, in percent of an iteration."""
    percents = [run.iterations.exposed_share * 100 for run in runs]
    # The axis ends above 98 % of the values: outliers would flatten the rest of the line.
    highest = max(float(np.nanpercentile(percent, 98)) for percent in percents)

    def draw(axes: Axes) -> None:
        _lines(axes, runs, percents)
        axes.set_ylim(0, max(1.15 * highest, 1.0))  # at least 1 %, should nothing be exposed
        axes.set_ylabel("% of the iteration")

    note = (
        "The training thread waits for gradients or parameters in this part of an iteration."
        + TARGET_NOTE
        + thinned_note(_lengths(runs))
    )
    return Chart("exposed-share", "Exposed communication (% of the iteration)", note, draw)


def _iteration_time(runs: Sequence[RunData]) -> Chart:
    """The chart of each run's milliseconds by iteration; slow outliers end above the scale."""
    times_ms = [run.iterations.iteration_ms for run in runs]
    highest_ms = max(float(np.nanpercentile(values, 98)) for values in times_ms)

    def draw(axes: Axes) -> None:
        _lines(axes, runs, times_ms)
        axes.set_ylim(0, highest_ms * 1.15)
        axes.set_ylabel("ms")

    note = (
        "Wall-clock time. The first iterations compile and allocate, so the scale ends a little "
        "above the time of 98 % of the iterations." + TARGET_NOTE + thinned_note(_lengths(runs))
    )
    return Chart("iteration-time", "Time of an iteration (ms)", note, draw)


def _labelled(chart: Chart, run: RunData, runs: Sequence[RunData]) -> Chart:
    """Adds the run to a chart's anchor and title, if the report has several runs."""
    if len(runs) == 1:
        return chart
    name, title = f"{chart.name}-{run.key.lower()}", f"{chart.title}, {label_of(run, runs)}"
    return replace(chart, name=name, title=title)


def _breakdown(run: RunData, runs: Sequence[RunData]) -> Chart:
    """The chart of the training thread's stages in `run`, with the same scales for all `runs`."""
    top_ms = max(float(np.percentile(one.iterations.iteration_ms, 98)) for one in runs) * 1.15
    last = max(one.iterations.number[-1] for one in runs)
    columns = run.iterations

    def draw(axes: Axes) -> None:
        """Stacks the stages and, as `REST`, the time of the iteration that is in none of them."""
        in_stages_ms = sum(columns.stage_ms[stage] for stage in STEP_STAGES)
        rest_ms = np.maximum(columns.iteration_ms - in_stages_ms, 0.0)
        stages = {stage: columns.stage_ms[stage] for stage in STEP_STAGES} | {REST: rest_ms}
        x, _ = thinned(columns.number, rest_ms)  # the same for all stages
        areas = {stage: thinned(columns.number, value)[1] for stage, value in stages.items()}
        if len(x) == 1:
            # An area over one point has no width: draw it as a bar around the point.
            axes.set_xlim(x[0] - 1, x[0] + 1)
            x = np.array([x[0] - 0.4, x[0] + 0.4])
        values = [np.broadcast_to(value, x.shape) for value in areas.values()]
        colours = [theme.STAGES[stage] for stage in areas]
        axes.stackplot(x, *values, labels=list(areas), colors=colours, linewidth=0)
        axes.set_ylim(0, top_ms)
        axes.margins(x=0)
        mark_target(axes, columns.target_begins)
        axes.set_xlim(right=max(last, axes.get_xlim()[1]))
        axes.set(xlabel="iteration", ylabel="ms")
        legend_below(axes)

    note = "The training thread's stages, stacked; host_wait and param_wait are exposed."
    note += TARGET_NOTE + thinned_note([len(columns.number)])
    return _labelled(Chart("breakdown", "Where the time went (ms)", note, draw), run, runs)


def slowest(run: RunData, most: int) -> list[BucketMedians]:
    """The buckets whose stages take longest together, in the order in which they are launched."""
    chosen = sorted(run.buckets.values(), key=lambda bucket: -bucket.measured_us)[:most]
    names = {bucket.name for bucket in chosen}
    return [bucket for bucket in run.buckets.values() if bucket.name in names]


def _buckets(run: RunData, runs: Sequence[RunData]) -> Chart:
    """The chart of the slowest buckets' stages in `run`, with the same scales for all `runs`."""
    shown = slowest(run, MOST_BUCKETS)
    shown_of = [slowest(one, MOST_BUCKETS) for one in runs]
    bar_count = max(map(len, shown_of))
    longest_us = max(bucket.measured_us for buckets in shown_of for bucket in buckets)

    def draw(axes: Axes) -> None:
        """Draws a bar for each bucket: its stages end to end, those that took any time."""
        y, left = np.arange(len(shown)), np.zeros(len(shown))
        for stage in BUCKET_STAGES:
            widths = np.array([bucket.stage_us.get(stage, 0.0) / 1e3 for bucket in shown])
            if widths.any():
                colour = theme.STAGES[stage]
                axes.barh(y, widths, left=left, color=colour, height=0.62, label=stage)
                left += widths
        axes.set_yticks(y, [short(bucket.name) for bucket in shown])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ms")
        axes.set_ylim(max(bar_count, 2) - 0.5, -0.5)  # first bar on top, room for at least two
        axes.set_xlim(0, longest_us / 1e3 * 1.05 or 1.0)  # matplotlib needs a positive length
        legend_below(axes)

    count = max(bucket.count for bucket in shown)
    total = len(run.buckets)
    which = f"The {len(shown)} slowest of {total} buckets" if total > len(shown) else "Each bucket"
    note = f"{which}, medians of the last {count} iterations."
    height_in = AXIS_IN + 0.2 + BAR_IN * max(bar_count, 2)
    chart = Chart("buckets", "Buckets, stage by stage (ms)", note, draw, height_in)
    return _labelled(chart, run, runs)
