"""SSAR split all-gather (SparCML, Renggli et al. 2019): split, then a sparse recursive doubling.

Phase 1 is `direct`'s: the agreement, then n - 1 rounds in which every shard goes to its owner, who
adds it up. Phase 2, ceil(log2 n) rounds after one all-gather of sizes (8 (2 + n) bytes a rank): the
encoded sums are all-gathered by recursive doubling, for any number of ranks (Bruck's order).

Fewer rounds than `direct` and the same bytes in total, but the ranks pass on others' sums, so who
sends most depends on where the non-zeros are. Rank r sends |message_r| - |shard_r of it| bytes, and
in the round in which d sums are held those of ranks r ... r + d - 1 (in the last round only as many
as are missing). All-reduce only: as a reduce-scatter it is `direct`.
"""

from __future__ import annotations

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Steps
from megatron_sparse.collectives.direct import encode_own_shard, split
from megatron_sparse.collectives.gather import doubling_all_gather
from megatron_sparse.collectives.records import SparseSum, group_of, shard_cuts
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport

NAME = "ssar_split_ag"


def ssar_split_ag(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Arguments and errors as of `agsparse`; the message is cut into shards.
    """
    group = group_of(NAME, bucket, message, transport)
    cuts = shard_cuts(message.layout, group.world_size)
    sums = SparseSum(bucket, message, buffers, timer)
    yield from split(NAME, bucket, message, cuts, sums, group, transport, last=False)
    buffer, sizes = yield from encode_own_shard(NAME, bucket, message, cuts, sums, transport)
    yield from doubling_all_gather(buffer, sizes, group, sums.placer(cuts))
    return group.sent_bytes
