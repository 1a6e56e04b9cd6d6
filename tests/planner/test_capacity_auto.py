"""`scheme.capacity=auto`: fixed sizes on CUDA, wherever the scheme has messages of fixed size."""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, check
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.scheme import AUTO_CAPACITY
from megatron_sparse.config.sparse import SchemeConfig, SparseConfig, StragglerConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.plan import Plan
from megatron_sparse.planner.prices import fits, predict
from megatron_sparse.planner.wire_bytes import predicted_bytes
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.straggler_policy import StragglerPolicy
from megatron_sparse.transport import VirtualCluster
from tests.cuda_emulator.device import GPU, to_gpu
from tests.planner.planned import a_bucket

CPU = torch.device("cpu")
NAMES = [name for name, scheme in SCHEMES.items() if scheme.takes is Input.SPARSE]


def bucket_on(device: torch.device) -> Bucket:
    grad_N = torch.zeros(1000)
    return a_bucket(to_gpu(grad_N) if device == GPU else grad_N)


def plan_of(name: str) -> Plan:
    return Plan(name, Phase.TARGET, 0.01, None, SCHEMES[name].needs_shards, "a test")


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_with_slots_has_them_on_a_gpu_only(name: str) -> None:
    options, plan = SchemeConfig(), plan_of(name)
    on_gpu = plan.message_spec(bucket_on(GPU), options).capacity
    assert on_gpu == (AUTO_CAPACITY if SCHEMES[name].takes_slots else None)
    assert plan.message_spec(bucket_on(CPU), options).capacity is None


@pytest.mark.parametrize("capacity", [None, 2])
def test_a_given_capacity_does_not_depend_on_the_device(capacity: int | None) -> None:
    options, plan = SchemeConfig(capacity=capacity), plan_of("direct")
    for device in (CPU, GPU):
        assert plan.message_spec(bucket_on(device), options).capacity == capacity


def test_bytes_are_predicted_as_they_are_sent() -> None:
    exchanged, fixed = SchemeConfig(capacity=None), SchemeConfig(capacity=AUTO_CAPACITY)
    for device, expected in ((CPU, exchanged), (GPU, fixed)):
        bucket, auto = bucket_on(device), SchemeConfig()
        assert predicted_bytes(bucket, 0.01, auto) == predicted_bytes(bucket, 0.01, expected)


@pytest.mark.parametrize("name", [name for name in NAMES if SCHEMES[name].cost is not None])
def test_auto_keeps_all_candidates_and_prices_each_as_it_runs(name: str) -> None:
    shape = BucketShape(2**20, 0, 4, CollectiveOp.ALL_REDUCE, 8)
    profile = SparsityProfile.uniform(2**20, 0.01, 8)
    takes_slots = SCHEMES[name].takes_slots
    assert fits(name, shape.op, SchemeConfig())
    assert fits(name, shape.op, SchemeConfig(capacity=AUTO_CAPACITY)) == takes_slots
    for device in ("cpu", "cuda"):
        cluster = replace(find("ethernet_25gbit"), device=device)
        capacity = AUTO_CAPACITY if device == "cuda" and takes_slots else None
        as_it_runs = predict(name, shape, profile, cluster, SchemeConfig(capacity=capacity))
        assert predict(name, shape, profile, cluster, SchemeConfig()) == as_it_runs


def test_sizes_are_exchanged_where_parameters_are_lossless() -> None:
    overrides = {"scheme": "direct", "lossless_patterns": ["embed"]}
    config = SparseConfig.from_overrides(**overrides)
    assert config.scheme.capacity is None
    with pytest.raises(ConfigError, match="messages of unknown size"):
        check(SparseConfig.from_overrides(nccl_engine=True, **overrides))
    with pytest.raises(ConfigError, match="fixed size"):
        SparseConfig.from_overrides(capacity=1.25, **overrides)


def test_the_engine_takes_auto() -> None:
    assert check(SparseConfig.from_overrides(scheme="direct", nccl_engine=True)).scheme.nccl_engine


@pytest.mark.parametrize(("capacity", "scheme"), [("auto", "straggler_direct"), (1.25, "direct")])
def test_a_straggler_is_skipped_unless_sizes_were_fixed_by_hand(
    capacity: str | float, scheme: str
) -> None:
    config = SparseConfig(
        scheme=SchemeConfig(capacity=capacity), straggler=StragglerConfig(mode="pinned", rank=1)
    )
    policy = StragglerPolicy(config, VirtualCluster(4).transports[0], NullSink())
    assert policy.adapt(bucket_on(GPU), plan_of("direct")).scheme == scheme
