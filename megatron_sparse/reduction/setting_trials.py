"""`compression.density=auto`: chooses a run's preset by trials.

A preset is a named set of compression settings; presets differ in the bytes that they send and in
the loss that they cost. Modelled times err by more than presets differ. So the run times whole
iterations under each preset that `compression.loss_budget` allows (a trial), without a ramp of the
density. Trials begin with the preset that sends least; the first one that is far slower ends them,
since the presets after it send still more. All ranks use the slowest rank's medians. The run then
takes the preset of the least loss whose iterations take at most 2 % longer than the fastest, with
its ramp: if communication is hidden by the backward pass anyway, all elements are sent.

Before the trials every element is sent, in 4 bits if the budget allows. A change of preset loses
nothing: the next preset sends what the one before has left in the residual.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.config.presets import allowed, preset_values
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.planner import Planner

logger = logging.getLogger("megatron_sparse")

AUTO = "auto"
FEWEST_STEPS, MOST_STEPS = 3, 50
"""Limits of the steps before the first trial, which begins at the warm-up's end. The first steps
allocate, and build what is built at first use; and a sparse preset would distort Adam's first
moments. After the last, users expect the choice."""
SETTLE, TIMED = 2, 6
"""Steps of a trial: untimed ones, which allocate buffers of new sizes, then timed ones."""
TOO_SLOW = {SETTLE: 1.5, SETTLE + 1: 1.25}
"""Steps of a trial -> ratio: after so many steps it ends early if its fastest step takes more than
this many times the time of the fastest preset."""
NO_SLOWER = 1.02
"""Presets up to this many times the fastest one's time are as good as that one."""
LOOK_EVERY, DRIFT = 50, 0.25
"""Steps between checks of whether an iteration takes as long as in the trial, and the relative
change that starts new trials."""


def first_trial(compression: CompressionConfig) -> int:
    """The step, counted from 0, in which the trials begin."""
    return max(FEWEST_STEPS, min(MOST_STEPS, compression.warmup))


def steps_of_trials(compression: CompressionConfig) -> int:
    """The most steps that a run takes to the end of the trials; 0 without `density=auto`."""
    if compression.density != AUTO:
        return 0
    return first_trial(compression) + (SETTLE + TIMED) * len(allowed(compression.loss_budget))


