"""The second half of a sum where Megatron's distributed optimizer has several instances.

With `num_distributed_optimizer_instances` = k > 1 the data-parallel ranks are cut into k instances,
each of which holds the whole optimizer state. A bucket is reduce-scattered inside the instance by
the scheme of its plan. Then each rank all-reduces its shard with the ranks that own the same shard
in the other instances: dense, by the backend's own all-reduce, which Megatron uses too, because the
sum inside the instance has filled in.

Cost beside the scheme's: 2 (k - 1) / k N b / n bytes on n ranks an instance, and one round.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Exchange
from megatron_sparse.collectives.dense import dense
from megatron_sparse.reduction.job import GATE, Stage, one_after_another
from megatron_sparse.reduction.level_parts import KeptParts, instance_part
from megatron_sparse.transport import Transport


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
        """Runs a collective, then the second half; returns the bytes sent in both.

        Args:
            steps: of the collective, a reduce-scatter.
            exchange: with which it was started.
            step: the training step.

        Raises:
            CommunicationError: an instance means another bucket or step.
        """
        return one_after_another(steps, self._sum(exchange, step), GATE)

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
