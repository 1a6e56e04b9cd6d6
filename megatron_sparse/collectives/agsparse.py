"""AGsparse: every rank sends its sparse message to every other, and each adds them all up.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
It never meets fill-in on the way, and it sends (n - 1) messages from each rank, so it suits few
ranks. The reduce-scatter form sends each peer only the records of the peer's own shard:
(n - 1) / n of a message.

Phase 1: sizes (and the agreement of what is being synchronised), one small all-gather.
Phase 2: the messages; an all-gather padded to the longest, or an uneven all-to-all.
Then: add the messages in rank order, the first one to zero, so that all ranks hold the same bits.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket, Form
from megatron_sparse.collectives.base import POSTED, Steps, exchange_sizes
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats.message import Message, MessageBuffers, decode_add_
from megatron_sparse.recording import Stopwatch
from megatron_sparse.transport import Transport


def agsparse(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    watch: Stopwatch,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Sums are fp32 and rounded once, to nearest even, where the gradient is narrower.

    Args:
        bucket: receives the sum: all of it, or this rank's shard for a reduce-scatter.
        message: this rank's contribution, cut into shards for a reduce-scatter.
        transport: the group.
        buffers: where received messages and a narrower gradient's fp32 sum live.
        watch: receives the decode time.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's message is not what was announced.
    """
    n = transport.world_size
    scatter = bucket.form is Form.REDUCE_SCATTER
    own_bytes = message.shard_bytes() if scatter else [message.nbytes]
    sizes = yield from exchange_sizes(
        own_bytes, bucket, "agsparse", message.value_dtype, message.epoch, transport
    )
    if scatter:
        received_bytes = [row[transport.rank] for row in sizes]
        segment_offsets = message.layout.shard_offsets(transport.rank)
        sent_bytes = max(sum(row) - row[rank] for rank, row in enumerate(sizes))
    else:
        received_bytes = [row[0] for row in sizes]
        segment_offsets = message.layout.segment_offsets
        sent_bytes = max(received_bytes) * (n - 1)
    check_sizes(received_bytes, message, bucket)

    if scatter:
        starts = [sum(received_bytes[:rank]) for rank in range(n)]
        received = buffers.take(f"received:{bucket.name}", sum(received_bytes), transport.device)
        sent = message.buffer[: message.nbytes]
        work = transport.all_to_all(received, sent, received_bytes, own_bytes)
    else:
        longest = max(received_bytes)
        starts = [rank * longest for rank in range(n)]
        received = buffers.take(f"received:{bucket.name}", longest * n, transport.device)
        work = transport.all_gather(received, message.buffer[:longest])
    yield POSTED
    yield work

    with watch.stage("decode"):
        target = bucket.grad_N[bucket.shard(transport.rank)] if scatter else bucket.grad_N
        if target.dtype == torch.float32:
            sum_M = target
        else:
            sum_M = buffers.take("sum", target.numel(), target.device, torch.float32)
        for rank, (start, size) in enumerate(zip(starts, received_bytes, strict=True)):
            records = received[start : start + size]
            decode_add_(
                sum_M, records, segment_offsets, message.value_dtype, message.epoch, rank=rank,
                fresh=rank == 0,
            )  # fmt: skip
        if sum_M is not target:
            target.copy_(sum_M)
    return sent_bytes


def check_sizes(received_bytes: list[int], message: Message, bucket: Bucket) -> None:
    """Refuses sizes that no valid message has, before memory is taken for them.

    Raises:
        WireFormatError: names the rank whose announced size is out of bounds.
    """
    for rank, size in enumerate(received_bytes):
        if not 0 <= size <= message.buffer.numel():
            raise WireFormatError(
                f"bucket {bucket.name}: rank {rank} announces a message of impossible size",
                expected=f"0 to {message.buffer.numel()} bytes",
                got=size,
            )
