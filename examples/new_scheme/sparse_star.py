"""A scheme of one's own in one file: `sparse_star`, all through one rank (docs/adding-a-scheme.md).

Agreement: one all-gather of what is meant and of every rank's message size, 8 (2 + n) bytes a
rank.
Phase 1, n - 1 rounds: every rank sends its message to rank 0, which adds them up in rank order.
Phase 2, 1 round: rank 0 sends the sum to all others, dense.

Rank 0 sends (n - 1) N b bytes, N elements of b bytes each: fine for two ranks, a bottleneck for
more. All-reduce only.
"""

from __future__ import annotations

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, Scheme
from megatron_sparse.collectives.base import Steps, exchange_sizes
from megatron_sparse.collectives.records import Cut, SparseSum, check_announced, group_of
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport

NAME = "sparse_star"
MIDDLE = 0


def sparse_star(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Sums are fp32 and rounded once, to nearest even, where the gradient is narrower.

    Args:
        bucket: receives the sum.
        message: this rank's contribution.
        transport: the group.
        buffers: where received messages and a narrower gradient's fp32 sum live.
        timer: receives the decode time.

    Returns:
        Bytes that this rank has sent.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's message is not what was announced.
    """
    group = group_of(NAME, bucket, message, transport)
    whole = Cut(message.layout)
    table = yield from exchange_sizes(
        [message.nbytes], bucket, NAME, message.value_dtype, message.epoch, transport
    )
    sizes = [row[0] for row in table]
    check_announced(sizes, [whole] * group.world_size, message.value_dtype)
    own = message.buffer[: message.nbytes]
    others = [rank for rank in range(group.world_size) if rank != MIDDLE]

    if group.rank != MIDDLE:
        yield from group.exchange([(MIDDLE, own)], [])
        yield from group.exchange([], [(MIDDLE, bucket.grad_N)], last=True)
        return group.sent_bytes

    sums = SparseSum(bucket, message, buffers, timer)
    room = sums.take("received", sum(sizes) - sizes[MIDDLE])
    messages = [own, *room.split([sizes[rank] for rank in others])]
    sums.clear()
    # While one message is on its way, the one before it is added: its own comes first.
    yield from group.in_rounds(
        [([], [(rank, messages[rank])]) for rank in others],
        lambda rank: sums.add_message(messages[rank], whole, rank),
    )
    sums.write(whole.elements)
    yield from group.exchange([(rank, bucket.grad_N) for rank in others], [], last=True)
    return group.sent_bytes


SCHEME = Scheme(NAME, Input.SPARSE, frozenset({CollectiveOp.ALL_REDUCE}), False, sparse_star)


def register() -> None:
    """Lets everything that looks schemes up by name find this one."""
    SCHEMES[NAME] = SCHEME
