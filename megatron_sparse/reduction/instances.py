"""The second half of a sum where Megatron's distributed optimizer has several instances.

With `num_distributed_optimizer_instances` = k > 1 the data-parallel ranks are cut into k instances,
each of which holds the whole optimizer state. A bucket is reduce-scattered inside the instance,
by whatever scheme its plan names, and then each rank all-reduces its shard with the ranks that own
the same shard in the other instances. What was selected inside the instance fills in there, so the
second half is dense: the backend's own all-reduce, which is also what Megatron does.

Cost beside the scheme's: 2 (k - 1) / k N b / n bytes on n ranks an instance, and one round.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.collectives.dense import dense
from megatron_sparse.transport import Transport
from megatron_sparse.transport.base import Marker


def shard_bucket(bucket: Bucket, rank: int) -> Bucket:
    """The shard that `rank` of an instance owns, as a bucket of the ranks that own it too.

    Shares the gradient's memory.

    Example:
        >>> import torch
        >>> b = Bucket("0", torch.zeros(8), (), Form.REDUCE_SCATTER, world_size=2, instances=3)
        >>> shard_bucket(b, 1).numel, shard_bucket(b, 1).world_size
        (4, 3)
    """
    shard_M = bucket.grad_N[bucket.shard(rank)]
    return Bucket(
        f"{bucket.name}.instances", shard_M, (), CollectiveOp.ALL_REDUCE, bucket.instances
    )


def summed_over_instances(
    steps: Steps, exchange: Exchange, step: int, instances: Transport
) -> Steps:
    """Runs a reduce-scatter inside the instance, then adds up the shards of all instances.

    The next bucket may post only when this one has posted its second half: ranks would else meet
    in another order there, whichever bucket's first half ended first.

    Args:
        steps: the reduce-scatter.
        exchange: the one that `steps` are of; the shard of this rank receives the sum over all
            instances.
        step: the training step.
        instances: the ranks that own the same shard, one of each instance.

    Raises:
        CommunicationError: an instance means another bucket or step.
    """
    sent_bytes = yield from _without_markers(steps)
    shard = shard_bucket(exchange.bucket, exchange.transport.rank)
    across = replace(exchange, bucket=shard, transport=instances)
    return sent_bytes + (yield from dense(across, shard.grad_N, step))


def _without_markers(steps: Steps) -> Steps:
    while True:
        try:
            outcome = next(steps)
        except StopIteration as end:
            return end.value
        if not isinstance(outcome, Marker):
            yield outcome
