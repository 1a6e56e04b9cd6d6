"""Dense broadcast: the naive straggler-aware baseline (StragglAR's appendix F).

The straggler is `Exchange.straggler`, or the last rank where none is known. The others all-reduce
without it, so that few rounds are left when it comes. But each of those rounds carries the whole
bucket.

Phase 1, 2 (n - 2) rounds: the early ranks run `dense_ring`'s all-reduce, unrounded.
Phase 2, 1 round: the first early rank and the straggler exchange everything and add: both hold the
sum.
Phase 3, ceil(log2 n) - 1 rounds: ranks that have the sum send all of it to ranks that do not.

Early rank r sends (N - |c_r|) p + (N - |c_{r+1}|) 4 bytes in phase 1 (n - 1 pieces), the first one
and the straggler N p more in phase 2, and a sender of phase 3 N b in each of its rounds.
Bytes of a value and of a partial sum are as for `dense_ring`. All-reduce only.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_sparse.collectives.accumulator import Accumulator, dense_group, store
from megatron_sparse.collectives.base import Exchange, Phase, Steps, Subgroup, even_cuts
from megatron_sparse.collectives.dense_ring import ring_all_gather, ring_reduce_scatter
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.straggler_shares import straggler_of
from megatron_sparse.formats.rounding import unify_nan_
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.shape import FP32_BYTES
from megatron_sparse.straggler.schedule import early_ranks


def dense_broadcast(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `straggler`."""
    bucket, transport = exchange.bucket, exchange.transport
    late = straggler_of(exchange)
    straggler = transport.world_size - 1 if late is None else late
    group = dense_group(f"dense_broadcast (rank {straggler})", exchange, values_N, step)
    early = early_ranks(group.world_size, straggler)
    accumulator = Accumulator(exchange, values_N)
    ring_bytes = 0
    # The early ranks all-reduce without the straggler.
    if group.rank != straggler:
        ring = Subgroup(transport, early, group.tag)
        cuts = even_cuts(bucket.numel, len(early))
        yield from ring_reduce_scatter(accumulator, cuts, ring, last=False)
        yield from ring_all_gather(accumulator.sum_N, cuts, ring, last=False)
        ring_bytes = ring.sent_bytes
    # The first early rank and the straggler exchange what they hold: then both hold the sum.
    holders = [*early[:1], straggler]
    if group.rank in holders and early:
        peer = early[0] if group.rank == straggler else straggler
        received = accumulator.incoming(bucket.numel)
        sent = accumulator.outgoing(0, bucket.numel)
        is_last = group.world_size == 2
        yield from group.exchange([(peer, sent)], [(peer, received)], last=is_last)
        with exchange.timer.stage("decode"):
            # Adds the rounded values that were sent, so that both ends add the same two numbers.
            # Two NaN give other bits in the other order.
            unify_nan_(torch.add(sent.float(), received, out=accumulator.sum_N))
    if group.rank in holders:
        store(values_N, accumulator.sum_N)
    yield from _broadcast(values_N, [*holders, *early[1:]], group)
    store(bucket.grad_N, values_N)
    return group.sent_bytes + ring_bytes


def _broadcast(values_N: torch.Tensor, rank_of: list[int], group: Subgroup) -> Phase:
    """Sends the values to all: in each round every rank that has them sends them to one more.

    `rank_of` has all ranks in the order in which they get the values; the first two begin.
    """
    n, number = group.world_size, rank_of.index(group.rank)
    holders = 2
    while holders < n:
        is_end = 2 * holders >= n
        if number < holders:
            target = number + holders
            sends = [(rank_of[target], values_N)] if target < n else []
            yield from group.exchange(sends, [], last=is_end)
        elif number < 2 * holders:
            yield from group.exchange([], [(rank_of[number - holders], values_N)], last=is_end)
        holders *= 2


def cost(run: DryRun) -> None:
    """All ranks but the last all-reduce; one of them meets the last; the sum is then broadcast.

    With s = N b bytes: (2 (n - 2) + ceil(log2 n)) alpha + (2 (n - 2) / (n - 1) + ceil(log2 n))
    s beta (StragglAR, appendix F). Added: the additions.
    """
    n, numel = run.n, run.shape.numel
    if n == 1:
        return
    # The rank that each rank sends to, -1 for none: here round the ring of all but the last.
    successor_n = (np.arange(n) + 1) % (n - 1)
    successor_n[n - 1] = -1
    if n > 2:
        piece = numel / (n - 1)
        for _ in range(n - 2):  # reduce-scatter, of partial sums
            run.exchange(successor_n, piece * run.p)
            run.work(run.plain(CodecOp.ADD, piece))
        for _ in range(n - 2):  # all-gather, in fp32: the sum still lacks the last rank
            run.exchange(successor_n, piece * FP32_BYTES)  # sums that are not rounded yet
    # Rank 0 and the last meet.
    meeting_n = np.full(n, -1)
    meeting_n[0], meeting_n[n - 1] = n - 1, 0
    run.exchange(meeting_n, numel * run.p)
    run.work(run.plain(CodecOp.ADD, numel))
    # The first `holders` ranks of `order` have the sum; each sends it to one of those behind.
    order, holders = [0, n - 1, *range(1, n - 1)], 2
    while holders < n:
        target_n = np.full(n, -1)
        for place in range(min(holders, n - holders)):
            target_n[order[place]] = order[place + holders]
        run.exchange(target_n, numel * run.b)
        holders *= 2


SCHEME = Scheme(
    "dense_broadcast",
    Input.DENSE,
    run=dense_broadcast,
    place=50,
    cost=cost,
    ops=ALL_REDUCE_ONLY,
)
