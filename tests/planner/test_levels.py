"""Prices of a bucket at each level, the best level, and the planner of a lane."""

import json
from dataclasses import replace

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig, SparseConfig
from megatron_sparse.planner.levels import INSTANCE, NODE, RANK, LevelPricing, inside_s
from megatron_sparse.planner.plan_rows import Pricing, of_run
from megatron_sparse.planner.plan_state import BucketState
from megatron_sparse.planner.prices import predict, prior
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport import Link
from tests.planner.planned import a_bucket
from tests.reduction.virtual_level import VirtualRanks

CLUSTER = find("ethernet_25gbit_8")
OPTIONS = SchemeConfig(capacity=None)
NAMES = ("dense", "direct", "ssar_rd")
REDUCE_SCATTER, ALL_REDUCE = CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_REDUCE


def a_shape(op=REDUCE_SCATTER, ranks=16, numel=2**24, **fields):
    return BucketShape(numel, 0, 4, op, ranks, **fields)


def without_local_work(cluster):
    """The same links, with codecs and a host that take no time."""
    rates = tuple(replace(r, seconds_per_call=0.0, seconds_per_element=0.0) for r in cluster.codec)
    return replace(cluster, codec=rates, host_s_per_message=0.0, host_s_per_bucket=0.0)


def test_instances_add_the_sum_of_shards_except_at_their_own_level():
    """Two instances of 8 ranks on a node each: what crosses is 1/8 of the bucket, whole or 2 %."""
    shape, islands = a_shape(ranks=8), replace(CLUSTER, nodes=(8, 8))

    def across_s(level, instances):
        pricing = LevelPricing(islands, OPTIONS, NAMES, (8,), instances)
        return pricing.price(level, shape, 0.02).across_s

    lane_s = 2**24 / 8 * 4 * 8 * CLUSTER.inter.beta_s  # eight lanes share a node's card
    assert across_s(RANK, 2) - across_s(RANK, 1) == pytest.approx(lane_s, rel=0.05)
    assert across_s(INSTANCE, 2) < 0.2 * lane_s


@pytest.mark.parametrize(("instances", "expected"), [(1, {RANK}), (2, {RANK, INSTANCE})])
def test_levels_of_instances_on_one_node_each(instances, expected):
    shapes = {a_shape(ranks=8): 1}
    found = LevelPricing(CLUSTER, OPTIONS, NAMES, (8,), instances).best(shapes, 0.02)
    assert set(found.seconds or {RANK: 0.0}) == expected
    assert found.level == (INSTANCE if instances > 1 else RANK)


def test_the_steps_inside_are_rings():
    """16 ranks in nodes of 8: 2^24 elements of 4 bytes, an eighth of them 2^23 bytes."""
    part_s, alpha_s = 2**23 * CLUSTER.intra.beta_s, CLUSTER.intra.alpha_s
    shards, whole = a_shape(), a_shape(ALL_REDUCE)
    assert inside_s(shards, CLUSTER, 8, grouped=True) == pytest.approx(7 * (2 * alpha_s + part_s))
    assert inside_s(shards, CLUSTER, 8, grouped=False) == pytest.approx(7 * (alpha_s + part_s))
    assert inside_s(whole, CLUSTER, 8, grouped=True) == pytest.approx(2 * 7 * (alpha_s + part_s))


def test_on_a_cpu_ranks_agree_inside_first():
    on_cpu = replace(CLUSTER, device="cpu")
    shape, words = a_shape(), 7 * 8 * (2 + 8) * CLUSTER.intra.beta_s
    added_s = inside_s(shape, on_cpu, 8, grouped=True) - inside_s(shape, CLUSTER, 8, grouped=True)
    assert added_s == pytest.approx(CLUSTER.intra.alpha_s + words)


def test_a_lane_is_priced_on_its_share_of_the_card():
    """By hand: two nodes, so one round of one shard of the part, at 8 times the card's beta."""
    part = a_shape().lane(8)
    profile = prior(part, 0.01)
    cluster = without_local_work(CLUSTER)
    found_s = predict("direct", part, profile, cluster, replace(OPTIONS, capacity=1.0))
    nbytes = 48 + 2**20 * 0.01 * 8
    link = CLUSTER.inter
    assert found_s == pytest.approx(link.alpha_s + 8 * link.beta_s * nbytes, rel=1e-3)


