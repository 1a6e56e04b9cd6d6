"""The second half of a sum where Megatron's distributed optimizer has several instances.

With `num_distributed_optimizer_instances` = k > 1 the data-parallel ranks are cut into k instances,
each of which holds the whole optimizer state. A bucket is reduce-scattered inside the instance by
the scheme of its plan. Then each rank all-reduces its shard with the ranks that own the same shard
in the other instances, in one of two ways:

- Dense, by the backend's own all-reduce, which Megatron uses too: the sum inside the instance has
  filled in. Cost beside the scheme's: 2 (k - 1) / k N b / n bytes on n ranks an instance, and one
  round.
- Compressed, at `compression.level=node+instance`: the shard is a bucket of its own. Its sum
  inside the instance is selected from, with a residual of its own, and the selections of the k
  instances are exchanged. So there are two residuals, and `sent + residual == value + residual
  before` holds for each: of nodes, where the value is the node's gradient, and of instances, where
  it is the sum of what the instance's nodes have sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import POSTED, QUEUED, Exchange
from megatron_sparse.collectives.dense import dense
from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from megatron_sparse.reduction.bucket_job import BucketJob
from megatron_sparse.reduction.job import Stage, without_gates
from megatron_sparse.reduction.level_parts import KeptParts, instance_part
from megatron_sparse.transport import Transport
from megatron_sparse.transport.base import Marker


class ShardReducer(Protocol):
    """A `GradientReducer` of the ranks that own the same shard, one of each instance."""

    def job(self, bucket: Bucket, step: int) -> BucketJob:
        """Plans the synchronisation of a shard."""
        ...

    def synchronise(self, job: BucketJob) -> Stage[None]:
        """Its pipeline."""
        ...


class SecondHalf(Protocol):
    """The stage that follows the collective of a bucket's group."""

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """Runs the steps of a collective, then the second half; returns the bytes sent in both.

        Args:
            steps: of the collective.
            exchange: with which the collective was started.
            step: the training step.
        """
        ...


def second_half(
    instances: Transport | None, shards: KeptParts, reducer: ShardReducer | None
) -> SecondHalf:
    """The sum over the instances, or nothing where there is one instance only.

    Args:
        instances: the ranks that own the same shard, one of each instance.
        shards: `shard_bucket` of this rank.
        reducer: of these ranks, where their shards are compressed.
    """
    if instances is None:
        return OneInstance()
    if reducer is None:
        return SumOverInstances(shards, instances)
    return CompressedInstances(shards, reducer)


class OneInstance:
    """Nothing follows the collective."""

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`."""
        return steps


class _OverInstances:
    """What both ways have in common: the averaged shard, and the order of the halves."""

    def __init__(self, shards: KeptParts) -> None:
        self._shards = shards

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`; `steps` is a reduce-scatter.

        Raises:
            CommunicationError: an instance means another bucket or step.
        """
        return one_after_another(steps, lambda: self._second(exchange, step))

    def _second(self, exchange: Exchange, step: int) -> Stage[int]:
        bucket, shard = exchange.bucket, self._shards.of(exchange.bucket)
        shard.grad_N = bucket.grad_N[bucket.shard(exchange.transport.rank)]
        if exchange.averages:
            shard.grad_N.div_(bucket.instances)
        across = replace(exchange, bucket=shard, averages=False)
        return (yield from self._sum(across, step))

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        """Overwrites the shard, the exchange's bucket, with the sum; returns the bytes sent."""
        raise NotImplementedError


class SumOverInstances(_OverInstances):
    """Adds up this rank's shard over all instances, dense.

    Args:
        shards: see `second_half`.
        instances: the ranks that own the same shard, one of each instance.
    """

    def __init__(self, shards: KeptParts, instances: Transport) -> None:
        super().__init__(shards)
        self._instances = instances

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        across = replace(exchange, transport=self._instances)
        return dense(across, exchange.bucket.grad_N, step)


class CompressedInstances(_OverInstances):
    """Selects from this rank's shard, and adds up the selections of all instances.

    The stages count to those of the bucket: both halves have one record.

    Args:
        shards: see `second_half`.
        reducer: of the ranks that own the same shard.
    """

    def __init__(self, shards: KeptParts, reducer: ShardReducer) -> None:
        super().__init__(shards)
        self._reducer = reducer

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        job = self._reducer.job(exchange.bucket, step)
        job.record.timer = exchange.timer
        # The bucket has passed its gate already.
        yield from without_gates(self._reducer.synchronise(job))
        return job.record.wire_bytes


def config_of_instances(config: SparseConfig) -> SparseConfig:
    """The configuration of what selects from sums of instances: sampled top-k, no stragglers.

    Velocities of DGC, for example, are in these sums already.
    """
    compression = replace(config.compression, method="topk")
    return replace(config, compression=compression, straggler=StragglerConfig())


def shard_bucket(bucket: Bucket, rank: int) -> Bucket:
    """The shard that `rank` of an instance owns, as a bucket of the ranks that own it too.

    Shares the gradient's memory.

    Example:
        >>> import torch
        >>> from megatron_sparse.bucket import CollectiveOp
        >>> op = CollectiveOp.REDUCE_SCATTER
        >>> b = Bucket("0", torch.zeros(8), (), op, world_size=2, instances=3)
        >>> shard_bucket(b, 1).numel, shard_bucket(b, 1).world_size
        (4, 3)
    """
    return replace(instance_part(bucket, rank), name=f"{bucket.name}.instances")


def one_after_another(first: Stage[int], second: Callable[[], Stage[int]]) -> Stage[int]:
    """Runs two collectives of a bucket; returns the bytes sent in both.

    The first one's markers are held back: the next bucket may post only when this one has posted
    its second half. Otherwise ranks would meet there in the order in which first halves end, which
    differs between instances.
    """
    sent_bytes = yield from until_queued(first)
    later = second()
    later_bytes = yield from until_queued(later, POSTED)
    if sent_bytes is None or later_bytes is None:
        # What is left only reads reports, after both have been queued.
        yield QUEUED
    if sent_bytes is None:
        sent_bytes = yield from first
    if later_bytes is None:
        later_bytes = yield from later
    return sent_bytes + later_bytes


def until_queued(steps: Stage[int], posted: object = None) -> Stage[int | None]:
    """Drives a collective to its end, or to `QUEUED` (None); passes no marker on.

    Args:
        steps: of the collective.
        posted: what to yield in place of `POSTED` and `UNORDERED`; None for nothing.
    """
    while True:
        try:
            outcome = next(steps)
        except StopIteration as end:
            return end.value
        if outcome is QUEUED:
            return None
        if not isinstance(outcome, Marker):
            yield outcome
        elif posted is not None:
            yield posted
