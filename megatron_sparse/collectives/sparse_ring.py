"""Sparse ring (SpCCL, section IV-B; SparCML's ring): a ring that encodes its sums again and again.

The skeleton of SpCCL's adaptive ring: each message is sparse or dense, whatever is smaller.

Agreement: one all-gather of what is meant, 16 bytes a rank.
Reduce-scatter, n - 1 steps of two rounds (8 bytes with the size, then the records): every rank
passes the sum of one shard to its successor, adds its own contribution to the one it gets, and
encodes that again. Shard i starts at rank i + 1, as it was encoded at first, and ends at rank i.
All-reduce only: the sums are encoded once more, their sizes all-gathered (24 bytes a rank), and in
n - 1 rounds the records go round the ring unchanged.

In step s rank r sends the records of the sum of shard r - s by ranks r - s + 1, ..., r (s counts
from 1), and in the all-gather every sum but that of rank r + 1.
"""

from __future__ import annotations

from megatron_sparse.bucket import Bucket, Form
from megatron_sparse.collectives.base import Steps, exchange_sizes, tag_of, whole_group
from megatron_sparse.collectives.direct import encode_own_shard
from megatron_sparse.collectives.gather import ring_all_gather
from megatron_sparse.collectives.records import SparseSum, exchange_records, shard_cuts
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import Stopwatch
from megatron_sparse.transport import Transport

NAME = "sparse_ring"


def sparse_ring(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    watch: Stopwatch,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Arguments and errors as of `agsparse`; the message is cut into shards in both forms.
    """
    scatter = bucket.form is Form.REDUCE_SCATTER
    group = whole_group(transport, tag_of(bucket, NAME, message.value_dtype, message.epoch))
    n, rank = group.world_size, group.rank
    cuts = shard_cuts(message.layout, n)
    yield from exchange_sizes([], bucket, NAME, message.value_dtype, message.epoch, transport)
    sums = SparseSum(bucket, message, buffers, watch)
    own = message.buffer[: message.nbytes].split(message.shard_bytes())
    most = max(cut.capacity("fp32") for cut in cuts)
    out, room = sums.take("encoded", most), sums.take("received", most)
    for shard, records in enumerate(own):
        sums.add_message(records, cuts[shard], rank, fresh=True)

    for step in range(1, n):
        give, take = (rank - step) % n, (rank - 1 - step) % n
        is_sum = step > 1
        sent = sums.encode(cuts[give], sums.partial_dtype, out) if is_sum else own[give]
        dtype = sums.partial_dtype if is_sum else message.value_dtype
        records = yield from exchange_records(
            group,
            ((rank + 1) % n, sent),
            ((rank - 1) % n, room[: cuts[take].capacity(dtype)]),
            last=scatter and step == n - 1,
        )  # fmt: skip
        source = (rank - 1) % n
        if is_sum:
            sums.add_sum(records, cuts[take], dtype, source)
        else:
            sums.add_message(records, cuts[take], source)
    if scatter:
        sums.write(cuts[rank].elements)
        return group.sent_bytes
    buffer, sizes = yield from encode_own_shard(NAME, bucket, message, cuts, sums, transport)
    yield from ring_all_gather(buffer, sizes, group, sums.placer(cuts))
    return group.sent_bytes
