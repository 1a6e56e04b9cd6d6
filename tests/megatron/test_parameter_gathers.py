"""Which bucket groups stay raw, and why; the log; the times of Megatron's own gather.

And the parts of parameters whose masters a rank has under `parameters.method=lossy`.
"""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.megatron import parameter_gathers, parameter_masters
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.parameter_gathers import ParameterGathers, why_raw
from megatron_sparse.megatron.parameter_masters import (
    LossyBucket,
    masters_elsewhere,
    masters_from,
    optimizer_spans,
)
from megatron_sparse.recording import NullSink
from tests.parameters.gather_cases import Echo
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


def plan(
    groups: list[GroupBuckets],
    method: str,
    *chunks: Any,
    rank_1: Callable[[Any], Any] | None = None,
) -> ParameterGathers:
    """Plans with a second rank that has the same settings, or what `rank_1` makes of them."""
    gathers = ParameterGathers(NullSink())
    config = SparseConfig(parameters=ParametersConfig(method))
    reducer = cast(Any, SimpleNamespace(level_groups=None, transport=Echo(rank_1)))
    gathers.plan(groups, config, lambda _: reducer, cast(Any, None), chunks, None)
    return gathers


def test_settings_are_compared_before_anything_that_depends_on_them():
    """With `lossy` alone the ranks agree on masters: one of them would wait for the others."""

    def another_method(codes):
        changed = codes.clone()
        changed[0] -= 1
        return changed

    with pytest.raises(CommunicationError, match=r"rank 1 .* another parameters\.method"):
        plan([group(torch.zeros(8))], "lossy", rank_1=another_method)


def test_where_megatron_clips_weights_behind_the_gather_it_stays_raw():
    chunk = SimpleNamespace(config=SimpleNamespace(qk_clip=True))
    with pytest.raises(ConfigError, match="--qk-clip changes parameters"):
        plan([group()], "exact", chunk)


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
    timed = gathers.timed(own, 3)
    time.sleep(0.2)
    timed.handle = SimpleNamespace(wait=lambda: time.sleep(0.02))
    timed.wait()
    (record,) = sink.gathers
    assert (record.bucket, record.step, record.method) == ("group0.0", 3, "raw")
    assert record.wire_bytes == record.dense_bytes == 12, "three quarters of 16 bytes"
    assert 0.02 <= gathers.waited_s < 0.2, "from the wait on, if Megatron's handle waits"
    timed = gathers.timed(own, 3)
    time.sleep(0.2)
    timed.wait()
    assert gathers.waited_s > 0.2, "from the beginning, if Megatron has waited"
    assert [stage for stage, _ in sink.stages] == ["param_wait"] * 2


def test_a_group_without_a_parameter_buffer_is_timed_too():
    gathers, own = ParameterGathers(sink := Kept()), group(None)
    timed = gathers.timed(own, 0)
    time.sleep(0.02)
    timed.wait()
    assert sink.gathers == []
    assert gathers.waited_s >= 0.02


PIECES = (ParameterSlice("a", 10, 40, True), ParameterSlice("b", 48, 100, True))
"""Of a bucket of 100 elements that two ranks share."""


def _bucket(rank):
    bucket = Bucket("group0.0", torch.zeros(100), PIECES, CollectiveOp.REDUCE_SCATTER, 2)
    shard = torch.arange(50.0 * rank, 50.0 * rank + 50)
    gather = SimpleNamespace(shard=(50 * rank, 50 * rank + 50), own_shard=shard)
    return LossyBucket(cast(Any, None), bucket, cast(Any, gather))


def test_a_master_is_put_together_and_padding_stays():
    parts = {("a", 0): torch.full((30,), -1.0), ("b", 0): torch.full((2,), -3.0)}
    (master,) = masters_from([_bucket(0)], parts) or [None]
    assert master[:10].tolist() == list(range(10))
    assert master[10:40].tolist() == [-1.0] * 30
    assert master[40:48].tolist() == list(range(40, 48))
    assert master[48:].tolist() == [-3.0] * 2
    parts["a", 0][7] = torch.nan  # no rank has written it
    assert masters_from([_bucket(0)], parts) is None
    del parts["a", 0]
    assert masters_from([_bucket(0)], parts) is None


def _optimizer(*parameters, **config):
    return SimpleNamespace(
        step_with_ready_grads=lambda: True,
        param_groups=[{"params": list(parameters)}],
        config=SimpleNamespace(**config),
    )


def _chain(*optimizers):
    return SimpleNamespace(chained_optimizers=list(optimizers), step_with_ready_grads=None)


def test_parameters_that_the_optimizer_keeps_elsewhere(monkeypatch):
    monkeypatch.setattr(parameter_masters.dist, "get_rank", lambda group: 0)
    bucket, values = _bucket(0).bucket, torch.zeros(100)
    group = GroupBuckets(
        SimpleNamespace(buckets=[SimpleNamespace(param_data=values)]),
        cast(Any, SimpleNamespace(size=lambda: 2)),
        [bucket],
    )
    inside = _optimizer(values[10:40], values[48:50])
    chained = _chain(_optimizer(values[10:40]), _chain(_optimizer(values[48:50])))
    assert masters_elsewhere(group, optimizer_spans(inside)) is None
    assert masters_elsewhere(group, optimizer_spans(chained)) is None
    for other in (
        _optimizer(values[10:40].clone(), values[48:50]),
        _optimizer(values[10:40], values[48:50], use_precision_aware_optimizer=True),
        _optimizer(values[10:40]),
        object(),
    ):
        found = masters_elsewhere(group, optimizer_spans(other))
        assert found == "the optimizer keeps parameters outside of the gathered buffer"


def test_gathers_are_told_that_an_update_was_not_accepted():
    told: list[Any] = []
    gather = SimpleNamespace(
        own_shard=torch.zeros(8),
        begin_step=lambda: told.append("begin"),
        end_step=lambda accepted: told.append(accepted),
    )
    optimizer = _optimizer(gather.own_shard)
    optimizer.step_with_ready_grads = lambda: told.append("update")  # not accepted
    bucket = LossyBucket(cast(Any, None), cast(Any, None), cast(Any, gather))
    parameter_masters.watch_updates([bucket], optimizer)
    optimizer.step_with_ready_grads()
    assert told == ["begin", "update", False]
