"""The predicted cost of `peer_two_shot`, against a formula by hand, and when it is a candidate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, registry
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SchemeConfig
from megatron_sparse.ddp import _check_no_windows
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner import Planner
from megatron_sparse.planner.choice import PricedPlanner
from megatron_sparse.planner.costs import predict, predict_all
from megatron_sparse.planner.plan import FixedPlanner, Windows
from megatron_sparse.planner.prices import candidates, runnable
from megatron_sparse.pricing.cluster import FORMATS, ClusterModel, CodecOp, CodecRate, find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport import Link, Transport

NAME = "peer_two_shot"
N, RANKS, DENSITY = 2**20, 4, 0.01
COO = SchemeConfig(format="coo")
HEADER, ENTRY = 48, 8
"""Bytes of a record's header, and of an index with its fp32 value."""


def node(
    alpha_s: float = 0.0,
    beta_s: float = 0.0,
    codec_s: float = 0.0,
    device: str = "cuda",
    nodes: tuple[int, ...] = (RANKS,),
) -> ClusterModel:
    """A node whose codec takes the same time for each element in every operation."""
    link = Link(alpha_s, beta_s)
    rates = tuple(
        CodecRate(op, record, density, 0.0, codec_s)
        for op in CodecOp
        for record in FORMATS
        for density in (1e-6, 1.0)
    )
    return ClusterModel("test", device, nodes, "rank", link, link, link, 0.0, 0.0, rates, {}, {})


def price_s(
    cluster: ClusterModel,
    op: CollectiveOp = CollectiveOp.ALL_REDUCE,
    density: float = DENSITY,
    options: SchemeConfig = COO,
    n: int = RANKS,
) -> float:
    profile = SparsityProfile.uniform(N, density, n)
    return predict(NAME, BucketShape(N, 0, 4, op, n), profile, cluster, options).total_s


def record(density: float) -> float:
    """Bytes of one shard's."""
    return HEADER + ENTRY * density * N / RANKS


SUM_DENSITY = SparsityProfile.uniform(N, DENSITY, RANKS).sum_density(RANKS)


def test_two_barriers_or_one() -> None:
    assert price_s(node(alpha_s=1.0)) == pytest.approx(2.0)
    assert price_s(node(alpha_s=1.0), CollectiveOp.REDUCE_SCATTER) == pytest.approx(1.0)


def test_bytes_are_those_that_a_rank_reads_of_its_peers() -> None:
    own = (RANKS - 1) * record(DENSITY)
    sums = (RANKS - 1) * record(SUM_DENSITY)
    # The densities of shards come through logarithms.
    assert price_s(node(beta_s=1.0)) == pytest.approx(own + sums, rel=1e-6)
    assert price_s(node(beta_s=1.0), CollectiveOp.REDUCE_SCATTER) == pytest.approx(own, rel=1e-6)


def test_passes_over_memory_are_selection_put_add_encode_and_write() -> None:
    put = RANKS * record(DENSITY) / 4
    expected = N + put + N + N / RANKS + N
    assert price_s(node(codec_s=1.0)) == pytest.approx(expected, rel=1e-6)
    assert price_s(node(codec_s=1.0), CollectiveOp.REDUCE_SCATTER) == pytest.approx(
        2 * N + put, rel=1e-6
    )


def test_of_reading_and_adding_the_slower_counts() -> None:
    """They are one pass. Here adding limits messages, and reading limits sums."""
    beta_s, codec_s = 1e-8, 1e-9
    adding_s, read_s = N * codec_s, (RANKS - 1) * record(DENSITY) * beta_s
    writing_s, fetched_s = N * codec_s, (RANKS - 1) * record(SUM_DENSITY) * beta_s
    assert read_s < adding_s
    assert fetched_s > writing_s
    rest_s = (N + RANKS * record(DENSITY) / 4 + N / RANKS) * codec_s
    found_s = price_s(node(beta_s=beta_s, codec_s=codec_s))
    assert found_s == pytest.approx(rest_s + adding_s + fetched_s, rel=1e-6)


def test_a_sum_is_dense_from_the_gather_threshold_on() -> None:
    dense = replace(COO, ring_intra_density=1.0, ring_inter_density=1.0, ring_gather_density=0.0)
    sums = (RANKS - 1) * (HEADER + 4 * N / RANKS)
    own = (RANKS - 1) * record(DENSITY)
    assert price_s(node(beta_s=1.0), options=dense) == pytest.approx(own + sums, rel=1e-6)


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_it_grows_with_every_cost(op: CollectiveOp) -> None:
    alpha_s, beta_s, codec_s = base = (1e-6, 1e-11, 1e-12)
    densities = [price_s(node(*base), op, density) for density in (0.001, 0.01, 0.1, 0.5)]
    assert densities == sorted(densities)
    assert len(set(densities)) == 4
    for dearer in (
        node(100 * alpha_s, beta_s, codec_s),
        node(alpha_s, 100 * beta_s, codec_s),
        node(alpha_s, beta_s, 100 * codec_s),
    ):
        assert price_s(dearer, op) > price_s(node(*base), op)


