"""Dense all-pairs: every rank sends every other its piece at once (MSCCL's all-pairs).

Two rounds, whatever the number of ranks: for small buckets, where the rounds cost more than the
bytes. The bucket is cut into n pieces.

Phase 1, 1 round: rank r sends piece i to rank i, for all i at once. Each rank adds the n parts of
its piece in rank order, in fp32.
Phase 2 (all-reduce only), 1 round: each rank sends its summed piece to all others at once.

Rank r sends (N - |c_r|) b bytes, and (n - 1) |c_r| b in the second phase: with equal pieces
2 (n - 1) / n N b. No partial sum travels, so nothing is rounded but the final sum.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.accumulator import store
from megatron_sparse.collectives.base import Steps, dense_tag, even_cuts, whole_group
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport


def dense_allpairs(
    bucket: Bucket,
    values_N: torch.Tensor,
    epoch: int,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
) -> Steps:
    """Sums `values_N` over all ranks into `bucket.grad_N`. Arguments as of `dense`."""
    scatter = bucket.op is CollectiveOp.REDUCE_SCATTER
    group = whole_group(transport, dense_tag(bucket, "dense_allpairs", values_N, epoch))
    n, rank = group.world_size, group.rank
    peers = [peer for peer in range(n) if peer != rank]
    cuts = even_cuts(bucket.numel, n)
    pieces = [values_N[cuts[i] : cuts[i + 1]] for i in range(n)]
    own = pieces[rank]

    parts = buffers.take(f"parts:{bucket.name}", n * own.numel(), own.device, own.dtype)
    parts_nM = parts.view(n, own.numel())
    yield from group.exchange(
        [(peer, pieces[peer]) for peer in peers],
        [(peer, parts_nM[peer]) for peer in peers],
        last=scatter,
    )
    with timer.stage("decode"):
        sum_M = buffers.take(f"piece:{bucket.name}", own.numel(), own.device, torch.float32)
        for index in range(n):
            part = own if index == rank else parts_nM[index]
            if index == 0:
                sum_M.copy_(part)
            else:
                sum_M.add_(part)
        if scatter:
            bucket.grad_N[cuts[rank] : cuts[rank + 1]].copy_(sum_M)
            return group.sent_bytes
        own.copy_(sum_M)
    yield from group.exchange(
        [(peer, own) for peer in peers], [(peer, pieces[peer]) for peer in peers], last=True
    )
    store(bucket.grad_N, values_N)
    return group.sent_bytes