class SettingTrials:
    """Tries the presets, and changes the configuration between two steps.

    Args:
        given: `compression` as the user configured it, with `density=auto`.
        config: a copy of the user's configuration, with a number as the density of the first steps.
            `compression` and `scheme.sum_bits` are changed in place.
        planner: plans by that configuration.
        device: of the gradients; ranks exchange times there.
        group: the ranks; None takes all.
        clock: returns seconds; tests replace it.

    Attributes:
        chosen: the preset that the run uses; None before the trials have ended.
        times_ms: preset -> milliseconds of an iteration, in the order of the trials.
    """

    def __init__(
        self,
        given: CompressionConfig,
        config: SparseConfig,
        planner: Planner,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._given = given
        self._config = config
        self._planner = planner
        self._device = device
        self._group = group
        self._clock = clock
        # Presets that the loss budget allows: from the least loss to the least bytes.
        self._names = allowed(given.loss_budget)
        self._on_trial: str | None = None  # the preset that is being tried
        self._ended_s: float | None = None  # when the last iteration ended
        # Seconds of iterations; cleared when the preset changes and after each check.
        self._times_s: list[float] = []
        self._check_after = LOOK_EVERY  # the iterations that `_check_drift` waits for
        self.chosen: str | None = None
        self.times_ms: dict[str, float] = {}
        # Before the trials the run uses the second preset, which sends every element in 4 bits (or
        # the first, if the budget allows no other). A warm-up shorter than FEWEST_STEPS would end
        # before the trials, and a ramp could begin: so these steps count as a trial, with neither.
        first = self._names[min(1, len(self._names) - 1)]
        self._apply(first, is_trial=given.warmup < FEWEST_STEPS)
        self._no_trials = self._why_no_trials()
        if self._no_trials is not None:
            # The preset that sends least, because no time is known.
            self._choose(0, self._names[-1], f"no trials: {self._no_trials}")

    def step_ended(self, step: int) -> None:
        """Times the step that has ended; then starts or ends a trial, if one is due.

        Call it between two steps, on every rank. In some steps, the same on all ranks, it is
        collective.

        Args:
            step: the next step, counted from 0.
        """
        if self._no_trials is not None:
            return
        if not self._planner.enabled:
            # Compression is switched off: all presets would take the same time.
            self._times_s.clear()
            self._ended_s = None
            return
        if self.chosen is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # exact times; after the trials it would cost time
        now_s = self._clock()
        if self._ended_s is not None:
            self._times_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        if self._on_trial is not None:
            self._end_trial_if_done(step, self._on_trial)
        elif self.chosen is not None:
            self._check_drift(step)
        elif step >= first_trial(self._given):
            self._try_all()

    def _try(self, name: str) -> None:
        self._on_trial = name
        self._times_s.clear()
        self._apply(name, is_trial=True)

    def _try_all(self) -> None:
        """Begins the trials, with the preset that sends least."""
        self.chosen, self.times_ms = None, {}
        self._try(self._names[-1])

    def _end_trial_if_done(self, step: int, name: str) -> None:
        """Ends the trial of preset `name` if it has had its steps; begins the next, or chooses.

        Presets are tried from the last name to the first. If one is far slower than the fastest so
        far, the trials end: the presets before it send still more. Times are the slowest rank's.
        """
        times_s = self._times_s
        too_slow = TOO_SLOW.get(len(times_s))  # None in steps without this early check
        if too_slow is not None and self.times_ms:
            (least_ms,) = self._maxima([1e3 * min(times_s)])
            if least_ms > too_slow * min(self.times_ms.values()):
                self.times_ms[name] = least_ms
                self._decide(step)
        elif len(times_s) == SETTLE + TIMED:
            (self.times_ms[name],) = self._maxima([1e3 * median(times_s[SETTLE:])])
            following = self._names.index(name) - 1
            if following >= 0:
                self._try(self._names[following])
            else:
                self._decide(step)

    def _decide(self, step: int) -> None:
        """Ends the trials; chooses, of the presets that are fast enough, that of the least loss."""
        self._on_trial = None
        most_ms = NO_SLOWER * min(self.times_ms.values())
        # A preset that was not tried is too slow.
        good = [name for name in self._names if self.times_ms.get(name, math.inf) <= most_ms]
        times = ", ".join(f"{tried} {time_ms:.0f}" for tried, time_ms in self.times_ms.items())
        self._choose(step, good[0], f"milliseconds of an iteration: {times}")  # the least loss

    def _check_drift(self, step: int) -> None:
        """Starts new trials if an iteration's time has changed by more than `DRIFT` on any rank."""
        phase, _ = phase_and_density(self._config.compression, step - 1)  # of the step just timed
        if phase not in (Phase.TARGET, Phase.OFF):
            self._times_s.clear()  # Warm-up and ramp send more than the trial did.
        if len(self._times_s) < self._check_after:
            return
        now_ms = 1e3 * median(self._times_s)
        self._times_s.clear()
        # A checkpoint of a run without trials has no time of its preset: the first check sets it.
        ratio = now_ms / self.times_ms.setdefault(str(self.chosen), now_ms)
        # The ranks' largest ratio, and (as a maximum of negated ratios) their least one, negated.
        most, minus_least = self._maxima([ratio, -ratio])
        if most > 1 + DRIFT or -minus_least < 1 - DRIFT:
            # Each time a longer interval, so that unstable times do not lead to constant trials.
            self._check_after *= 2
            self._try_all()

    def _choose(self, step: int, name: str, reason: str) -> None:
        """Applies a preset until new trials, if any, begin; rank 0 logs it with the reason."""
        self.chosen = name
        self._times_s.clear()
        self._apply(name, is_trial=False)
        if dist.get_rank(self._group) == 0:
            logger.info("step %d: preset %s (%s)", step, name, reason)

    def _why_no_trials(self) -> str | None:
        """The reason, in words, why the run has no trials; None if it has."""
        if len(self._names) == 1:
            return f"compression.loss_budget={self._given.loss_budget:g} allows no other"
        if self._config.scheme.deterministic:
            return "scheme.deterministic=true takes no decision from timing"
        return None

    def _apply(self, name: str, *, is_trial: bool) -> None:
        """Copies a preset's values to the configuration; a trial has neither warm-up nor ramp."""
        compression, values = self._config.compression, preset_values(name)
        compression.enabled = True  # a preset without this key means true
        for key, value in values["compression"].items():
            setattr(compression, key, value)
        for key, value in values.get("scheme", {}).items():
            setattr(self._config.scheme, key, value)
        warmup, ramp = (0, 0) if is_trial else (self._given.warmup, self._given.ramp_iters)
        compression.warmup_iters = warmup
        compression.ramp_iters = ramp
        if ramp is None:  # by the run's length, estimated from the usual warm-up of 5 %
            compression.ramp_iters = compression.in_run_of(20 * warmup).ramp
        self._planner.is_trial = is_trial
        self._planner.replan()

    def _maxima(self, values: Sequence[float]) -> list[float]:
        """For each value the largest over all ranks. Collective."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def state_dict(self) -> dict[str, Any]:
        """The choice, for a checkpoint; empty before the trials have ended."""
        return {} if self.chosen is None else {"chosen": self.chosen, "times_ms": self.times_ms}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Applies the preset that `state_dict` has saved, if the budget still allows it."""
        if state.get("chosen") in self._names:
            self._on_trial, self.times_ms = None, dict(state["times_ms"])
            self._choose(step, state["chosen"], "of the checkpoint")
