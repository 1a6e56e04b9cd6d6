"""Your own scheme in one file: `sparse_star` sends all through one rank (docs/adding-a-scheme.md).

Agreement: one all-gather of the collective's identity and of every rank's message size, 8 (2 + n)
bytes a rank.
Phase 1, n - 1 rounds: every rank sends its message to rank 0, which adds them up in rank order.
Phase 2, 1 round: rank 0 sends the sum to all others, dense.

Rank 0 sends (n - 1) N b bytes, N elements of b bytes each: fine for two ranks, a bottleneck for
more. All-reduce only.
"""

from __future__ import annotations

from megatron_sparse.collectives.base import Exchange, Identity, Steps, exchange_sizes, whole_group
from megatron_sparse.collectives.records import check_announced, whole_cut
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message

NAME = "sparse_star"
MIDDLE = 0


def sparse_star(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Sums are fp32 and rounded once, to nearest even, where the gradient is narrower.

    Args:
        exchange: the bucket, and the means to synchronise it.
        message: this rank's contribution.

    Returns:
        Bytes that this rank has sent.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's message is not what was announced.
    """
    transport, grad_N = exchange.transport, exchange.bucket.grad_N
    identity = Identity.of_message(NAME, exchange, message)
    group = whole_group(transport, identity.tag)
    whole = whole_cut(message.layout)
    table = yield from exchange_sizes([message.nbytes], identity, transport)
    sizes = [row[0] for row in table]
    check_announced(sizes, [whole] * group.world_size, message.value_dtype)
    own = message.records()
    others = [rank for rank in range(group.world_size) if rank != MIDDLE]

    if group.rank != MIDDLE:
        yield from group.exchange([(MIDDLE, own)], [])
        yield from group.exchange([], [(MIDDLE, grad_N)], last=True)
        return group.sent_bytes

    sums = SparseSum(exchange, message)
    room = sums.take("received", sum(sizes) - sizes[MIDDLE])
    messages = [own, *room.split([sizes[rank] for rank in others])]
    # While one message is on its way, the previous one is added. Rank 0's own comes first, and
    # replaces what the sum held before.
    yield from group.in_rounds(
        [([], [(rank, messages[rank])]) for rank in others],
        lambda rank: sums.add_message(messages[rank], whole, rank, fresh=rank == MIDDLE),
    )
    sums.write(whole.elements)
    yield from group.exchange([(rank, grad_N) for rank in others], [], last=True)
    return group.sent_bytes


SCHEME = Scheme(NAME, Input.SPARSE, run=sparse_star, place=1000, ops=ALL_REDUCE_ONLY)
