"""Dense all-pairs: every rank sends every other its piece at once (MSCCL's all-pairs).

It takes two rounds for any number of ranks. It suits small buckets, where rounds cost more than
bytes. The bucket of N values of b bytes is cut into n pieces c_0 ... c_{n-1}.

Phase 1, 1 round: rank r sends piece i to rank i, for all i at once. Each rank adds the n parts of
its piece in rank order, in fp32.
Phase 2 (all-reduce only), 1 round: each rank sends its summed piece to all others at once.

Rank r sends (N - |c_r|) b bytes, and (n - 1) |c_r| b in the second phase: with equal pieces
2 (n - 1) / n N b. No partial sum travels, so only the final sum is rounded.
"""

import torch

from megatron_sparse.collectives.accumulator import dense_group, store
from megatron_sparse.collectives.base import Exchange, Steps, even_cuts
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.shape import FP32_BYTES


def dense_allpairs(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `dense`."""
    bucket, scatter = exchange.bucket, exchange.scatters
    group = dense_group("dense_allpairs", exchange, values_N, step)
    n, rank = group.world_size, group.rank
    peers = [peer for peer in range(n) if peer != rank]
    cuts = even_cuts(bucket.numel, n)
    pieces = [values_N[cuts[i] : cuts[i + 1]] for i in range(n)]
    own = pieces[rank]

    # Phase 1. Rank i receives all ranks' parts of piece i, and adds them.
    parts = exchange.take("parts", len(peers) * own.numel(), own.dtype)
    received = dict(zip(peers, parts.view(len(peers), own.numel()), strict=True))
    yield from group.exchange(
        [(peer, pieces[peer]) for peer in peers], list(received.items()), last=scatter
    )
    first, *others = [received.get(sender, own) for sender in range(n)]
    with exchange.timer.stage("decode"):
        sum_M = first  # fp32 parts are added up in place, in the memory of rank 0's part
        if own.dtype != torch.float32:
            sum_M = exchange.take("piece", own.numel(), torch.float32).copy_(first)
        for part in others:
            sum_M.add_(part)
        result_M = bucket.grad_N[cuts[rank] : cuts[rank + 1]] if scatter else own
        store(result_M, sum_M)
    if scatter:
        return group.sent_bytes
    # Phase 2. `own` now holds the sum of its piece: every rank sends it to all others.
    yield from group.exchange(
        [(peer, own) for peer in peers], [(peer, pieces[peer]) for peer in peers], last=True
    )
    store(bucket.grad_N, values_N)
    return group.sent_bytes


def cost(run: DryRun) -> None:
    """Predicts the time of two rounds, in each of which every rank sends all pieces at once.

    With s = N b bytes: 2 alpha + 2 (n - 1) / n s beta. A reduce-scatter takes the first half.
    Added, between the rounds: n - 1 additions of one piece, and one copy of it; two copies where
    values are narrower than fp32.
    """
    numel = run.shape.numel / run.n
    run.clocks.everybody_at_once(numel * run.b)
    copies = 2 if run.b < FP32_BYTES else 1
    run.work((run.n - 1) * run.plain(CodecOp.ADD, numel) + copies * run.plain(CodecOp.COPY, numel))
    if not run.scatter:
        run.clocks.everybody_at_once(numel * run.b)


SCHEME = Scheme("dense_allpairs", Input.DENSE, run=dense_allpairs, place=40, cost=cost)
