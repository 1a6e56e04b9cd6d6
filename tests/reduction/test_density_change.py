"""`set_density`: its refusals, and that the planner chooses anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.reduction import host_state
from tests.planner.planned import a_bucket, a_planner

RAMP = {"warmup_iters": 10, "ramp_iters": 10}


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """Replaces the other rank, which asks for this density; None asks for the same."""
    wanted = [None]

    def all_gather(found, own, group):
        found[0].copy_(own)
        found[1].copy_(own if wanted[0] is None else torch.tensor([wanted[0]]))

    monkeypatch.setattr(host_state.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(host_state.dist, "all_gather", all_gather)
    return wanted


def changed(density, step=100, **settings):
    given = {"density": 0.01, "scheme": "agsparse", "warmup_iters": 0, "ramp_iters": 0} | settings
    config = SparseConfig.from_overrides(**given)
    planner = planner_of(config, logs=False)
    rest = {"trials": None, "step": step, "_device": torch.device("cpu"), "_ranks": None}
    state: Any = SimpleNamespace(config=config, planner=planner, **rest)
    host_state.HostState.set_density(state, density)
    return config, planner


@pytest.mark.parametrize("density", [0.0, 1.5, -0.1, float("nan"), "0.1", None, True])
def test_a_value_that_is_no_density(density):
    with pytest.raises(ConfigError, match=r"compression\.density"):
        changed(density)


@pytest.mark.parametrize(
    ("settings", "step", "words"),
    [
        (RAMP, 10, "from step 20 on"),
        (RAMP, 19, "from step 20 on"),
        ({"scheme": "dense"}, 0, "a sparse scheme"),
        ({"scheme": "dense_ring"}, 0, "a sparse scheme"),
        ({"enabled": False}, 0, "compression.enabled=true"),
    ],
)
def test_a_change_during_the_ramp_is_refused(settings, step, words):
    with pytest.raises(ConfigError, match="cannot be changed now") as caught:
        changed(0.1, step, **settings)
    assert words in str(caught.value)


@pytest.mark.parametrize("step", [0, 9, 20])
def test_before_a_ramp_and_after_it(step):
    config, planner = changed(0.1, step, **RAMP)
    assert config.compression.density == 0.1
    plan = planner.plan_for(a_bucket(), 20)
    assert (plan.phase, plan.density) == (Phase.TARGET, 0.1)


def test_another_target_leaves_the_schedule_as_it_was():
    """Also of `ramp_iters=null`, of which a low density has a longer one."""
    config, _ = changed(0.3, 2800, warmup_iters=None, ramp_iters=None)
    assert (config.compression.warmup, config.compression.ramp) == (500, 2300)


def test_another_rank_wants_another(others):
    others[0] = 0.2
    with pytest.raises(CommunicationError, match=r"rank 0: 0\.1, rank 1: 0\.2"):
        changed(0.1)


def test_a_planner_that_prices_chooses_anew():
    """At 1 % compression pays on this network; at 90 % dense is faster."""
    planner, bucket = a_planner(scheme={"name": "auto"}), a_bucket(torch.zeros(2**22))
    assert not planner.plan_for(bucket, 0).scheme.startswith("dense")
    planner._compression.density = 0.9
    assert not planner.plan_for(bucket, 1).scheme.startswith("dense"), "it keeps its choice"
    planner.replan()
    assert planner.report(bucket, 1)["chosen"].startswith("dense")
