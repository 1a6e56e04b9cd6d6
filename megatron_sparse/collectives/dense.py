"""Dense: the backend's own all-reduce or reduce-scatter of the whole bucket.

Agreement, on CPU only: one all-gather of what is meant, 8 (2 + n) bytes a rank. gloo's own
reductions end the process where ranks disagree about the size; on CUDA, where the answer would have
to be read on the host, ranks that disagree wait for NCCL's watchdog.

Bytes on the wire: 2 (n - 1) / n N b for a ring all-reduce, half of it for a reduce-scatter. This
is also how Megatron synchronises, so on the same backend and ranks the sums are bit for bit its
own. Where values travel in a narrower dtype, the backend adds in that dtype; a bucket whose
`fp32_sums` forbids that is reduce-scattered by `dense_allpairs`, which is what Megatron's
`reduce_scatter_with_fp32_accumulation` does.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.base import POSTED, Steps, exchange_sizes
from megatron_sparse.collectives.dense_allpairs import dense_allpairs
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport


def dense(
    bucket: Bucket,
    values_N: torch.Tensor,
    epoch: int,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
) -> Steps:
    """Sums `values_N` over all ranks into `bucket.grad_N`.

    Args:
        bucket: receives the sum: all of it, or this rank's shard for a reduce-scatter.
        values_N: this rank's contribution: the gradient itself or a narrower copy. Overwritten.
        epoch: the step; the pairwise schemes keep their messages apart by it.
        transport: the group.
        buffers: where those schemes keep partial sums and what they receive.
        timer: receives the network and decode time.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
    """
    if bucket.fp32_sums and bucket.op is CollectiveOp.REDUCE_SCATTER:
        return (yield from dense_allpairs(bucket, values_N, epoch, transport, buffers, timer))
    if transport.device.type == "cpu":
        yield from exchange_sizes([], bucket, "dense", str(values_N.dtype), epoch, transport)
    own = slice(None)
    if bucket.op is CollectiveOp.ALL_REDUCE:
        work = transport.all_reduce_(values_N)
    else:
        own = bucket.shard(transport.rank)
        work = transport.reduce_scatter(values_N[own], values_N)
    yield POSTED
    yield work
    if values_N is not bucket.grad_N:
        with timer.stage("decode"):
            bucket.grad_N[own].copy_(values_N[own])
    ring = (transport.world_size - 1) * values_N.numel() * values_N.element_size()
    return ring * (2 if bucket.op is CollectiveOp.ALL_REDUCE else 1) // transport.world_size
