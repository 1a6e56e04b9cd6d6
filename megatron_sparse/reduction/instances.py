"""The second half of a sum where Megatron's distributed optimizer has several instances.

With `num_distributed_optimizer_instances` = k > 1 the data-parallel ranks are cut into k instances,
each of which holds the whole optimizer state. A bucket is reduce-scattered inside the instance by
the scheme of its plan. Then each rank all-reduces its shard with the ranks that own the same shard
in the other instances: dense, by the backend's own all-reduce, which Megatron uses too, because the
sum inside the instance has filled in.

Cost beside the scheme's: 2 (k - 1) / k N b / n bytes on n ranks an instance, and one round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import POSTED, QUEUED, Exchange
from megatron_sparse.collectives.dense import dense
from megatron_sparse.reduction.job import Stage
from megatron_sparse.reduction.level_parts import KeptParts, instance_part
from megatron_sparse.transport import Transport
from megatron_sparse.transport.base import Marker


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


def second_half(instances: Transport | None, rank: int) -> SecondHalf:
    """The sum over the instances, or nothing where there is one instance only.

    Args:
        instances: the ranks that own the same shard, one of each instance.
        rank: this rank in its instance.
    """
    return OneInstance() if instances is None else SumOverInstances(instances, rank)


class OneInstance:
    """Nothing follows the collective."""

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`."""
        return steps


class SumOverInstances:
    """Adds up this rank's shard over all instances, dense.

    Args:
        instances: the ranks that own the same shard, one of each instance.
        rank: this rank in its instance.
    """

    def __init__(self, instances: Transport, rank: int) -> None:
        self._instances = instances
        self._shards = KeptParts(lambda bucket: shard_bucket(bucket, rank))

    def after(self, steps: Stage[int], exchange: Exchange, step: int) -> Stage[int]:
        """See `SecondHalf`; `steps` is a reduce-scatter.

        Raises:
            CommunicationError: an instance means another bucket or step.
        """
        return one_after_another(steps, lambda: self._sum(exchange, step))

    def _sum(self, exchange: Exchange, step: int) -> Stage[int]:
        """Overwrites the shard with its sum; returns the bytes sent."""
        bucket, shard = exchange.bucket, self._shards.of(exchange.bucket)
        shard.grad_N = bucket.grad_N[bucket.shard(exchange.transport.rank)]
        if exchange.averages:
            shard.grad_N.div_(bucket.instances)
        across = replace(exchange, bucket=shard, transport=self._instances, averages=False)
        return (yield from dense(across, shard.grad_N, step))


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
