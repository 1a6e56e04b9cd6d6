"""Exposed communication of a run: how much of an iteration, in which buckets, since when.

The first section of a report. Time is exposed if the training thread waits, for a bucket or for
gathered parameters: `telemetry.quantities.exposed_share` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    against_dense,
    at_target,
    of_all,
    percent,
    rate,
    scope,
)

MOST_BUCKETS = 6
"""Buckets that a chart shows by name; the others are one area."""
LEAST_CHANGE = 0.01
"""A smaller change of the share is not worth a sentence."""
LEAST_EXPLAINED = 0.5
"""The part of the share's variance that a change must explain; noise explains little anywhere."""
LEAST_ITERATIONS = 5
MOST_LEVELS = 4
REST, PARAMETERS = "other buckets", "parameters"


class ExposedTimes:
    """Collects the waits for each bucket over the run, in at most `MOST_POINTS` intervals.

    Args:
        number: the iterations' numbers, ascending.
        iteration_ms: their times.
        param_wait_ms: their waits for parameters.
    """

    def __init__(
        self, number: np.ndarray, iteration_ms: np.ndarray, param_wait_ms: np.ndarray
    ) -> None:
        parts = min(len(number), MOST_POINTS)

        def sums(values: np.ndarray) -> np.ndarray:
            return np.array([piece.sum() for piece in np.array_split(values, parts)])

        self._interval_of: dict[int, int] = {}
        for index, piece in enumerate(np.array_split(number, parts)):
            self._interval_of |= dict.fromkeys(piece.tolist(), index)
        self.number = np.array([piece.mean() for piece in np.array_split(number, parts)])
        self._total_ms = sums(iteration_ms)
        self._waits_ms: dict[str, np.ndarray] = {}
        if param_wait_ms.any():
            self._waits_ms[PARAMETERS] = sums(param_wait_ms)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of `buckets.jsonl`; one of an iteration that is unknown adds nothing."""
        index = self._interval_of.get(line["iteration"])
        if index is not None:
            waits_ms = self._waits_ms.setdefault(line["bucket"], np.zeros(len(self.number)))
            waits_ms[index] += line["exposed_us"] / 1e3

    def shares(self) -> dict[str, np.ndarray]:
        """For each bucket, and for parameters: by interval the waits over the iterations' time."""
        total_ms = np.where(self._total_ms > 0, self._total_ms, np.inf)
        return {name: waits_ms / total_ms for name, waits_ms in self._waits_ms.items()}

    def top(self) -> float:
        """The end of a chart's scale, in percent."""
        total = np.sum(list(self.shares().values()), axis=0) * 100
        return max(float(np.percentile(total, 98)) * 1.15, 1.0)


@dataclass(frozen=True)
class Plateau:
    """A part of a run in which a share stays about the same.

    Attributes:
        first: its first iteration.
        share: of its time: the sum of the waits over the sum of the times.
    """

    first: int
    share: float


def levels_of(number: np.ndarray, share: np.ndarray, iteration_ms: np.ndarray) -> list[Plateau]:
    """The levels of a share, the latest first: at most `MOST_LEVELS`.

    The run is cut in two where that explains most of the variance, and its later part again,
    as long as the cut is clear.

    Args:
        number: the iterations' numbers.
        share: one value for each; NaN is left out.
        iteration_ms: their times, which weigh the shares.

    Returns:
        Levels without gaps; a single one where nothing has clearly changed; none without values.

    Example:
        >>> share = np.repeat([0.4, 0.1], 50)
        >>> levels = levels_of(np.arange(1, 101), share, np.ones(100))
        >>> [(level.first, round(level.share, 6)) for level in levels]
        [(51, 0.1), (1, 0.4)]
    """
    known = np.isfinite(share)
    number, share, iteration_ms = number[known], share[known], iteration_ms[known]
    levels: list[Plateau] = []
    while len(share):
        cut = _cut(share) if len(levels) < MOST_LEVELS - 1 else None
        end = len(share) if cut is None else cut
        mean = float(np.average(share[:end], weights=iteration_ms[:end]))
        levels.insert(0, Plateau(int(number[0]), mean))
        number, share, iteration_ms = number[end:], share[end:], iteration_ms[end:]
    return levels


def _cut(share: np.ndarray) -> int | None:
    """The index at which a new level begins; None if no place is clear."""
    count = len(share)
    if count < 2 * LEAST_ITERATIONS:
        return None
    # The first iterations compile and allocate: such outliers are no level.
    bounded = np.clip(share, *np.percentile(share, [2, 98]))
    sizes = np.arange(1, count)
    sums = np.cumsum(bounded)
    low, high = sums[:-1] / sizes, (sums[-1] - sums[:-1]) / (count - sizes)
    # Of the variance around the common mean, the part between the two means.
    explained = sizes * (count - sizes) / count * (low - high) ** 2
    explained[: LEAST_ITERATIONS - 1] = 0.0
    explained[count - LEAST_ITERATIONS :] = 0.0
    cut = int(explained.argmax()) + 1
    variance = float(((bounded - bounded.mean()) ** 2).sum())
    change = abs(float(np.median(share[:cut]) - np.median(share[cut:])))
    clear = explained[cut - 1] >= LEAST_EXPLAINED * variance and change >= LEAST_CHANGE
    return cut if clear else None


def sentences(
    summary: Mapping[str, Any], times: ExposedTimes, levels: Sequence[Plateau]
) -> list[str]:
    """The answers in words: how much, where, since when, and what dense would have taken.

    Args:
        summary: of the run.
        times: waits by bucket.
        levels: of the exposed share, the latest first.
    """
    steady = at_target(summary)
    said = [
        f"{percent(steady['exposed_share'])} of an iteration is exposed communication: "
        f"{of_all(steady)}, means of {scope(summary)}."
    ]
    if len(levels) > 1:
        *later, first = levels
        parts = ", ".join(f"{percent(one.share)} from iteration {one.first} on" for one in later)
        said.append(f"It is {parts}, and {percent(first.share)} before.")
    since = levels[0].first if len(levels) > 1 else 0
    totals = {
        name: float(share[times.number >= since].sum()) for name, share in times.shares().items()
    }
    if (whole := sum(totals.values())) > 0 and len(totals) > 1:
        worst = sorted(totals, key=lambda name: -totals[name])[:2]
        named = " and ".join(f"{short(name)} ({totals[name] / whole:.0%})" for name in worst)
        when = f" from iteration {since} on" if since else ""
        said.append(f"The longest waits{when} are for {named}.")
    if speed := rate(summary["tokens_per_s"], summary["model_tflop_per_s"]):
        said.append(f"Throughput: {speed}.")
    if summary.get("world_size") != 1:
        estimate = against_dense(summary["against_dense"], summary.get("planner_cluster"))
        said.append(f"{estimate[0].upper()}{estimate[1:]}.")
    return said


def chart(
    times: ExposedTimes, length: int, top: float, mark: Callable[[Axes], None]
) -> Chart | None:
    """The share of exposed time by bucket over the run, stacked; None without any bucket's waits.

    Args:
        times: waits by bucket.
        length: number of iterations.
        top: of the scale.
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
        percents = {name: value * 100 for name, value in areas.items()}
        colours = [theme.of_run(index).light for index in range(len(areas))]
        if rest:
            colours[-1] = theme.MUTED.light
        stacked_areas(axes, times.number, percents, colours, top)
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
