"""The parts of parameters whose masters a rank has under `parameters.method=lossy`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.megatron import parameter_masters
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.parameter_masters import (
    LossyBucket,
    masters_elsewhere,
    masters_from,
    optimizer_spans,
    overlapping,
)

PIECES = (ParameterSlice("a", 10, 40, True), ParameterSlice("b", 48, 100, True))
"""Of a bucket of 100 elements that two ranks share."""


def _bucket(rank, *, expert=False):
    bucket = Bucket("group0.0", torch.zeros(100), PIECES, CollectiveOp.REDUCE_SCATTER, 2)
    shard = torch.arange(50.0 * rank, 50.0 * rank + 50)
    gather = SimpleNamespace(shard=(50 * rank, 50 * rank + 50), own_shard=shard)
    group = SimpleNamespace(expert=expert)
    return LossyBucket(cast(Any, group), bucket, cast(Any, gather))


def test_pieces_of_a_shard():
    def pieces(rank):
        return [(p.name, p.offset, p.start, p.stop - p.start) for p in _bucket(rank).pieces]

    assert pieces(0) == [("a", 0, 10, 30), ("b", 0, 48, 2)]
    assert pieces(1) == [("b", 2, 0, 50)]


def test_only_parts_that_overlap_are_read():
    stored = [("a", 0, 30), ("b", 0, 2), ("b", 2, 50), ("c", 0, 5)]
    assert overlapping([_bucket(0)], False, stored) == stored[:2]
    assert overlapping([_bucket(1)], False, stored) == stored[2:3]
    assert overlapping([_bucket(0, expert=True)], False, stored) == []


def test_a_master_is_put_together_and_padding_stays():
    parts = {("a", 20): torch.full((10,), -2.0), ("a", 0): torch.full((20,), -1.0)}
    parts["b", 0] = torch.full((52,), -3.0)
    (master,) = masters_from([_bucket(0)], parts) or [None]
    assert master[:10].tolist() == list(range(10))
    assert master[10:30].tolist() == [-1.0] * 20
    assert master[30:40].tolist() == [-2.0] * 10
    assert master[40:48].tolist() == list(range(40, 48))
    assert master[48:].tolist() == [-3.0] * 2
    del parts["a", 20]
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


class Watched:
    """A gather that writes down what it is told."""

    def __init__(self, values, told):
        self.own_shard, self.told = values, told

    def begin_step(self):
        self.told.append(("begin", self.own_shard.numel()))

    def end_step(self, *, accepted):
        self.told.append(("end", self.own_shard.numel(), accepted))


def test_each_update_of_a_chain_tells_the_gathers_that_it_concerns():
    told: list[Any] = []
    values = torch.zeros(100)
    shards = values[:20], values[20:50], values[50:]
    buckets = [
        LossyBucket(cast(Any, None), cast(Any, None), cast(Any, Watched(shard, told)))
        for shard in shards
    ]
    one, two = _optimizer(values[2:5], values[20:30]), _optimizer(values[60:70])
    one.step_with_ready_grads = lambda: told.append("one") or True
    two.step_with_ready_grads = lambda: told.append("two")  # not accepted
    originals = one.step_with_ready_grads, two.step_with_ready_grads
    watched = parameter_masters.WatchedUpdates(buckets, _chain(one, two))
    assert one.step_with_ready_grads() is True
    assert not two.step_with_ready_grads()
    assert told == [
        *[("begin", 20), ("begin", 30), "one", ("end", 20, True), ("end", 30, True)],
        *[("begin", 50), "two", ("end", 50, False)],
    ]
    assert (one.step_with_ready_grads, two.step_with_ready_grads) != originals
    watched.close()
    assert "step_with_ready_grads" not in vars(one)
