"""Which level runs, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_sparse.config.sparse import PlannerConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import find
from megatron_sparse.reduction import level_choice
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.transport import Link


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
def test_by_nodes(level, nodes, expected, reason):
    choice = choose_level(SparseConfig.from_overrides(level=level), nodes)
    assert (choice.level, choice.reason) == (expected, reason)


def test_ranks_and_lanes_follow_the_ranks_not_the_numbers_of_nodes():
    choice = choose_level(SparseConfig.from_overrides(level="node"), (7, 7, 3, 3))
    assert [choice.inside(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [choice.across(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_several_instances():
    config = SparseConfig.from_overrides(level="instance")
    assert choose_level(config, (0, 0), instances=2).level == "instance"


@pytest.mark.parametrize("options", [{"scheme": "dense"}, {"enabled": False}])
def test_what_never_prunes_stays_the_backends_own(options):
    config = SparseConfig.from_overrides(level="node", **options)
    choice = choose_level(config, (0, 0, 1, 1))
    assert (choice.level, choice.reason) == (
        "rank",
        "nothing is ever pruned: the backend's own collective",
    )


@pytest.mark.parametrize(("faster", "expected"), [(1, "rank"), (2, "node")])
def test_auto_takes_rank_where_links_inside_are_slow(faster, expected, monkeypatch):
    cluster = find("ethernet_25gbit")
    inside = Link(cluster.inter.alpha_s, cluster.inter.beta_s / faster)
    monkeypatch.setattr(level_choice, "find", lambda name: replace(cluster, intra=inside))
    planner = PlannerConfig(cluster="ethernet_25gbit")
    config = SparseConfig.from_overrides(level="auto", planner=planner)
    assert choose_level(config, (0, 0, 1, 1)).level == expected
    assert choose_level(replace_level(config, "node"), (0, 0, 1, 1)).level == "node"


def replace_level(config, level):
    """The configuration with another level."""
    return replace(config, compression=replace(config.compression, level=level))


def test_other_levels_are_refused():
    with pytest.raises(ConfigError, match=r"compression\.level"):
        SparseConfig.from_overrides(level="rack")
