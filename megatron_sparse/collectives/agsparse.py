"""AGsparse: every rank sends its sparse message to every other rank, and adds up all n messages.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
Only the ranks' own messages travel, never partial sums, which have more non-zero elements (fill-in)
than each message. But each rank sends its message n - 1 times, so the scheme suits few ranks.

All-reduce:
1. Agreement: one all-gather of a fingerprint of the collective (bucket, scheme, dtype, step) and of
   every rank's message size, 8 (2 + n) bytes a rank.
2. n - 1 rounds: every rank sends its message to every other, one peer at a time. It adds them in
   rank order, so that all ranks get the same bits, in one pass over its sum.

Reduce-scatter: as `direct`. Each peer gets only the records of the shard that it owns.

In capacity mode (`scheme.capacity`) messages have slots of fixed size. Sizes need no agreement
then; the fingerprint is in the tag of the messages, and step and dtype in the records' headers.

Rank r sends (n - 1) |message_r| bytes, in a reduce-scatter |message_r| - |shard_r of it|.
"""

from __future__ import annotations

from megatron_sparse.collectives.base import (
    SMALL_BYTES,
    Exchange,
    Identity,
    Steps,
    exchange_sizes,
)
from megatron_sparse.collectives.direct import reduce_shards, split_cost
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    check_announced,
    group_of,
    reads_reports,
    whole_cut,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun

NAME = "agsparse"


@reads_reports
def agsparse(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Sums are fp32 and rounded once, to nearest even, where the gradient is narrower.

    Args:
        exchange: the bucket, and the means to synchronise it.
        message: this rank's contribution, cut into shards for a reduce-scatter.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's message is not what was announced.
    """
    transport, sums = exchange.transport, SparseSum(exchange, message)
    if message.slots is not None and transport.communicator is not None:
        # `scheme.nccl_engine`: the same rounds and the same bits, in one call of C++.
        engine, by_owners = transport.communicator, exchange.scatters
        return (yield from sum_in_one_call(NAME, sums, engine, by_owners=by_owners))
    if exchange.scatters:
        return (yield from reduce_shards(NAME, sums))
    identity = Identity.of_message(NAME, exchange, message)
    group = group_of(identity, message, transport)
    n, rank, whole = group.world_size, group.rank, whole_cut(message.layout)
    sizes = [message.nbytes] * n  # in capacity mode: the same on every rank
    if message.slots is None:  # not in capacity mode
        small = message.nbytes <= SMALL_BYTES  # then the next bucket may post meanwhile
        table = yield from exchange_sizes([message.nbytes], identity, transport, unordered=small)
        sizes = [row[0] for row in table]
        check_announced(sizes, [whole] * n, message.value_dtype)
    own = message.buffer[: message.nbytes]
    sizes[rank] = 0  # this rank's own message is added from its own buffer
    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[rank] = own
    yield from pairwise_all_to_all([own] * n, received, group, last=True)
    sums.add_messages(received, whole, range(n))
    sums.write(whole.elements)
    return group.sent_bytes


def cost(run: DryRun) -> None:
    """Predicts the time of `agsparse`: runs its rounds on the modelled clocks of `run`.

    With n ranks and messages of m bytes: (n - 1) (alpha + m beta) (SparCML, section 5). Added: the
    agreement and the additions. Each message is priced as an addition of its own; one that finds
    the sum in a cache takes less. A reduce-scatter is `split_cost`.
    """
    record_format = run.messages(SCHEME.message_format(run.options))
    if run.scatter:
        split_cost(run, record_format)
        return
    if not run.has_slots:
        run.agree()
    whole, density = run.piece(), float(run.densities.whole(1))  # the density of one message
    (sent_density,) = run.message_density()  # the same, or in capacity mode that of full slots
    nbytes = float(record_format.nbytes(whole, sent_density, run.b))
    run.shifts([(step, nbytes, 0.0) for step in range(1, run.n)])  # step, bytes, local work
    # The first of the n messages is written, the others are added to it.
    first_s = record_format.seconds(CodecOp.DECODE, whole, density, run.b)
    addition_s = record_format.seconds(CodecOp.DECODE_ADD, whole, density, run.b)
    run.work(float(first_s + (run.n - 1) * addition_s))


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=agsparse,
    place=70,
    cost=cost,
    takes_slots=True,
    has_engine=True,
)
