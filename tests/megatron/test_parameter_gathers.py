"""Which bucket groups stay raw, and why; the log; the times of Megatron's own gather."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import parameter_gathers
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.parameter_gathers import ParameterGathers, why_raw
from megatron_sparse.recording import NullSink
from tests.records import Kept

BF16 = torch.zeros(8, dtype=torch.bfloat16)
BYTES = torch.zeros(8, dtype=torch.uint8)
ON_GPU = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, numel=lambda: 8)


def group(values: Any = BF16, *, sharded: bool = True, ranks: int = 4) -> GroupBuckets:
    host = SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=sharded),
        buckets=[SimpleNamespace(param_data=values)],
    )
    process_group = SimpleNamespace(size=lambda: ranks)
    return GroupBuckets(
        host, cast(Any, process_group), [cast(Any, SimpleNamespace(name="group0.0"))]
    )


REASONS = [
    (group(sharded=False), "without the distributed optimizer"),
    (group(ranks=1), "on one data-parallel rank"),
    (group(None), "bucket group0.0 has no parameter buffer"),
    (group(BYTES), "bucket group0.0 holds torch.uint8 parameters"),
]


@pytest.fixture
def lone_rank(monkeypatch):
    monkeypatch.setattr(parameter_gathers.dist, "get_rank", lambda: 0)


def plan(groups: list[GroupBuckets], method: str) -> ParameterGathers:
    gathers = ParameterGathers(NullSink())
    config = SparseConfig(parameters=ParametersConfig(method))
    gathers.plan(groups, config, cast(Any, None), cast(Any, None), [], None)
    return gathers


@pytest.mark.parametrize(("able", "reason"), [*REASONS, (group(), None), (group(ON_GPU), None)])
def test_reasons(able, reason):
    assert why_raw(able) == reason


@pytest.mark.parametrize("method", ["exact", "lossy"])
@pytest.mark.parametrize(("unable", "reason"), REASONS)
def test_auto_leaves_them_to_megatron_and_others_are_refused(lone_rank, unable, reason, method):
    assert plan([unable], "auto").start(unable, 0, enabled=True) is None
    if "one data-parallel rank" in reason:
        plan([unable], method)  # there is nothing to gather
        return
    with pytest.raises(ConfigError, match=rf"parameters\.method={method}") as caught:
        plan([unable], method)
    assert caught.value.got == reason


def test_lossy_is_refused_on_a_gpu(lone_rank):
    values = SimpleNamespace(is_cuda=True, dtype=torch.float32, numel=lambda: 8)
    with pytest.raises(ConfigError, match=r"parameters\.method=lossy") as caught:
        plan([group(values)], "lossy")
    assert caught.value.got == "lossy gathers have no CUDA kernels yet"


def test_one_line_says_why_a_gather_stays_raw(lone_rank, caplog):
    with caplog.at_level(logging.INFO, logger="megatron_sparse"):
        plan([group(BYTES), group(BYTES)], "auto")
        plan([group(sharded=False)], "auto")
        plan([group(BYTES)], "raw")
    assert [record.message for record in caplog.records] == [
        "parameters.method=auto: raw, bucket group0.0 holds torch.uint8 parameters"
    ]


def test_megatrons_own_gather_is_timed():
    gathers, own = ParameterGathers(sink := Kept()), group()
    waited = SimpleNamespace(wait=lambda: time.sleep(0.02))
    gathers.timed(own, 3, waited, time.perf_counter() - 100.0).wait()
    (record,) = sink.gathers
    assert (record.bucket, record.step, record.method) == ("group0.0", 3, "raw")
    assert record.wire_bytes == record.dense_bytes == 12, "three quarters of 16 bytes"
    assert 0.02 <= gathers.waited_s < 50.0, "from the wait on, if Megatron's handle waits"
    gathers.timed(own, 3, None, time.perf_counter() - 100.0).wait()
    assert gathers.waited_s > 100.0, "from the beginning, if Megatron has waited"
    assert [stage for stage, _ in sink.stages] == ["param_wait"] * 2


def test_a_group_without_a_parameter_buffer_is_timed_too():
    gathers, own = ParameterGathers(sink := Kept()), group(None)
    gathers.timed(own, 0, None, time.perf_counter() - 1.0).wait()
    assert sink.gathers == []
    assert gathers.waited_s >= 1.0
