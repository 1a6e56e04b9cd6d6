"""The fixed planner: phases, schemes, bytes."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner import Planner
from megatron_sparse.planner import plan as planner_module
from megatron_sparse.planner.wire_bytes import dense_wire_bytes, predicted_bytes
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.records import record_bytes
from megatron_sparse.transport import ProcessGroupTransport
from tests.planner.planned import a_bucket


def _bucket(world_size=4, op=CollectiveOp.ALL_REDUCE, *, keep=False):
    return a_bucket(torch.zeros(1000), world_size, op=op, keep=keep)


def _planner(scheme="auto", **compression):
    values = {"warmup_iters": 2, "ramp_iters": 2, "density": 0.01} | compression
    return Planner(CompressionConfig(**values), SchemeConfig(name=scheme))


def test_the_warmup_is_dense_and_the_target_sparse():
    plans = [_planner("agsparse").plan_for(_bucket(), step) for step in range(5)]
    assert [p.scheme for p in plans] == ["dense"] * 2 + ["agsparse"] * 3
    assert [p.phase for p in plans] == [Phase.WARMUP] * 2 + [Phase.RAMP] * 2 + [Phase.TARGET]
    assert plans[-1].density == 0.01


@pytest.mark.parametrize(("measured", "fits"), [("several", True), ("one", False)])
def test_a_file_of_several_hosts_fits_a_group_within_one(monkeypatch, measured, fits):
    found = "one" if fits else "several"
    monkeypatch.setattr(planner_module, "fingerprint", lambda _: {"hosts": found})
    cluster = replace(find("perlmutter"), fingerprint={"hosts": measured})
    planner = Planner(CompressionConfig(), SchemeConfig(), cluster)
    with nullcontext() if fits else pytest.raises(ConfigError, match="hosts"):
        planner.join(object.__new__(ProcessGroupTransport))


def test_the_switch_plans_dense_at_any_step():
    planner = _planner("agsparse")
    planner.enabled = False
    assert planner.plan_for(_bucket(), 100).scheme == "dense"
    assert planner.plan_for(_bucket(), 100).phase is Phase.OFF


@pytest.mark.parametrize(
    ("enabled", "reason"), [(True, "dense warm-up"), (False, "compression.enabled=false")]
)
def test_the_reason_of_a_dense_bucket(enabled, reason):
    row = _planner("agsparse", enabled=enabled).report(_bucket(), step=0)
    assert (row["chosen"], row["reason"]) == ("dense", reason)


def test_predicted_bytes():
    # 1000 fp32 elements, 4 ranks: the ring sends 2 * 3/4 * 4000 B; AGsparse sends to 3 peers
    # 1000 * 1 % * 8 B; direct 3/4 of that, and three times 250 elements at 3.94 %, where a bitmap
    # of 1/8 B an element beats indices.
    sum_density = 1 - 0.99**4
    direct = 0.75 * 80 + 0.75 * 1000 * (4 * sum_density + 1 / 8)
    assert dense_wire_bytes(_bucket(), 4) == 6000
    found = predicted_bytes(_bucket(), 0.01, SchemeConfig())
    assert found == pytest.approx({"dense": 6000, "agsparse": 240, "direct": direct})
    scatter = predicted_bytes(_bucket(op=CollectiveOp.REDUCE_SCATTER), 0.01, SchemeConfig())
    assert scatter == {"dense": 3000, "agsparse": 60, "direct": 60}


def test_the_sum_over_instances_is_in_the_gradients_dtype():
    """In every scheme: an all-reduce of 250 fp32 elements between 2 instances sends 1000 bytes."""
    narrow = SchemeConfig(wire_dtype="bf16")
    alone = predicted_bytes(_bucket(), 0.01, narrow)
    with_instances = predicted_bytes(replace(_bucket(), instances=2), 0.01, narrow)
    assert with_instances == {scheme: sent + 1000 for scheme, sent in alone.items()}


@pytest.mark.parametrize(
    ("op", "density", "bytes_per_element"),
    [
        ("auto", 0.01, 0.08),
        ("auto", 0.5, 2.125),
        ("auto", 0.99, 4),
        ("coo", 0.5, 4),
        ("pici", 0.01, 0.165),
        ("dense", 0.01, 4),
    ],
)
def test_bytes_of_a_record(op, density, bytes_per_element):
    assert record_bytes(density, 4, op) == pytest.approx(bytes_per_element)


def test_predicted_bytes_of_few_bits():
    """Messages shrink, kept elements to bf16; the gathered sums and dense do not."""
    element = record_bytes(0.1, 4, "auto", 4)
    found = predicted_bytes(_bucket(), 0.1, SchemeConfig(), 4)
    sums = 1000 * record_bytes(1 - 0.9**4, 4, "rice")
    assert found == pytest.approx(
        {"dense": 6000, "agsparse": 3000 * element, "direct": 0.75 * (1000 * element + sums)}
    )
    shards = _bucket(op=CollectiveOp.REDUCE_SCATTER, keep=True)
    kept = predicted_bytes(shards, 0.1, SchemeConfig(), 2)
    assert kept["direct"] == pytest.approx(0.75 * 1000 * 2)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_positions_take_little_more_than_their_entropy(density, bits):
    rest = 1 - density
    entropy = -(density * math.log2(density) + rest * math.log2(rest)) / density
    positions = 8 * record_bytes(density, 4, "auto", bits) / density - bits - 1 / 4
    assert entropy < positions
    # Rice codes of gaps and, for each 1024 entries or more, a row of the table. In the dense half
    # a bitmap's bit an element is all that they have.
    assert positions < (1.05 * entropy if density <= 0.1 else max(1.1 * entropy, 1 / density + 0.1))
    raw = record_bytes(density, 4, "rice")
    assert raw == pytest.approx(min(density * (positions / 8 + 4), 4))


@pytest.mark.parametrize(
    ("world_size", "density", "scheme"),
    [
        (4, 0.01, "agsparse"),
        (4, 0.2, "direct"),
        (4, 0.6, "dense"),
        (32, 0.01, "direct"),
        (2, 0.3, "agsparse"),
        (16, 0.5, "dense"),
    ],
)
def test_auto_takes_the_fewest_bytes_and_dense_where_few_are_saved(world_size, density, scheme):
    planner = _planner("auto", density=density)
    assert planner.plan_for(_bucket(world_size), 10).scheme == scheme


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_auto_is_dense_on_one_rank_and_for_kept_parameters(op):
    assert _planner().plan_for(_bucket(1, op), 10).scheme == "dense"
    assert _planner().plan_for(_bucket(4, op, keep=True), 10).scheme == "dense"


def test_reduce_scatter_messages_are_cut_at_shards():
    assert _planner("agsparse").plan_for(_bucket(2, CollectiveOp.REDUCE_SCATTER), 10).sharded
    assert not _planner("agsparse").plan_for(_bucket(2), 10).sharded
