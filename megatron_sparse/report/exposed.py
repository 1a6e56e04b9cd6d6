"""Exposed communication of a run: how much of an iteration, in which buckets.

The first section of a report. Time is exposed if the training thread waits, for a bucket or for
gathered parameters: `telemetry.quantities.exposed_share` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_sparse.report import theme
from megatron_sparse.report.charts import (
    MOST_POINTS,
    Chart,
    legend_below,
    short,
    stacked_areas,
    thinned_note,
)
from megatron_sparse.simulate.figures import Axes
from megatron_sparse.telemetry.quantities import (
    at_target,
    of_all,
    percent,
    rate,
    scope,
)

MOST_BUCKETS = 6
"""Buckets that a chart shows by name; the others are one area."""
REST, PARAMETERS = "other buckets", "parameters"


class ExposedTimes:
    """Collects the waits for each bucket over the run, in at most `MOST_POINTS` intervals.

    Args:
        number: the iterations' numbers, ascending.
        iteration_ms: their times.
        param_wait_ms: their waits for parameters.

    Attributes:
        middle: of each interval, on the axis of iterations.
    """

    def __init__(
        self, number: np.ndarray, iteration_ms: np.ndarray, param_wait_ms: np.ndarray
    ) -> None:
        # Of each iteration; the intervals have equally many, or one more.
        interval = np.arange(len(number)) * min(len(number), MOST_POINTS) // len(number)
        self._interval_of = dict(zip(number.tolist(), interval.tolist(), strict=True))
        self.middle = np.bincount(interval, number) / np.bincount(interval)
        self._total_ms = np.bincount(interval, iteration_ms)
        self._waits_ms: dict[str, np.ndarray] = {}
        if param_wait_ms.any():
            self._waits_ms[PARAMETERS] = np.bincount(interval, param_wait_ms)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of `buckets.jsonl`; one of an iteration that is unknown adds nothing."""
        index = self._interval_of.get(line["iteration"])
        if index is not None:
            waits_ms = self._waits_ms.setdefault(line["bucket"], np.zeros(len(self.middle)))
            waits_ms[index] += line["exposed_us"] / 1e3

    def shares(self) -> dict[str, np.ndarray]:
        """For each bucket, and for parameters: by interval the waits over the iterations' time."""
        total_ms = np.where(self._total_ms > 0, self._total_ms, np.inf)
        return {name: waits_ms / total_ms for name, waits_ms in self._waits_ms.items()}

    def top(self) -> float:
        """The end of a chart's scale in percent: a little above 98 % of the values, at least 1."""
        total = np.sum(list(self.shares().values()), axis=0) * 100
        return max(float(np.percentile(total, 98)) * 1.15, 1.0)


def sentences(summary: Mapping[str, Any], times: ExposedTimes) -> list[str]:
    """Sentences: how much of an iteration is exposed, the two longest waits, the throughput."""
    steady = at_target(summary)
    said = [
        f"{percent(steady['exposed_share'])} of an iteration is exposed communication: "
        f"{of_all(steady)}, means of {scope(summary)}."
    ]
    if summary.get("device", "cpu") != "cpu":
        said.append("These are the host's waits: streams' waits are part of the stage optimizer.")
    totals = {name: float(share.sum()) for name, share in times.shares().items()}
    if (whole := sum(totals.values())) > 0 and len(totals) > 1:
        worst = sorted(totals, key=lambda name: -totals[name])[:2]
        named = " and ".join(f"{short(name)} ({totals[name] / whole:.0%})" for name in worst)
        said.append(f"The longest waits are for {named}.")
    if speed := rate(summary["tokens_per_s"], summary["model_tflop_per_s"]):
        said.append(f"Throughput: {speed}.")
    return said


def chart(
    times: ExposedTimes, length: int, top: float, mark: Callable[[Axes], None]
) -> Chart | None:
    """The share of exposed time by bucket over the run, stacked; None without any bucket's waits.

    Args:
        times: waits by bucket.
        length: number of iterations.
        top: end of the scale in percent.
        mark: draws what all charts over iterations have.
    """
    shares = times.shares()
    if not shares:
        return None
    ordered = sorted(shares, key=lambda name: -float(shares[name].sum()))
    areas = {short(name): shares[name] for name in ordered[:MOST_BUCKETS]}
    if rest := ordered[MOST_BUCKETS:]:
        areas[REST] = np.sum([shares[name] for name in rest], axis=0)

    def draw(axes: Axes) -> None:
        """Draws the areas: a colour for each name, and a muted one for the rest, which is last."""
        percents = {name: value * 100 for name, value in areas.items()}
        colours = [theme.of_run(index).light for index in range(len(areas))]
        if rest:
            colours[-1] = theme.MUTED.light
        stacked_areas(axes, times.middle, percents, colours, top)
        mark(axes)
        axes.set_ylabel("% of the iteration")
        legend_below(axes)

    note = (
        "The training thread waits for the buckets in the order of their launch, and for gathered "
        "parameters; areas add up to the exposed share. The scale ends a little above 98 % of the "
        "values."
    )
    title = "Exposed by bucket (% of the iteration)"
    return Chart("exposed", title, note + thinned_note([length]), draw)