def test_what_crosses_does_not_grow_with_the_ranks_of_a_node():
    """The same nodes with 2 and with 8 ranks: as many bytes over the card."""
    times_s = []
    for inside in (2, 8):
        cluster = without_local_work(replace(CLUSTER, nodes=(inside,) * 8))
        shape = a_shape(ranks=8 * inside)
        pricing = LevelPricing(cluster, OPTIONS, ("direct",), cluster.nodes)
        times_s.append(pricing.price(NODE, shape, 0.05).across_s)
    assert times_s[0] == pytest.approx(times_s[1], rel=0.01)


def test_level_instance_compresses_an_all_reduce_across():
    pricing = LevelPricing(CLUSTER, OPTIONS, NAMES, (8, 8), instances=2)
    price = pricing.price(INSTANCE, a_shape(ranks=16), 0.01)
    lane = replace(a_shape(ranks=32).lane(16), op=ALL_REDUCE)
    alone = predict(price.scheme, lane, prior(lane, 0.01), CLUSTER, OPTIONS)
    assert price.across_s == alone
    assert price.inside_s == inside_s(a_shape(ranks=32), CLUSTER, 16, grouped=False)


class TestBestLevel:
    """Which of `rank` and `node` is predicted to be shorter."""

    def choice(self, cluster=CLUSTER, node_sizes=(8, 8)):
        shapes = {a_shape(ranks=sum(node_sizes)): 3}
        return LevelPricing(cluster, OPTIONS, NAMES, node_sizes).best(shapes, 0.05)

    def test_slow_card_and_fast_links_inside(self):
        choice = self.choice()
        assert choice.level == NODE
        assert choice.seconds[NODE] < choice.seconds[RANK] / 3
        assert "predicted: rank" in choice.reason

    def test_slow_links_inside(self):
        slow = replace(CLUSTER, intra=Link(1e-5, 10 * CLUSTER.inter.beta_s), nic="rank")
        assert self.choice(slow).level == RANK

    @pytest.mark.parametrize("sizes", [(16,), (1,) * 16, (8, 4, 4)])
    def test_nodes_that_have_no_lanes(self, sizes):
        choice = self.choice(node_sizes=sizes)
        assert (choice.level, choice.seconds) == (RANK, {})

    def test_the_nodes_are_those_that_run_not_those_of_the_file(self):
        assert self.choice(node_sizes=(4, 4, 4, 4)).level == NODE
        assert self.choice(find("ethernet_25gbit"), (4, 4)).seconds.keys() == {RANK, NODE}


def test_a_state_of_other_lanes_is_another_buckets():
    bucket = a_bucket(world_size=4)
    state = BucketState.of(bucket)
    assert state.fits(bucket)
    bucket.lanes = 4
    assert not state.fits(bucket)


def test_ranks_of_a_plan_are_all_ranks(tmp_path):
    part = a_shape().lane(8)
    row = Pricing(CLUSTER, NAMES).row("0", part, prior(part, 0.01), "assumed")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"buckets": [row]}))
    (priced,) = of_run(path, Pricing(CLUSTER, NAMES), 64)
    assert (priced["world_size"], priced["lanes"]) == (8, 8)


def test_the_reducer_of_a_level_plans_parts():
    """Two nodes of two ranks: the plan is of half a bucket on two ranks, in one of two lanes."""
    planner = PlannerConfig(cluster="ethernet_25gbit_8", schemes=["direct"])
    config = SparseConfig.from_overrides(
        level="node", scheme="auto", warmup_iters=0, ramp_iters=0, planner=planner
    )
    ranks = VirtualRanks(config, (2, 2), ALL_REDUCE, 2**14)
    row = ranks.reducers[0].report(ranks.buckets[0], 0)
    assert (row["numel"], row["world_size"], row["lanes"]) == (2**13, 2, 2)
    part = BucketShape(**{key: row[key] for key in BucketShape.__dataclass_fields__})
    profile = prior(part, config.compression.density)
    # On the run's own nodes: in the file's all four would be on one.
    where = replace(find("ethernet_25gbit_8"), nodes=(2, 2))
    found = predict("direct", part, profile, where, config.scheme)
    assert row["predicted_us"]["direct"] == pytest.approx(found * 1e6)
