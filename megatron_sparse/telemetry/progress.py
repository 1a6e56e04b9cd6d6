"""Progress of a training run: means over its last iterations, and the texts that show them.

Also `Isolated`, which keeps a failing display, of progress or anything else, from ending the run.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from megatron_sparse.recording import STEP_STAGES
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.quantities import (
    exposed_share,
    ms,
    of_all,
    percent,
    rate,
    size,
    thread_parts,
)

logger = logging.getLogger(__name__)

WINDOW = 20
"""Iterations that times are averaged over; times of single iterations vary too much."""
_PHASES = {
    "trial": "trials of presets",
    "warmup": "dense warm-up",
    "ramp": "ramp",
    "target": "at its target",
    "off": "compression off",
}
"""Words for the phases that need no legend."""


class Isolated[Shown]:
    """A dashboard, profile or progress whose first exception is logged and turns it off.

    A full disk or a lost network must not end a run of days.

    Args:
        shown: the dashboard, profile or progress.
        name: of it, for the log.
    """

    def __init__(self, shown: Shown, name: str) -> None:
        self._shown = shown
        self._name = name
        self._works = True

    def do(self, act: Callable[[Shown], None], *, always: bool = False) -> None:
        """Calls `act` with the dashboard, profile or progress; does nothing after a first failure.

        Args:
            act: what to do.
            always: call `act` even after a failure, to close what may hold files and threads.
        """
        if not (self._works or always):
            return
        try:
            act(self._shown)
        except Exception as error:
            if self._works:
                logger.error(
                    "%s failed and is off for the rest of the run: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )
            self._works = False


class RunProgress:
    """The position of a run, and means over its last iterations.

    Args:
        name: name of the run.
        total: iterations of the whole run; None if unknown.
    """

    def __init__(self, name: str | None, total: int | None) -> None:
        self.name = name or "run"
        self.total = total
        self._last: deque[IterationBreakdown] = deque(maxlen=WINDOW)
        # One more: the time of WINDOW iterations lies between WINDOW + 1 ends.
        self._ended_s: deque[float] = deque(maxlen=WINDOW + 1)
        self._loss: float | None = None

    def add(self, breakdown: IterationBreakdown, now_s: float) -> None:
        """Adds an iteration that ended at `now_s`."""
        self._last.append(breakdown)
        self._ended_s.append(now_s)
        if breakdown.loss is not None:
            self._loss = breakdown.loss

    @property
    def latest(self) -> IterationBreakdown:
        """The last iteration."""
        return self._last[-1]

    @property
    def iteration_ms(self) -> float:
        """Mean time of an iteration."""
        return self.mean_ms(lambda b: b.iteration_ms)

    def mean_ms(self, of: Callable[[IterationBreakdown], float]) -> float:
        """Mean of the number `of(iteration)` over the last iterations."""
        return sum(of(b) for b in self._last) / len(self._last)

    def stages(self) -> dict[str, float]:
        """The training thread's stages and the rest of the iteration, see `thread_parts`."""
        gathers = bool(self.latest.param_gathers)
        return thread_parts(self.means_ms(STEP_STAGES), self.iteration_ms, gathers=gathers)

    def means_ms(self, stages: Sequence[str]) -> dict[str, float]:
        """Mean times of stages; those of buckets are summed over buckets."""
        return {s: self.mean_ms(lambda b, s=s: b.stage_ms[s]) for s in stages}

    def left_s(self) -> float | None:
        """Predicts the seconds to the run's end, at the pace of the last iterations.

        Includes the time between iterations. None until two have ended, and without a total.
        """
        if self.total is None or len(self._ended_s) < 2:
            return None
        pace_s = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return max(0, self.total - self.latest.iteration) * pace_s

    def place(self) -> str:
        """Formats the position in the run: `120/500, 1:52 left`, or `500/500` at the end."""
        total = "" if self.total is None else f"/{self.total}"
        left_s = self.left_s()
        left = "" if not left_s else f", {clock(left_s)} left"
        return f"{self.latest.iteration}{total}{left}"

    def facts(self) -> str:
        """Formats loss, bytes sent for gradients and parameters, density, and the phase."""
        last = self.latest
        sent = size(last.wire_bytes + last.param_wire_bytes)
        loss = "" if self._loss is None else f"loss {self._loss:.4f}  "
        # A dense run has no target.
        is_dense = last.phase == "target" and last.density == 1.0
        phase = "nothing left out" if is_dense else _PHASES[last.phase]
        return (
            f"{loss}wire/dense {percent(last.total_wire_ratio)} ({sent})  "
            f"density {percent(last.density)} ({phase})"
        )

    def line(self) -> str:
        """Place, facts, and the parts of an iteration's time, in ASCII."""
        parts = " + ".join(f"{stage} {ms(t)}" for stage, t in self.stages().items())
        return f"{self.name}: {self.place()}  {self.facts()}  {ms(self.iteration_ms)} ms = {parts}"

    def traffic(self) -> str:
        """Formats means of the exposed communication, with its parts, and of the overlapped time.

        Such as `exposed: 12.00%, 30.00 of 250.00 ms (gradients 20.00, parameters 10.00);
        5.00 ms overlapped`, in one line.
        """
        means = self.means_ms(STEP_STAGES)
        share = percent(exposed_share(means, self.iteration_ms))
        figures = {"stage_ms_mean": means, "iteration_ms_mean": self.iteration_ms}
        overlapped = ms(self.mean_ms(lambda b: b.overlapped_ms))
        return f"exposed: {share}, {of_all(figures)}; {overlapped} ms overlapped"

    def pace(self) -> str:
        """Formats the mean time of an iteration, and tokens per second where known."""
        speed = rate(self.latest.tokens_per_s, self.latest.model_tflop_per_s)
        count = len(self._last)
        over = "so far" if count == 1 else f"mean of the last {count}"
        duration = f"an iteration takes {ms(self.iteration_ms)} ms, {over}"
        return f"{duration}  {speed}" if speed else duration


def clock(seconds: float) -> str:
    """Formats a duration: `1:52`, from an hour on `2:03:04`, from a day on `3d 04:05`.

    Example:
        >>> [clock(112), clock(7384), clock(3 * 86400 + 14700)]
        ['1:52', '2:03:04', '3d 04:05']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
