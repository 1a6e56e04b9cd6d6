"""Settings that change while a run goes on.

`compression.density=auto`: what is tried, what is chosen, and when it is tried again; and
`set_density`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.reduction import host_state, setting_trials
from megatron_sparse.reduction.setting_trials import (
    FEWEST_STEPS,
    LOOK_EVERY,
    MOST_STEPS,
    SETTLE,
    TIMED,
    SettingTrials,
)
from tests.planner.planned import a_bucket, a_planner

TRIAL = SETTLE + TIMED
FIRST_STEP = 10
LENGTHS = {"warmup_iters": FIRST_STEP, "ramp_iters": None}


class Run:
    """Steps of a run whose iterations take what its present preset takes, on two ranks."""

    def __init__(self, times_ms, other_ms=None, *, state=None, **settings):
        given, self.config = (SparseConfig.preset("auto", **LENGTHS | settings) for _ in range(2))
        self.config.compression.density = given.compression.given_density
        self.planner = planner_of(self.config, logs=False)
        self.now_s, self.step = 0.0, 0
        self.times_ms, self.other_ms = times_ms, other_ms or times_ms
        what = given.compression, self.config, self.planner, torch.device("cpu")
        self.trials = SettingTrials(*what, clock=lambda: self.now_s)
        if state is not None:
            self.trials.load_state_dict(state, 100)

    @property
    def preset(self):
        """The one that the configuration's values are of."""
        compression = self.config.compression
        if not compression.enabled:
            return "lossless"
        of = {1: "quantised", 0.22: "safe", 0.07: "balanced", 0.015: "extreme"}
        return of[compression.density]

    def train(self, steps):
        """The presets of so many steps."""
        seen = []
        for _ in range(steps):
            seen.append(self.preset)
            self.now_s += self.times_ms[self.preset] / 1e3
            self.step += 1
            self.trials.step_ended(self.step)
        return seen

    def plan(self):
        return self.planner.plan_for(a_bucket(), self.step)


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    """The other rank takes as long, unless a test puts larger numbers here."""
    others = []

    def all_reduce(found, op, group):
        if others:
            found.copy_(torch.maximum(found, torch.tensor(others.pop(0), dtype=found.dtype)))

    monkeypatch.setattr(setting_trials.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(setting_trials.dist, "get_rank", lambda group: 0)
    return others


ALLOWED = setting_trials.allowed(0.3)


def trials_of(times_ms, names):
    """The steps of the trials: what sends least comes first, and what is too slow ends them."""
    steps, best_ms = [], float("inf")
    for name in reversed(names):
        for laps, times in setting_trials.TOO_SLOW.items():
            if times_ms[name] > times * best_ms:
                return steps + [name] * laps
        steps += [name] * TRIAL
        best_ms = min(best_ms, times_ms[name])
    return steps


SLOW_LINK = {"lossless": 900, "quantised": 260, "safe": 210, "balanced": 150, "extreme": 130}
FAST_LINK = {"lossless": 100, "quantised": 104, "safe": 130, "balanced": 125, "extreme": 120}


@pytest.mark.parametrize(
    ("times_ms", "budget", "chosen"),
    [
        (SLOW_LINK, 0.3, "safe"),
        (SLOW_LINK, 1, "balanced"),
        (SLOW_LINK, 2.5, "extreme"),
        (FAST_LINK, 2.5, "lossless"),
        # 2 % faster is not worth more loss.
        (SLOW_LINK | {"quantised": 214}, 0.3, "quantised"),
        (SLOW_LINK | {"quantised": 215}, 0.3, "safe"),
    ],
)
def test_the_fastest_that_the_budget_allows(times_ms, budget, chosen):
    run = Run(times_ms, loss_budget=budget)
    names = setting_trials.allowed(budget)
    trials = trials_of(times_ms, names)
    seen = run.train(FIRST_STEP + len(trials) + 1)
    assert seen[:FIRST_STEP] == ["quantised"] * FIRST_STEP
    assert seen[FIRST_STEP:-1] == trials
    assert (run.trials.chosen, seen[-1], run.preset) == (chosen, chosen, chosen)
    assert run.trials.times_ms == {name: pytest.approx(times_ms[name]) for name in trials}


def test_the_slowest_rank_counts(ranks):
    # safe's trial; the first steps of quantised's, looked at twice, and its whole; lossless
    ranks += [[300], *[[0]] * 6]
    run = Run(SLOW_LINK)
    run.train(FIRST_STEP + TRIAL * 3)
    assert run.trials.chosen == "quantised"
    assert run.trials.times_ms["safe"] == 300


def test_one_slow_step_does_not_end_a_trial():
    run = Run(dict(FAST_LINK))
    run.train(FIRST_STEP + TRIAL)
    run.times_ms["quantised"] = 900
    run.train(1)
    run.times_ms["quantised"] = FAST_LINK["quantised"]
    run.train(TRIAL - 1)
    assert run.trials.times_ms["quantised"] == pytest.approx(FAST_LINK["quantised"])


def test_values_and_sums_are_those_of_the_preset_and_trials_have_no_ramp():
    times_ms = {"lossless": 180, "quantised": 170, "safe": 160, "balanced": 150}
    run = Run(times_ms, loss_budget=1)
    run.train(FIRST_STEP)
    found = []
    for name in ("balanced", "safe", "quantised", "lossless"):
        assert run.preset == name
        plan = run.plan()
        bits = run.config.scheme.sum_bits
        found.append((plan.phase, plan.scheme, plan.density, plan.value_bits, bits))
        run.train(TRIAL)
    assert found == [
        (Phase.TRIAL, "agsparse", 0.07, 3, 4),
        (Phase.TRIAL, "agsparse", 0.22, 4, 8),
        (Phase.TRIAL, "dense_q", 1.0, 4, 8),
        (Phase.OFF, "dense", 1.0, None, 8),
    ]
    # balanced: a long ramp, 70 % of a run of which 5 % are 10 steps.
    assert (run.config.compression.warmup_iters, run.config.compression.ramp_iters) == (10, 140)
    assert (run.step, run.plan().phase) == (42, Phase.RAMP)


def test_every_element_in_4_bits_has_no_target_below_1():
    run = Run(SLOW_LINK | {"safe": 300})
    run.train(200)
    plan = run.plan()
    assert (plan.scheme, plan.phase, plan.density) == ("dense_q", Phase.TARGET, 1.0)
    assert plan.reason == "every element in 4 bits"


def test_new_trials_when_an_iteration_takes_a_quarter_longer_or_less():
    run = Run(dict(SLOW_LINK), warmup_iters=0)
    run.train(FEWEST_STEPS + len(trials_of(SLOW_LINK, ALLOWED)) + LOOK_EVERY - 1)
    run.times_ms.update(FAST_LINK)
    assert set(run.train(1)) == {"safe"}  # Most of the window took what the trial took.
    run.train(LOOK_EVERY)
    assert (run.preset, run.trials.chosen) == ("safe", None)
    run.train(3 * TRIAL)
    assert run.trials.chosen == "lossless"
    # The next look comes after twice as many steps.
    run.times_ms.update(SLOW_LINK)
    assert set(run.train(2 * LOOK_EVERY)) == {"lossless"}
    assert run.trials.chosen is None


def test_steps_that_are_switched_off_say_nothing_about_presets():
    run = Run({"lossless": 100, "quantised": 60, "safe": 30})
    assert run.train(100)[-1] == "safe"
    run.planner.enabled = False
    times_ms, run.times_ms = run.times_ms, dict.fromkeys(run.times_ms, 100)
    run.train(200)
    run.planner.enabled, run.times_ms = True, times_ms
    assert run.train(200)[-1] == "safe"


def test_warm_up_and_ramp_are_no_reason_for_new_trials():
    run = Run(dict(SLOW_LINK), warmup_iters=300)
    seen = run.train(MOST_STEPS + 3 * TRIAL)
    assert seen[: MOST_STEPS + 1] == ["quantised"] * MOST_STEPS + ["safe"]
    run.times_ms["safe"] = 260  # as long as every element takes
    assert set(run.train(300 + 600 - run.step)) == {"safe"}
    run.times_ms["safe"] = 210
    assert set(run.train(3 * LOOK_EVERY)) == {"safe"}


def test_nothing_is_tried_where_nothing_may_depend_on_timing():
    run = Run(SLOW_LINK, deterministic=True, loss_budget=1)
    assert run.trials.chosen == "balanced"
    assert set(run.train(100)) == {"balanced"}


def test_without_a_budget_there_is_one():
    run = Run(FAST_LINK, loss_budget=0)
    assert set(run.train(100)) == {"lossless"}


def test_a_resumed_run_goes_on_with_its_preset():
    run = Run(SLOW_LINK)
    assert run.trials.state_dict() == {}
    run.train(FIRST_STEP + 3 * TRIAL)
    again = Run(SLOW_LINK, state=run.trials.state_dict())
    assert (again.preset, again.trials.times_ms) == ("safe", run.trials.times_ms)
    assert set(again.train(20)) == {"safe"}
    untried = Run(SLOW_LINK, state={"chosen": "safe", "times_ms": {}})
    assert set(untried.train(2 * LOOK_EVERY)) == {"safe"}
    # A smaller budget tries again.
    assert Run(SLOW_LINK, state=run.trials.state_dict(), loss_budget=0).preset == "lossless"


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "coo"},
        {"scheme": "zen"},
        {"value_bits": None},
        {"value_bits": None, "format": "rice", "sum_bits": 8},
        {"sum_bits": None},
    ],
)
def test_presets_need_values_in_few_bits(settings):
    with pytest.raises(ConfigError, match="name a density"):
        SparseConfig.preset("auto", **settings)


