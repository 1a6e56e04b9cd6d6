"""`compression.density=auto`: which preset a run goes on with, by trials.

A model of links, codecs and overlap errs by more than presets differ. So the run tries them:
iterations are timed, whole, under each preset that `compression.loss_budget` allows, with nothing
ramped. Before, in the warm-up, every element travels in 4 bits. The one that sends least comes
first: the first one that takes far longer ends the trials, since all others send still more. Ranks
agree on the slowest rank's medians. The run goes on with the preset of the least loss whose
iterations take at most 2 % longer than the fastest, and with that preset's ramp: where
communication hides behind the backward pass anyway, gradients travel whole.

Nothing is lost when the preset changes: what one has left in the residual the next one sends.
"""

from __future__ import annotations

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
"""Before the first trial, at the warm-up's end where that lies between: steps that allocate, and
build what is built at first use; and steps after which a user wants to see the choice. Earlier, a
preset's few elements would shape Adam's first moments."""
SETTLE, TIMED = 2, 6
"""Steps of a trial that are not timed, since buffers of new sizes are made, and that are."""
TOO_SLOW = {SETTLE: 1.5, SETTLE + 1: 1.25}
"""After so many steps of a trial: it ends if their best takes so many times the fastest preset's
time."""
NO_SLOWER = 1.02
"""A preset is as good as the fastest up to this ratio; the one of less loss is then taken."""
LOOK_EVERY, DRIFT = 50, 0.25
"""Steps between looks at whether an iteration still takes what it took in the trial, and the
change that leads to new trials."""


def first_trial(compression: CompressionConfig) -> int:
    """The step, counted from 0, that the trials begin with."""
    return max(FEWEST_STEPS, min(MOST_STEPS, compression.warmup))


def steps_of_trials(compression: CompressionConfig) -> int:
    """How many steps have begun at most when the trials have ended; 0 without `density=auto`."""
    if compression.density != AUTO:
        return 0
    return first_trial(compression) + (SETTLE + TIMED) * len(allowed(compression.loss_budget))


