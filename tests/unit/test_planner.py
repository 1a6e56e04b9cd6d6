"""The fixed planner: phases, schemes, bytes."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import Bucket, Form, ParameterSlice
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config import CompressionConfig, SchemeConfig
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.planner.plan import dense_wire_bytes, predicted_bytes


def _bucket(world_size=4, form=Form.ALL_REDUCE, keep=False):
    pieces = [ParameterSlice("w", 0, 1000, keep)]
    return Bucket("b", torch.zeros(1000), pieces, form, world_size)


def _planner(scheme="auto", **compression):
    values = {"warmup_iters": 2, "ramp_iters": 2, "density": 0.01} | compression
    return FixedPlanner(CompressionConfig(**values), SchemeConfig(name=scheme))


def test_the_warmup_is_dense_and_the_target_sparse():
    plans = [_planner("agsparse").plan_for(_bucket(), step) for step in range(5)]
    assert [p.scheme for p in plans] == ["dense"] * 2 + ["agsparse"] * 3
    assert [p.phase for p in plans] == [Phase.WARMUP] * 2 + [Phase.RAMP] * 2 + [Phase.TARGET]
    assert plans[-1].density == 0.01


def test_the_switch_plans_dense_at_any_step():
    planner = _planner("agsparse")
    planner.enabled = False
    assert planner.plan_for(_bucket(), 100).scheme == "dense"
    assert planner.plan_for(_bucket(), 100).phase is Phase.OFF


def test_bytes_of_a_ring_and_of_agsparse():
    # 1000 fp32 elements, 4 ranks: the ring sends 2 * 3/4 * 4000 B; AGsparse sends to 3 peers
    # 1000 * 1 % * 8 B.
    assert dense_wire_bytes(_bucket(), 4) == 6000
    assert predicted_bytes(_bucket(), 0.01, None) == (6000, 240)
    assert predicted_bytes(_bucket(form=Form.REDUCE_SCATTER), 0.01, None) == (3000, 60)


def test_auto_takes_dense_where_agsparse_would_send_more():
    planner = _planner("auto", density=0.3)
    assert planner.plan_for(_bucket(2), 10).scheme == "agsparse"
    assert planner.plan_for(_bucket(16), 10).scheme == "dense"


@pytest.mark.parametrize("form", list(Form))
def test_auto_is_dense_on_one_rank_and_for_kept_parameters(form):
    assert _planner().plan_for(_bucket(1, form), 10).scheme == "dense"
    assert _planner().plan_for(_bucket(4, form, keep=True), 10).scheme == "dense"


def test_reduce_scatter_messages_are_cut_at_shards():
    assert _planner("agsparse").plan_for(_bucket(2, Form.REDUCE_SCATTER), 10).sharded
    assert not _planner("agsparse").plan_for(_bucket(2), 10).sharded