RAMP = {"warmup_iters": 10, "ramp_iters": 10}


class TestChangeDensity:
    """Its refusals, and that the planner chooses anew."""

    @pytest.fixture(autouse=True)
    def lone_rank(self, monkeypatch):
        """`test_attach_core` has ranks that disagree."""
        monkeypatch.setattr(host_state.dist, "get_world_size", lambda group: 1)

        def all_gather(found, own, group):
            found[0].copy_(own)

        monkeypatch.setattr(host_state.dist, "all_gather", all_gather)

    def changed(self, density, step=100, **settings):
        at_once = {"density": 0.01, "warmup_iters": 0, "ramp_iters": 0}
        config = SparseConfig.from_overrides(**{"scheme": "agsparse"} | at_once | settings)
        planner = planner_of(config, logs=False)
        rest = {"trials": None, "step": step, "_device": torch.device("cpu"), "_group": None}
        state: Any = SimpleNamespace(config=config, planner=planner, **rest)
        host_state.HostState.set_density(state, density)
        return config, planner

    @pytest.mark.parametrize("density", [0.0, 1.5, -0.1, float("nan"), "0.1", None, True])
    def test_a_value_that_is_no_density(self, density):
        with pytest.raises(ConfigError, match=r"compression\.density"):
            self.changed(density)

    @pytest.mark.parametrize("step", [10, 19])
    def test_a_change_during_the_ramp_is_refused(self, step):
        with pytest.raises(ConfigError, match="cannot be changed now") as caught:
            self.changed(0.1, step, **RAMP)
        assert "from step 20 on" in str(caught.value)

    @pytest.mark.parametrize("step", [0, 9, 20])
    def test_before_a_ramp_and_after_it(self, step):
        config, planner = self.changed(0.1, step, **RAMP)
        assert config.compression.density == 0.1
        plan = planner.plan_for(a_bucket(), 20)
        assert (plan.phase, plan.density) == (Phase.TARGET, 0.1)

    def test_another_target_leaves_the_schedule_as_it_was(self):
        """Also of `ramp_iters=null`, of which a low density has a longer one."""
        config, _ = self.changed(0.3, 2800, warmup_iters=None, ramp_iters=None)
        assert (config.compression.warmup, config.compression.ramp) == (500, 2300)

    def test_a_planner_that_prices_chooses_anew(self):
        """At 1 % compression pays on this network; at 90 % dense is faster."""
        planner, bucket = a_planner(scheme={"name": "auto"}), a_bucket(torch.zeros(2**22))
        assert not planner.plan_for(bucket, 0).scheme.startswith("dense")
        planner._compression.density = 0.9
        assert not planner.plan_for(bucket, 1).scheme.startswith("dense"), "it keeps its choice"
        planner.replan()
        assert planner.report(bucket, 1)["chosen"].startswith("dense")