class SettingTrials:
    """Tries the presets, and changes the configuration between two steps.

    Args:
        given: `compression` as the user gave it, `density=auto`.
        config: a copy of the user's whose density is a number, that of the first steps;
            `compression` and `scheme.sum_bits` of it are changed in place.
        planner: plans by that configuration.
        device: of the gradients; numbers are exchanged there.
        group: the ranks; None takes all.
        clock: seconds; tests have their own.

    Attributes:
        chosen: the preset that the run goes on with; None before the trials have ended.
        times_ms: milliseconds of an iteration under each preset that was tried, in that order.
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
        self._names = allowed(given.loss_budget)
        """The least loss first."""
        self._on_trial: str | None = None  # the preset that is being tried
        self._ended_s: float | None = None  # when the last iteration ended
        # Seconds of iterations, cleared when the preset changes and after each look at them.
        self._laps_s: list[float] = []
        self._look_after = LOOK_EVERY
        self.chosen: str | None = None
        self.times_ms: dict[str, float] = {}
        # Until the trials every element travels, in few bits if the budget allows the second
        # preset. Where the user's warm-up is shorter than that (most often there is none), these
        # steps count as a trial, in none of the run's own phases: without warm-up and ramp.
        first = self._names[min(1, len(self._names) - 1)]
        self._apply(first, is_trial=given.warmup < FEWEST_STEPS)
        self._no_trials = self._why_no_trials()
        if self._no_trials is not None:
            # The one that sends least: nothing may depend on timing.
            self._choose(0, self._names[-1], f"no trials: {self._no_trials}")

    def step_ended(self, step: int) -> None:
        """Times the step that has ended; begins trials, ends one, or looks again, if it is time.

        Call it between two steps, on every rank; collective in steps that end a trial.

        Args:
            step: the next step, counted from 0.
        """
        if self._no_trials is not None:
            return
        if not self._planner.enabled:
            # Switched off, every preset is dense: such steps say nothing about any of them.
            self._laps_s.clear()
            self._ended_s = None
            return
        if self.chosen is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now_s = self._clock()
        if self._ended_s is not None:
            self._laps_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        if self._on_trial is not None:
            self._end_trial_if_done(step, self._on_trial)
        elif self.chosen is not None:
            self._look_again(step)
        elif step >= first_trial(self._given):
            self._try_all()

    def _try(self, name: str) -> None:
        self._on_trial = name
        self._laps_s.clear()
        self._apply(name, is_trial=True)

    def _try_all(self) -> None:
        self.chosen, self.times_ms = None, {}
        self._try(self._names[-1])

    def _end_trial_if_done(self, step: int, name: str) -> None:
        """Goes from one trial to the next, and from the last one to the choice.

        Names are tried from the last to the first. One that is much slower than the best so far is
        the last trial: the names before it send still more. Ranks agree on the numbers.
        """
        laps_s = self._laps_s
        too_slow = TOO_SLOW.get(len(laps_s))
        if too_slow is not None and self.times_ms:
            (least_ms,) = self._maxima([1e3 * min(laps_s)])
            if least_ms > too_slow * min(self.times_ms.values()):
                self.times_ms[name] = least_ms
                self._decide(step)
        elif len(laps_s) == SETTLE + TIMED:
            (self.times_ms[name],) = self._maxima([1e3 * median(laps_s[SETTLE:])])
            following = self._names.index(name) - 1
            if following >= 0:
                self._try(self._names[following])
            else:
                self._decide(step)

    def _decide(self, step: int) -> None:
        """Ends the trials with the preset of the least loss that is as good as the fastest."""
        self._on_trial = None
        most_ms = NO_SLOWER * min(self.times_ms.values())
        # Names begin with the least loss; a preset that was not tried counts as too slow.
        good = [name for name in self._names if self.times_ms.get(name, math.inf) <= most_ms]
        name = good[0]
        took = ", ".join(f"{tried} {time_ms:.0f}" for tried, time_ms in self.times_ms.items())
        self._choose(step, name, f"milliseconds of an iteration: {took}")

    def _look_again(self, step: int) -> None:
        """Starts new trials if an iteration's time has changed by more than `DRIFT` on any rank."""
        phase, _ = phase_and_density(self._config.compression, step - 1)
        if phase not in (Phase.TARGET, Phase.OFF):
            self._laps_s.clear()  # Warm-up and ramp send more than the trial did.
        if len(self._laps_s) < self._look_after:
            return
        taken_ms = 1e3 * median(self._laps_s)
        self._laps_s.clear()
        # A checkpoint of a run without trials has no time of its preset: the first look sets it.
        ratio = taken_ms / self.times_ms.setdefault(str(self.chosen), taken_ms)
        # The ranks' largest and, by its sign, their least ratio.
        most, minus_least = self._maxima([ratio, -ratio])
        if most > 1 + DRIFT or -minus_least < 1 - DRIFT:
            # The next look comes later: a run whose times keep changing shall not spend it trying.
            self._look_after *= 2
            self._try_all()

    def _choose(self, step: int, name: str, reason: str) -> None:
        """The run goes on with a preset."""
        self.chosen = name
        self._laps_s.clear()
        self._apply(name, is_trial=False)
        if dist.get_rank(self._group) == 0:
            logger.info("step %d: preset %s (%s)", step, name, reason)

    def _why_no_trials(self) -> str | None:
        """Why nothing is tried, in words; None if there are several presets to try."""
        if len(self._names) == 1:
            return f"compression.loss_budget={self._given.loss_budget:g} allows no other"
        if self._config.scheme.deterministic:
            return "scheme.deterministic=true takes no decision from timing"
        return None

    def _apply(self, name: str, *, is_trial: bool) -> None:
        """Sets what the preset says; a trial is at its target density at once."""
        compression, values = self._config.compression, preset_values(name)
        compression.enabled = True  # unless the preset says otherwise
        for key, value in values["compression"].items():
            setattr(compression, key, value)
        for key, value in values.get("scheme", {}).items():
            setattr(self._config.scheme, key, value)
        warmup, ramp = (0, 0) if is_trial else (self._given.warmup, self._given.ramp_iters)
        compression.warmup_iters = warmup
        compression.ramp_iters = ramp
        if ramp is None:  # Of the run's length, of which the warm-up is a twentieth.
            compression.ramp_iters = compression.in_run_of(20 * warmup).ramp
        self._planner.is_trial = is_trial
        self._planner.replan()

    def _maxima(self, values: Sequence[float]) -> list[float]:
        """The largest of every value over the ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; empty before the trials have ended."""
        return {} if self.chosen is None else {"chosen": self.chosen, "times_ms": self.times_ms}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Goes on with the preset of the result of `state_dict`, if the budget still allows it."""
        if state.get("chosen") in self._names:
            self._on_trial, self.times_ms = None, dict(state["times_ms"])
            self._choose(step, state["chosen"], "of the checkpoint")
