"""Sparse parameter server: one server, rank 0, adds everybody's messages.

The centralised corner of ZEN's design space, and the baseline that every other scheme beats: all
bytes cross the server's link. (With a server on every rank it is `direct`.) It has no cost
function: the planner never chooses it.

Agreement: one all-gather of the collective's identity and of every rank's message size, 8 (2 + n)
bytes a rank.
Push, 1 round: every rank sends its whole message to the server, which adds them in rank order.
Pull, 2 rounds (8 bytes with the size, then the records): the server encodes the sum and sends it to
every rank.

Rank r > 0 sends |message_r|; the server sends (n - 1) |sum|. All-reduce only.
"""

import torch

from megatron_sparse.collectives.base import (
    Exchange,
    Identity,
    Steps,
    exchange_sizes,
    whole_group,
)
from megatron_sparse.collectives.checksummed import checksummed_size
from megatron_sparse.collectives.records import (
    check_announced,
    exchange_records,
    whole_cut,
)
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message

NAME = "sparse_ps"
SERVER = 0


def sparse_ps(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`.
    """
    identity = Identity.of_message(NAME, exchange, message)
    group = whole_group(exchange.transport, identity.tag)
    n, rank = group.world_size, group.rank
    whole = whole_cut(message.layout)
    table = yield from exchange_sizes([message.nbytes], identity, exchange.transport)
    sizes = [row[0] for row in table]
    check_announced(sizes, [whole] * n, message.value_dtype)
    sums = SparseSum(exchange, message)
    own = message.records()

    if rank != SERVER:
        yield from group.exchange([(SERVER, own)], [])
        room = sums.take("received", whole.capacity(sums.final_dtype))
        records = yield from exchange_records(group, None, (SERVER, room), last=True)
        sums.add_sum(records, whole, sums.final_dtype, SERVER, fresh=True)
        sums.unify_bits(whole)  # the server's bits, also of NaN
        sums.write(whole.elements)
        return group.sent_bytes

    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[SERVER] = own
    yield from group.exchange([], [(peer, received[peer]) for peer in range(1, n)])
    sums.add_messages(received, whole, range(n))
    sums.unify_bits(whole)  # the server's own copy gets the bits that the other ranks will decode
    out = sums.take("encoded", whole.capacity(sums.final_dtype))
    encoded = sums.encode(whole, sums.final_dtype, out)
    # As in the peers' `exchange_records`, but to all peers at once: the size, then the records.
    size = torch.tensor([checksummed_size(encoded.numel())], device=encoded.device)
    yield from group.exchange([(peer, size) for peer in range(1, n)], [])
    yield from group.exchange([(peer, encoded) for peer in range(1, n)], [], last=True)
    sums.write(whole.elements)
    return group.sent_bytes


SCHEME = Scheme(NAME, Input.SPARSE, run=sparse_ps, place=130, ops=ALL_REDUCE_ONLY)
