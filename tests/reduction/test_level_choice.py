"""Which level runs, and why."""

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.sparse import PlannerConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.reduction.level_choice import choose_level

FAST = "ethernet_25gbit_8"


@pytest.mark.parametrize(
    ("level", "nodes", "expected", "reason"),
    [
        ("rank", (0, 0, 1, 1), "rank", "compression.level=rank"),
        ("node", (0, 0, 1, 1), "node", "2 nodes of 2 ranks"),
        ("auto", (0, 0, 1, 1), "node", "2 nodes of 2 ranks"),
        ("node", (7, 7, 3, 3), "node", "2 nodes of 2 ranks"),
        ("node", (0, 1, 2), "rank", "each node has one rank"),
        ("node", (0,), "rank", "each node has one rank"),
        ("node", (0, 0, 1), "rank", "nodes have 1 to 2 ranks"),
        ("node", (0, 1, 0, 1), "rank", "ranks are not numbered node by node"),
        ("node", (0, 0, 0), "node", "3 ranks on one node, where nothing is compressed: dense"),
        ("auto", (0, 0, 0), "rank", "all ranks are on one node"),
        ("instance", (0, 0), "rank", "there is one instance of the distributed optimizer"),
    ],
)
def test_the_level_and_its_reason_follow_setting_and_nodes(level, nodes, expected, reason):
    choice = choose_level(SparseConfig.from_overrides(level=level), nodes)
    assert (choice.level, choice.reason) == (expected, reason)


def test_ranks_and_lanes_follow_the_ranks_not_the_numbers_of_nodes():
    choice = choose_level(SparseConfig.from_overrides(level="node"), (7, 7, 3, 3))
    assert [choice.inside(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [choice.across(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_several_instances():
    """Prices decide if there are any; without, the links between instances count as slow."""
    for level in ("instance", "auto"):
        config = SparseConfig.from_overrides(level=level)
        assert choose_level(config, (0, 0), instances=2).level == "instance"
    config = SparseConfig.from_overrides(level="auto", planner=PlannerConfig(cluster=FAST))
    choice = choose_level(config, (0, 0), instances=2)
    assert choice.level == "instance"
    assert ", instance " in choice.reason
    for nodes in ((0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 1, 1)):  # instances of one run decide alike
        assert choose_level(config, nodes, instances=2).level == "rank"


@pytest.mark.parametrize("options", [{"scheme": "dense"}, {"enabled": False}])
def test_what_never_prunes_stays_the_backends_own(options):
    config = SparseConfig.from_overrides(level="node", **options)
    choice = choose_level(config, (0, 0, 1, 1))
    assert (choice.level, choice.reason) == (
        "rank",
        "nothing is ever pruned: the backend's own collective",
    )


@pytest.mark.parametrize(("cluster", "expected"), [("ethernet_25gbit", "rank"), (FAST, "node")])
def test_auto_takes_the_cheaper_level(cluster, expected):
    """Two ranks a node: links inside like those between nodes, and fast ones behind one card."""
    config = SparseConfig.from_overrides(level="auto", planner=PlannerConfig(cluster=cluster))
    choice = choose_level(config, (0, 0, 1, 1))
    assert choice.level == expected
    assert choice.reason.startswith("predicted: rank")
    assert choice.nodes == (() if expected == "rank" else ((0, 1), (2, 3)))
    config = SparseConfig.from_overrides(level="node", planner=PlannerConfig(cluster=cluster))
    assert choose_level(config, (0, 0, 1, 1)).level == "node"


def test_auto_prices_the_models_buckets():
    config = SparseConfig.from_overrides(level="auto", planner=PlannerConfig(cluster=FAST))
    bits = config.compression.value_bits
    shape = BucketShape(2**24, 0, 4, CollectiveOp.ALL_REDUCE, 4, value_bits=bits)
    one, three = (choose_level(config, (0, 0, 1, 1), shapes={shape: n}) for n in (1, 3))
    assert one == choose_level(config, (0, 0, 1, 1)), "the bucket that is priced without any"
    assert (one.level, three.level) == ("node", "node")
    assert one.reason != three.reason


@pytest.mark.parametrize("scheme", ["direct", "straggler_direct", "auto"])
def test_auto_has_prices_of_every_scheme(scheme):
    planner = PlannerConfig(cluster=FAST)
    config = SparseConfig.from_overrides(level="auto", scheme=scheme, planner=planner)
    assert choose_level(config, tuple(rank // 2 for rank in range(64))).level == "node"


def test_other_levels_are_refused():
    with pytest.raises(ConfigError, match=r"compression\.level"):
        SparseConfig.from_overrides(level="rack")
