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
from megatron_sparse.reduction.bucket_job import BucketJob
from megatron_sparse.reduction.job import Gate, Stage
from megatron_sparse.reduction.level_parts import instance_part
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

    def part(self, bucket: Bucket) -> Bucket | None:
        """What is selected from after the collective, always the same object; None: nothing."""
        ...

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """Runs the steps of a collective, then the second half; returns the bytes sent in both.

        Args:
            steps: of the collective.
            exchange: with which the collective was started.
            step: the training step.
        """
        ...


def second_half(instances: Transport | None, rank: int, reducer: ShardReducer | None) -> SecondHalf:
    """The sum over the instances, or nothing where there is one instance only.

    Args:
        instances: the ranks that own the same shard, one of each instance.
        rank: this rank in its instance.
        reducer: of these ranks, where their shards are compressed.
    """
    if instances is None:
        return OneInstance()
    if reducer is None:
        return SumOverInstances(instances)
    return CompressedInstances(reducer, rank)


class OneInstance:
    """Nothing follows the collective."""

    def part(self, bucket: Bucket) -> Bucket | None:
        """See `SecondHalf`."""
        return None

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`."""
        return steps


class SumOverInstances:
    """Adds up this rank's shard over all instances, dense.

    Args:
        instances: the ranks that own the same shard, one of each instance.
    """

    def __init__(self, instances: Transport) -> None:
        self._instances = instances

    def part(self, bucket: Bucket) -> Bucket | None:
        """See `SecondHalf`."""
        return None

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`; `steps` is a reduce-scatter.

        Raises:
            CommunicationError: an instance means another bucket or step.
        """
        return one_after_another(steps, lambda: self._sum(exchange, step))

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        shard = shard_bucket(exchange.bucket, exchange.transport.rank)
        if exchange.averages:
            shard.grad_N.div_(exchange.bucket.instances)
        across = replace(exchange, bucket=shard, transport=self._instances, averages=False)
        return (yield from dense(across, shard.grad_N, step))


class CompressedInstances:
    """Selects from this rank's shard, and adds up the selections of all instances.

    The stages count to those of the bucket: both halves have one record.

    Args:
        reducer: of the ranks that own the same shard.
        rank: this rank in its instance.
    """

    def __init__(self, reducer: ShardReducer, rank: int) -> None:
        self._reducer = reducer
        self._rank = rank
        self._parts: dict[str, tuple[Bucket, Bucket]] = {}

    def part(self, bucket: Bucket) -> Bucket:
        """See `SecondHalf`."""
        kept, shard = self._parts.get(bucket.name, (None, None))
        if shard is None or kept is not bucket:
            shard = shard_bucket(bucket, self._rank)
            self._parts[bucket.name] = bucket, shard
        return shard

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`; `steps` is a reduce-scatter."""
        return one_after_another(steps, lambda: self._sum(exchange, step))

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        bucket, shard = exchange.bucket, self.part(exchange.bucket)
        shard.grad_N = bucket.grad_N[bucket.shard(self._rank)]
        if exchange.averages:
            shard.grad_N.div_(bucket.instances)
        job = self._reducer.job(shard, step)
        job.record.timer = exchange.timer
        # The bucket has passed its gate already.
        yield from without_gates(self._reducer.synchronise(job))
        return job.record.wire_bytes


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


def without_gates(steps: Stage[None]) -> Stage[None]:
    """The steps of a pipeline, without its gates."""
    yield from (outcome for outcome in steps if not isinstance(outcome, Gate))


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
