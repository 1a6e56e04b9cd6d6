"""Dense broadcast: the naive straggler-aware baseline (StragglAR's appendix F).

The last rank is the straggler. The others all-reduce without it, so that only little is left to do
when it comes; that little is the whole bucket, several times.

Phase 1, 2 (n - 2) rounds: ranks 0 ... n - 2 run `dense_ring`'s all-reduce, unrounded.
Phase 2, 1 round: rank 0 and the straggler exchange everything and add: both hold the sum.
Phase 3, ceil(log2 n) - 1 rounds: those who have the sum send it, whole, to those who have not.

Rank r < n - 1 sends (N - |c_r|) p + (N - |c_{r+1}|) 4 bytes in phase 1 (n - 1 pieces), rank 0 and
the straggler N p more in phase 2, and those who have a partner N b in each round of phase 3. Bytes
of a value and of a partial sum are as for `dense_ring`. All-reduce only.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.accumulator import Accumulator, store
from megatron_sparse.collectives.base import (
    Phase,
    Steps,
    Subgroup,
    dense_tag,
    even_cuts,
    whole_group,
)
from megatron_sparse.collectives.dense_ring import ring_all_gather, ring_reduce_scatter
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import Stopwatch
from megatron_sparse.transport import Transport


def dense_broadcast(
    bucket: Bucket,
    values_N: torch.Tensor,
    epoch: int,
    transport: Transport,
    buffers: MessageBuffers,
    watch: Stopwatch,
) -> Steps:
    """Sums `values_N` over all ranks into `bucket.grad_N`. Arguments as of `dense`."""
    tag = dense_tag(bucket, "dense_broadcast", values_N, epoch)
    group = whole_group(transport, tag)
    straggler = group.world_size - 1
    accumulator = Accumulator(bucket, values_N, buffers)
    ring_bytes = 0
    if group.rank != straggler:
        ring = Subgroup(transport, range(straggler), tag)
        cuts = even_cuts(bucket.numel, straggler)
        yield from ring_reduce_scatter(accumulator, cuts, ring, watch, last=False)
        yield from ring_all_gather(accumulator.sum_N, cuts, ring, last=False)
        ring_bytes = ring.sent_bytes
    if group.rank in (0, straggler) and straggler > 0:
        peer = straggler - group.rank
        received = accumulator.incoming(bucket.numel)
        sent = accumulator.outgoing(0, bucket.numel)
        only = group.world_size == 2
        yield from group.exchange([(peer, sent)], [(peer, received)], last=only)
        with watch.stage("decode"):
            # What was sent, not what it was rounded from: both ends add the same two numbers.
            torch.add(sent.float(), received, out=accumulator.sum_N)
    if group.rank in (0, straggler):
        store(values_N, accumulator.sum_N)
    yield from _broadcast(values_N, group)
    store(bucket.grad_N, values_N)
    return group.sent_bytes + ring_bytes


def _broadcast(values_N: torch.Tensor, group: Subgroup) -> Phase:
    """Doubles in each round how many ranks hold the values; rank 0 and the last do at first."""
    n = group.world_size
    # Numbered so that the two that hold the values come first.
    number = 1 if group.rank == n - 1 and n > 1 else group.rank + (group.rank > 0)
    rank_of = [0, n - 1, *range(1, n - 1)]
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
