"""The planner that chooses by predicted time: choices, hysteresis, state, errors."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.collectives.registry import candidates, check
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import PlannerConfig, SparseConfig
from megatron_sparse.errors import CheckpointError, ConfigError
from megatron_sparse.planner import Planner, choice
from megatron_sparse.planner.choice import Pace, PricedPlanner
from megatron_sparse.planner.configured import planner_of, with_swept_thresholds
from megatron_sparse.planner.plan_state import read_plan
from megatron_sparse.pricing.cluster import find
from megatron_sparse.simulate.gradients import uniform
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.overlaps import FullyOverlapping
from tests.planner.planned import NUMEL, Ranks, a_bucket, a_planner
from tests.ranks import run_ranks
from tests.records import Kept
from tests.reduction.reducers import reducer_over_gloo, residual_of


@pytest.fixture
def prices(monkeypatch):
    """Predicted microseconds by scheme, as the test sets them."""
    stated = {"dense": 100.0, "agsparse": 50.0, "direct": 60.0, "ssar_rd": 70.0}
    monkeypatch.setattr(choice, "prices_us", lambda *_, **__: dict(stated))
    return stated


def plan(planner, step=0, **bucket):
    return planner.plan_for(a_bucket(**bucket), step)


def test_the_least_predicted_time_wins_and_the_reason_names_the_others(prices):
    found = plan(a_planner())
    assert (found.scheme, found.predicted_us) == ("agsparse", 50.0)
    assert "dense 100 us" in found.reason
    assert "assumed uniform" in found.reason
    prices["dense_rhd"] = 20.0  # for any overlap
    found = plan(a_planner())
    assert (found.scheme, found.density, found.sharded) == ("dense_rhd", 1.0, False)


def test_the_warmup_is_dense_and_one_rank_sends_nothing(prices):
    planner = a_planner(compression={"warmup_iters": 2})
    assert [plan(planner, step).scheme for step in range(3)] == ["dense", "dense", "agsparse"]
    assert plan(planner, 0).phase is Phase.WARMUP
    assert plan(a_planner(), world_size=1).scheme == "dense"


def test_a_small_gain_does_not_change_the_scheme_and_a_large_one_does(prices, caplog):
    caplog.set_level(logging.INFO, "megatron_sparse")
    ranks = Ranks(profile_every=1, hysteresis=0.1)

    def gradients(density):
        return [uniform(NUMEL, density).gradient(rank) for rank in range(4)]

    assert ranks.step(0, gradients(0.01)) == "agsparse"
    prices["direct"] = 46.0  # 8 % less
    ranks.step(1, gradients(0.02))
    assert ranks.step(2, gradients(0.03)) == "agsparse"
    prices["direct"] = 44.0  # 12 % less
    assert ranks.step(3, gradients(0.03)) == "agsparse"
    assert ranks.step(4, gradients(0.04)) == "agsparse", "what has not changed is not priced"
    assert ranks.step(5, gradients(0.04)) == "direct", "from the next step on"
    assert "step 4: bucket b: agsparse -> direct" in caplog.text


def test_ranks_sample_the_same_profile_and_state(prices):
    ranks = Ranks()
    model = FullyOverlapping(NUMEL, 0.02)
    ranks.step(0, [model.gradient(rank) for rank in range(4)])
    states = [planner.state_dict() for planner in ranks.planners]
    assert all(state == states[0] for state in states)
    profile = states[0]["buckets"]["b"]["profile"]
    assert profile["density"] == pytest.approx(0.02, rel=0.01)  # as many rows as there are
    assert profile["densification"]["4"] == pytest.approx(1.0)
    assert "sampled" in ranks.planners[0].report(a_bucket(), 1)["reason"]


def test_a_dense_bucket_goes_sparse_to_be_sampled_unless_overlap_would_not_help(monkeypatch):
    """Sparse costs 50 us if all ranks overlap, else 150; later always 150."""
    gains = [True]

    def stated(shape, profile, **_):
        overlaps = profile.densification[4] == 1.0
        return {"dense": 100.0, "direct": 50.0 if overlaps and gains[0] else 150.0}

    monkeypatch.setattr(choice, "prices_us", stated)
    every = {"profile_iters": 1, "profile_every": 5}
    disjoint = [uniform(NUMEL, 0.01).gradient(rank) for rank in range(4)]
    ranks = Ranks(**every)
    found = [ranks.step(step, disjoint) for step in range(7)]
    assert found == ["direct", *["dense"] * 4, "direct", "dense"]
    ranks = Ranks(**every)
    same = [disjoint[0]] * 4
    assert [ranks.step(step, same) for step in range(3)] == ["direct"] * 3
    gains[0] = False
    ranks = Ranks(**every)
    assert [ranks.step(step, same) for step in range(7)] == ["dense"] * 7


def test_a_resumed_planner_decides_alike(prices):
    gradients = [uniform(NUMEL, 0.01).gradient(rank) for rank in range(4)]
    ranks = Ranks()
    for step in range(15):
        ranks.step(step, gradients)
    resumed = Ranks()
    for before, after in zip(ranks.planners, resumed.planners, strict=True):
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.state_dict() == before.state_dict()
    assert [resumed.step(s) for s in range(15, 20)] == [ranks.step(s) for s in range(15, 20)]


def test_saved_state_of_another_model_or_group_is_not_used(prices, caplog, monkeypatch):
    first = a_planner()
    plan(first)
    other = a_planner()
    other.load_state_dict(first.state_dict())
    assert plan(other, world_size=8).scheme == "agsparse"
    assert "bucket b is planned anew" in caplog.text
    changed = a_planner(hysteresis=0.2)
    changed.load_state_dict(first.state_dict())
    assert "settings have changed" in caplog.text
    assert changed.state_dict()["buckets"]["b"]["chosen"] is None
    moved = a_planner()
    moved.load_state_dict(first.state_dict())
    moved.join(VirtualCluster(4, Topology.even(4, 2, Link(0, 0), Link(0, 0))).transports[0])
    plan(moved)
    assert moved.state_dict()["buckets"]["b"]["nodes"] == [2, 2]
    narrow = a_planner(scheme={"wire_dtype": "bf16"})
    narrow.load_state_dict(first.state_dict())
    assert narrow.state_dict()["buckets"]["b"]["chosen"] is None
    saved = first.state_dict()
    left = [name for name in candidates() if name != plan(first).scheme]
    monkeypatch.setattr("megatron_sparse.collectives.registry.candidates", lambda: left)
    without = a_planner()
    without.load_state_dict(saved)
    assert without.state_dict()["buckets"]["b"]["chosen"] is None


def test_a_ramp_from_every_element_ends_sparse():
    planner = a_planner(compression={"ramp_iters": 40, "ramp_start_density": 1.0})
    large = torch.zeros(2**20)
    assert plan(planner, 0, grad_N=large).scheme.startswith("dense")
    assert not plan(planner, 40, grad_N=large).scheme.startswith("dense")


def test_a_group_is_priced_on_its_own_nodes():
    inside = a_planner("ethernet_25gbit_8", compression={"density": 0.05})
    across = a_planner("ethernet_25gbit_8", compression={"density": 0.05})
    across.join(VirtualCluster(8, Topology.even(8, 1, Link(0, 0), Link(0, 0))).transports[0])
    bucket = a_bucket(torch.zeros(2**22), 8, op=CollectiveOp.REDUCE_SCATTER)
    assert inside.plan_for(bucket, 0).scheme.startswith("dense"), "of 8 in each node of the file"
    assert not across.plan_for(bucket, 0).scheme.startswith("dense")
    assert inside.report(bucket, 0)["density"] == 0.05, "with which schemes were compared"


@pytest.mark.parametrize("damage", [{"buckets": {"b": {"numel": 3}}}, {"buckets": 7}, {"basis": 1}])
def test_a_damaged_state_is_one_error(damage):
    with pytest.raises(CheckpointError, match="damaged"):
        a_planner().load_state_dict(damage)


@pytest.mark.parametrize("text", [None, "", "{}", '{"buckets": [{}]}', '{"buckets": [3]}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="is no plan"):
        read_plan(path)


def test_the_configuration_says_which_planner():
    assert type(planner_of(SparseConfig(), logs=False)) is Planner
    priced = SparseConfig.from_overrides(planner=PlannerConfig(cluster="perlmutter"))
    assert isinstance(planner_of(priced, logs=False), choice.PricedPlanner)
    fixed = SparseConfig.from_overrides(scheme="direct", planner=priced.planner)
    assert type(planner_of(fixed, logs=False)) is Planner


def test_swept_thresholds_are_taken_where_none_are_given(tmp_path):
    swept = replace(find("perlmutter"), ring_densities={"pici": (0.1, 0.2, 0.3)})
    path = tmp_path / "cluster.yaml"
    swept.save(path, "a test")
    section = PlannerConfig(cluster=str(path))

    def densities(**overrides):
        config = SparseConfig.from_overrides(planner=section, **overrides)
        return with_swept_thresholds(config).scheme.ring_densities()

    assert densities() == (0.1, 0.2, 0.3)
    assert densities(format="coo") == (0.3, 0.4, 0.5), "SpCCL's: not swept"
    assert densities(ring_intra_density=0.7)[0] == 0.7
    assert with_swept_thresholds(SparseConfig()) == SparseConfig()


@pytest.mark.parametrize("schemes", [["magic"], [], ["straggler"]])
def test_wrong_settings_are_refused(schemes):
    with pytest.raises(ConfigError, match=r"planner\.schemes"):
        check(SparseConfig(planner=PlannerConfig(schemes=schemes)))


def test_only_candidates_are_chosen_and_dense_always_is_one():
    planner = a_planner(schemes=["ssar_rd", "zen"])
    assert set(planner.report(a_bucket(), 0)["predicted_us"]) == {"dense", "ssar_rd", "zen"}
    assert planner.plan_for(a_bucket(torch.zeros(NUMEL)), 0).scheme in ("dense", "ssar_rd", "zen")


def _train(rank, world_size, steps):
    """The whole data path with a model cluster on gloo: plans, predictions, sums."""
    import torch.distributed as dist

    section = PlannerConfig(cluster="ethernet_25gbit")
    times = {"warmup_iters": 2, "ramp_iters": 0, "timeout_s": 30.0}
    config = SparseConfig.from_overrides(density=0.02, planner=section, **times)
    pace = Pace(profile_iters=1)
    sections = config.compression, config.scheme, section
    planner = PricedPlanner(*sections, find(section.cluster), logs=False, pace=pace)
    sink, errors = Kept(), []
    with reducer_over_gloo(config, sink, is_reported=False, planner=planner) as reducer:
        for step in range(steps):
            pending = []
            for name, numel in (("large", 2**18), ("small", 2**10)):
                generator = torch.Generator().manual_seed(1000 * step + rank)
                grad_N = torch.randint(-7, 8, (numel,), generator=generator).float()
                bucket = a_bucket(grad_N.clone(), world_size, name)
                before_N = residual_of(reducer, bucket)
                pending.append((bucket, grad_N + before_N, reducer.start(bucket, step)))
            for bucket, given_N, handle in pending:
                handle.wait()
                sent_N = given_N - residual_of(reducer, bucket)
                dist.all_reduce(sent_N)
                errors.append((bucket.grad_N - sent_N).abs().max().item())
    records = sink.buckets
    sparse = sum(SCHEMES[record.scheme].takes is Input.SPARSE for record in records)
    found = [(r.bucket, r.step, r.scheme, r.predicted_us) for r in records]
    return found, planner.state_dict(), max(errors), sparse


def test_two_gloo_ranks_plan_alike_and_sum_exactly():
    (found, state, error, sparse), other = run_ranks(_train, 2, 10)
    assert (found, state) == other[:2]
    assert max(error, other[2]) == 0.0, "small integers"
    assert sparse > 0, "the large bucket is worth it at 25 Gbit/s"
    for _, step, _, predicted_us in found:
        assert (predicted_us is not None) == (step >= 2), "the warm-up is not predicted"
    assert state["buckets"]["large"]["profile"]["density"] > 0


def test_a_group_within_a_host_is_priced_there_by_a_file_of_several():
    planner = a_planner(compression={"density": 0.1, "value_bits": None}, schemes=["direct"])
    measured = {"nodes": (2, 2), "fingerprint": {"hosts": "several"}}
    planner._cluster = replace(find("ethernet_25gbit_8"), **measured)
    planner._joined = True  # the fingerprint fits
    planner.join(VirtualCluster(4).transports[0])
    planner.plan_for(a_bucket(torch.zeros(2**22)), 0)
    predicted_us = planner.state_dict()["buckets"]["b"]["predicted_us"]
    assert predicted_us["dense"] < 1000, "on the network 8233"


def test_a_ramp_from_every_element_begins_in_few_bits():
    config = SparseConfig.from_overrides(warmup_iters=0, ramp_iters=4, ramp_start_density=1.0)
    planner = Planner(config.compression, config.scheme)
    assert planner.plan_for(a_bucket(), 0).scheme == "dense_q"
