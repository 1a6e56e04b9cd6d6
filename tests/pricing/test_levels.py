"""The links of a level's tiers: a lane's share of a node's card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.levels import inside_cluster, lane_cluster
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport import Link

CARD = find("perlmutter")
"""Nodes of 4 ranks that share a card."""
OWN = replace(CARD, nic="rank")
"""A card for each rank."""


def test_lanes_share_the_card_of_their_nodes():
    lane = lane_cluster(CARD, 4, 8)
    assert lane.topology(8).node_sizes == (1,) * 8
    assert lane.inter == Link(CARD.inter.alpha_s, 4 * CARD.inter.beta_s)
    assert lane.dense_link(8) == Link(CARD.dense.alpha_s, 4 * CARD.dense.beta_s)


def test_a_card_of_its_own_is_not_shared():
    lane = lane_cluster(OWN, 4, 8)
    assert lane.inter == CARD.inter
    assert lane.dense_link(8) == CARD.dense


def test_the_backend_is_never_faster_than_the_lane():
    striped = replace(OWN, dense=Link(1e-6, CARD.inter.beta_s / 4))
    assert lane_cluster(striped, 4, 8).dense.beta_s == CARD.inter.beta_s


def test_instances_of_two_nodes_have_lanes_from_each_rank_of_a_node():
    """Eight lanes, of which four begin on each node and share its card."""
    lane = lane_cluster(CARD, 8, 4)
    assert lane.topology(4).node_sizes == (1,) * 4
    assert lane.inter.beta_s == 4 * CARD.inter.beta_s


def test_instances_of_half_a_node_have_two_ranks_of_a_lane_on_a_node():
    lane = lane_cluster(CARD, 2, 8)
    assert lane.topology(8).node_sizes == (2,) * 4
    assert lane.inter.beta_s == 2 * CARD.inter.beta_s


def test_an_instance_that_cuts_a_node_has_no_price():
    with pytest.raises(ConfigError, match="has no price"):
        lane_cluster(CARD, 6, 4)


def test_inside_a_node_the_backend_uses_the_nodes_links():
    inside = inside_cluster(CARD, 4)
    assert inside.topology(4).node_sizes == (4,)
    assert inside.dense_link(4) == CARD.intra
    assert inside_cluster(CARD, 8).dense_link(8) == CARD.dense


def test_a_part_has_the_elements_and_ranks_of_a_lane():
    part = BucketShape(1001, 10, 4, CollectiveOp.ALL_REDUCE, 8, value_bits=4).lane(4)
    assert (part.numel, part.kept_numel, part.world_size, part.lanes) == (251, 3, 2, 4)
    assert part.value_bits == 4


def test_a_shape_has_a_lane_at_least():
    with pytest.raises(ConfigError, match=r"shape\.lanes"):
        BucketShape(8, 0, 4, CollectiveOp.ALL_REDUCE, 2, lanes=0)