def test_capacity_mode_costs_no_more() -> None:
    """Slots are not read beyond their records, and no size is agreed upon in either mode."""
    assert price_s(node(1e-6, 1e-10, 1e-11), options=replace(COO, capacity=2.0)) == price_s(
        node(1e-6, 1e-10, 1e-11)
    )


@pytest.mark.parametrize("where", [node(device="cpu"), node(nodes=(2, 2)), find("ethernet_25gbit")])
def test_elsewhere_it_has_no_price(where: ClusterModel) -> None:
    shape, profile = (
        BucketShape(N, 0, 4, CollectiveOp.ALL_REDUCE, RANKS),
        SparsityProfile.uniform(N, DENSITY, RANKS),
    )
    with pytest.raises(ConfigError, match="it needs GPUs of one node"):
        predict(NAME, shape, profile, where, COO)
    assert list(predict_all(shape, profile, where, COO, {NAME, "direct"})) == ["direct"]
    assert NAME in predict_all(shape, profile, node(), COO, {NAME, "direct"})


def test_it_is_a_candidate_only_where_it_is_named_and_has_windows() -> None:
    usual = [name for name in registry.candidates() if name != NAME]
    assert candidates(None, 4) == usual
    # Without few bits nothing is rounded that was not named.
    assert candidates(None, None) == [name for name in usual if name != "dense_q"]
    assert candidates(["dense_q"], None) == ["dense", "dense_q"]
    assert "dense_q" in runnable(usual, COO, "cuda", has_windows=False)
    named = candidates(["direct", NAME], None)
    assert named == ["dense", "direct", NAME]
    assert runnable(named, COO, "cuda", has_windows=False) == ["dense", "direct"]
    assert runnable(named, COO, "cuda", has_windows=True) == named


def priced(cluster: ClusterModel, schemes: list[str] | None) -> PricedPlanner:
    compression = CompressionConfig(density=DENSITY, warmup_iters=0, ramp_iters=0)
    planner = PlannerConfig(schemes=schemes)
    return PricedPlanner(compression, SchemeConfig(), planner, cluster, logs=False)


def a_bucket(has_windows: bool) -> Bucket:
    parameters = [ParameterSlice("w", 0, N)]
    return Bucket(
        "b", torch.empty(N), parameters, CollectiveOp.ALL_REDUCE, RANKS, has_windows=has_windows
    )


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_planner_takes_it_where_it_is_cheapest_and_there_are_windows(has_windows: bool) -> None:
    planner = priced(find("perlmutter"), ["direct", NAME])
    row = planner.report(a_bucket(has_windows), 0)
    assert (NAME in row["predicted_us"]) is has_windows
    assert row["chosen"] == (NAME if has_windows else "direct")


def of(ranks: int, nodes: int = 1) -> Transport:
    numbers = tuple(rank * nodes // ranks for rank in range(ranks))
    return cast("Transport", SimpleNamespace(world_size=ranks, nodes=numbers))


@pytest.mark.parametrize(
    ("planner", "ranks", "expected"),
    [
        (priced(node(), ["direct", NAME]), RANKS, Windows.WELCOME),
        (priced(node(), ["direct", NAME]), 1, Windows.NONE),
        (priced(node(), None), RANKS, Windows.NONE),
        (priced(node(device="cpu"), [NAME]), RANKS, Windows.NONE),
        (priced(find("perlmutter"), [NAME]), 8, Windows.NONE),
        (FixedPlanner(CompressionConfig(), SchemeConfig(name=NAME)), RANKS, Windows.REQUIRED),
        (FixedPlanner(CompressionConfig(), SchemeConfig(name="direct")), RANKS, Windows.NONE),
        (FixedPlanner(CompressionConfig(), SchemeConfig()), RANKS, Windows.NONE),
    ],
)
def test_which_planners_need_windows(planner: Planner, ranks: int, expected: Windows) -> None:
    assert planner.windows(of(ranks)) is expected


def test_a_lane_has_no_windows() -> None:
    """Its ranks are on different nodes, however few they are."""
    planner = priced(node(), ["direct", NAME])
    assert planner.windows(of(RANKS, nodes=RANKS)) is Windows.NONE


def test_plain_ddp_refuses_it_by_name_and_goes_without_it_else() -> None:
    """Its buckets change after the first step, and windows need buckets that do not change."""
    named = FixedPlanner(CompressionConfig(), SchemeConfig(name=NAME))
    with pytest.raises(ConfigError, match="does not go with plain DDP") as caught:
        _check_no_windows(named, of(RANKS))
    assert "scheme.name=direct" in str(caught.value.remedy)
    _check_no_windows(priced(node(), ["direct", NAME]), of(RANKS))


def test_only_one_scheme_needs_windows() -> None:
    assert [name for name, scheme in SCHEMES.items() if scheme.needs_windows] == [NAME]
