"""Finds the three thresholds of the adaptive ring by trying them (SpCCL, section IV-C, figure 2).

Each of `scheme.ring_intra_density`, `ring_inter_density` and `ring_gather_density` is swept from 0
to 1 at intervals of 0.1, as the paper does (`--quick`: 0.2), one after the other with the others
fixed: the first two by the time of a reduce-scatter, the third by that of an all-reduce. A
threshold is not swept if the ranks do not have its links. Among the values within `TIE` of the
fastest, the sweep takes that nearest to the previous value: one without an effect does not move.

Non-zero elements are uniform and independent on each rank, as in the paper. The paper's gradients
have one density; here the times with several densities are added up, so that sums of all densities
cross links even between few ranks. Selection and its encoding are not timed: no threshold changes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives.adaptive_ring import adaptive_ring
from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.planner.link_timing import Clock, Measuring, timed
from megatron_sparse.recording import StageTimer
from megatron_sparse.run.rows import CellRow, cell
from megatron_sparse.simulate.gradients import uniform
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.transport import Transport

THRESHOLDS = ("intra", "inter", "gather")
"""The thresholds, by the links or phase that each is for, in the order of `RING_DENSITIES`."""
TIE = 0.01


@dataclass(frozen=True)
class SweepCase:
    """The bucket and gradients to synchronise.

    Attributes:
        numel: elements of the bucket, a multiple of the number of ranks.
        densities: fractions of non-zero elements in a rank's gradient; each is timed.
        repeats: how often each is timed.
        step: difference between two values of a threshold that are tried.
    """

    numel: int
    densities: tuple[float, ...]
    repeats: int
    step: float = 0.1


@dataclass(frozen=True)
class SweepPoint(CellRow):
    """The time with one value of a threshold."""

    format: str = cell("`coo` or `pici`", "<6")
    threshold: str = cell("one of `THRESHOLDS`", "<9")
    density: float = cell("its value", ">7g")
    time_us: float = cell("of the collective, over all input densities", ">9.0f time(us)")
    best: bool = cell("whether this value was chosen", "mark <8 taken")

    @property
    def mark(self) -> str:
        """For the table."""
        return "<- taken" if self.best else ""


class RingRuns:
    """Times adaptive rings from one rank; every run of a case has the same gradients.

    `clock` is this rank's, in seconds. `timer` receives the codec's time; a virtual rank's also
    advances the modelled clock.
    """

    def __init__(
        self, transport: Transport, case: SweepCase, clock: Clock, timer: StageTimer
    ) -> None:
        self.transport, self.case = transport, case
        self._clock, self._timer = clock, timer
        self._buffers = MessageBuffers()
        # Kept between runs, by format, operation and density.
        self._messages: dict[tuple[str, CollectiveOp, float], tuple[Bucket, Message]] = {}

    def time_s(self, op: CollectiveOp, ring: SchemeConfig) -> Measuring[float]:
        """Returns a ring's seconds, added up over the case's densities; the same on all ranks."""
        total_s = 0.0
        for density in self.case.densities:
            bucket, message = self._message(ring.format, op, density)

            def run(bucket: Bucket = bucket, message: Message = message) -> Steps:
                exchange = Exchange(bucket, self.transport, self._buffers, self._timer, ring)
                return adaptive_ring(exchange, message)

            total_s += yield from timed(self.transport, self.case.repeats, self._clock, run)
        return total_s

    def _message(self, format: str, op: CollectiveOp, density: float) -> tuple[Bucket, Message]:
        """Returns a bucket with a gradient of this density, and its encoded message; cached."""
        key, numel = (format, op, density), self.case.numel
        if key not in self._messages:
            n, gradient = self.transport.world_size, uniform(numel, density)
            grad_N = gradient.gradient(self.transport.rank).to(self.transport.device)
            bucket = Bucket("ring", grad_N, [ParameterSlice("w", 0, numel)], op, n)
            # Not `self._buffers`: the next message would overwrite this one there.
            message = make_message(bucket, True, format, MessageBuffers(), StageTimer())
            self._messages[key] = bucket, message
        return self._messages[key]


def sweep_thresholds(
    format: str, runs: RingRuns
) -> Measuring[tuple[tuple[float, float, float], list[SweepPoint]]]:
    """Sweeps each threshold whose links these ranks have; the result is the same on all ranks.

    Returns:
        The best thresholds (intra, inter, gather), where one that was not swept is SpCCL's; and the
        time of every value tried.
    """
    found = list(RING_DENSITIES[format])
    points: list[SweepPoint] = []
    for threshold in swept(runs.transport):
        index = THRESHOLDS.index(threshold)
        # `gather` decides about the all-gather, which only an all-reduce has.
        op = CollectiveOp.ALL_REDUCE if threshold == "gather" else CollectiveOp.REDUCE_SCATTER
        step = runs.case.step
        values, times_s = [round(i * step, 6) for i in range(round(1 / step) + 1)], []  # 0 to 1
        for value in values:
            tried = found.copy()
            tried[index] = value
            named = zip(THRESHOLDS, tried, strict=True)
            keys: dict[str, Any] = {f"ring_{name}_density": density for name, density in named}
            ring = SchemeConfig(name="adaptive_ring", format=format, **keys)
            times_s.append((yield from runs.time_s(op, ring)))
        found[index] = choose(values, times_s, found[index])
        points += [
            SweepPoint(format, threshold, value, time_s * 1e6, value == found[index])
            for value, time_s in zip(values, times_s, strict=True)
        ]
    intra, inter, gather = found
    return (intra, inter, gather), points


def swept(transport: Transport) -> list[str]:
    """The names of the thresholds that make a difference on these ranks."""
    ranks, nodes = len(transport.nodes), len(set(transport.nodes))
    matters = {"intra": nodes < ranks, "inter": nodes > 1, "gather": True}
    return [threshold for threshold in THRESHOLDS if matters[threshold]]


def choose(values: Sequence[float], times_s: Sequence[float], before: float) -> float:
    """Returns the value nearest to `before` among those within `TIE` of the fastest one.

    Example:
        >>> choose([0.0, 0.5, 1.0], [2.0, 1.0, 1.005], before=0.9)
        1.0
    """
    limit_s = (1 + TIE) * min(times_s)
    good = [value for value, time_s in zip(values, times_s, strict=True) if time_s <= limit_s]
    return min(good, key=lambda value: abs(value - before))
