"""Dense all-pairs: every rank sends every other its piece at once (MSCCL's all-pairs).

It takes two rounds for any number of ranks. It suits small buckets, where rounds cost more than
bytes. The bucket is cut into n pieces.

Phase 1, 1 round: rank r sends piece i to rank i, for all i at once. Each rank adds the n parts of
its piece in rank order, in fp32.
Phase 2 (all-reduce only), 1 round: each rank sends its summed piece to all others at once.

Rank r sends (N - |c_r|) b bytes, and (n - 1) |c_r| b in the second phase: with equal pieces
2 (n - 1) / n N b. No partial sum travels, so only the final sum is rounded.
"""

from __future__ import annotations

import torch

from megatron_sparse.collectives.accumulator import store
from megatron_sparse.collectives.base import Exchange, Identity, Steps, even_cuts, whole_group
from megatron_sparse.collectives.buffer_sizes import FP32_BYTES, BufferSizes
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.formats.rounding import round_into
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun


def dense_allpairs(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `dense`."""
    bucket, scatter = exchange.bucket, exchange.scatters
    identity = Identity.of_values("dense_allpairs", exchange, values_N, step)
    group = whole_group(exchange.transport, identity.tag)
    n, rank = group.world_size, group.rank
    peers = [peer for peer in range(n) if peer != rank]
    cuts = even_cuts(bucket.numel, n)
    pieces = [values_N[cuts[i] : cuts[i + 1]] for i in range(n)]
    own = pieces[rank]

    parts = exchange.take("parts", n * own.numel(), own.dtype)
    parts_nM = parts.view(n, own.numel())
    yield from group.exchange(
        [(peer, pieces[peer]) for peer in peers],
        [(peer, parts_nM[peer]) for peer in peers],
        last=scatter,
    )
    with exchange.timer.stage("decode"):
        sum_M = exchange.take("piece", own.numel(), torch.float32)
        for index in range(n):
            part = own if index == rank else parts_nM[index]
            if index == 0:
                sum_M.copy_(part)
            else:
                sum_M.add_(part)
        if scatter:
            round_into(bucket.grad_N[cuts[rank] : cuts[rank + 1]], sum_M)
            return group.sent_bytes
        round_into(own, sum_M)
    yield from group.exchange(
        [(peer, own) for peer in peers], [(peer, pieces[peer]) for peer in peers], last=True
    )
    store(bucket.grad_N, values_N)
    return group.sent_bytes


def buffers(sizes: BufferSizes) -> dict[str, int]:
    """All ranks' parts of this rank's piece, and their fp32 sum."""
    cuts = even_cuts(sizes.bucket.numel, sizes.ranks)
    own = cuts[sizes.rank + 1] - cuts[sizes.rank]
    return {"parts": sizes.ranks * own * sizes.value_bytes, "piece": own * FP32_BYTES}


def cost(run: DryRun) -> None:
    """All pieces at once, twice; the n parts of a piece are added in between.

    With s = N b bytes: 2 alpha + 2 (n - 1) / n s beta. A reduce-scatter takes the first half.
    Added: n - 1 additions and two copies of one piece.
    """
    numel = run.shape.numel / run.n
    run.clocks.everybody_at_once(numel * run.b, run.host_s)
    run.work((run.n - 1) * run.plain(CodecOp.ADD, numel) + 2 * run.plain(CodecOp.COPY, numel))
    if not run.scatter:
        run.clocks.everybody_at_once(numel * run.b, run.host_s)


SCHEME = Scheme(
    "dense_allpairs",
    Input.DENSE,
    run=dense_allpairs,
    place=40,
    cost=cost,
    buffers=buffers,
)
