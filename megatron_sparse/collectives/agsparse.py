"""AGsparse: every rank sends its sparse message to every other, and each adds them all up.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
Only the ranks' own messages travel, never partial sums, which have more non-zero elements (fill-in)
than each message. But each rank sends its message n - 1 times, so the scheme suits few ranks.

All-reduce:
1. Agreement: one all-gather of a fingerprint of the collective (bucket, scheme, dtype, step) and of
   every rank's message size, 8 (2 + n) bytes a rank.
2. n - 1 rounds: every rank sends its message to every other, one peer at a time. It adds them in
   rank order, so that all ranks get the same bits, in two passes over its sum: those of the first
   half of the ranks when they have arrived, then the rest. On CUDA one pass adds them all.

Reduce-scatter: as `direct`. Each peer gets only the records of the shard that it owns.

In capacity mode (`scheme.capacity`) messages have slots of fixed size. Sizes need no agreement
then; the fingerprint is in the tag of the messages, and step and dtype in the records' headers.

Rank r sends (n - 1) |message_r| bytes, in a reduce-scatter |message_r| - |shard_r of it|.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_sparse.collectives.base import Exchange, Identity, Steps, exchange_sizes
from megatron_sparse.collectives.buffer_sizes import BufferSizes
from megatron_sparse.collectives.direct import split, split_cost
from megatron_sparse.collectives.gather import pairwise_all_gather
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    check_announced,
    group_of,
    reads_reports,
    shard_cuts,
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
        return (
            yield from sum_in_one_call(
                NAME, exchange, message, sums, transport.communicator, by_owners=exchange.scatters
            )
        )
    identity = Identity.of_message(NAME, exchange, message)
    group = group_of(identity, message, transport)
    n, rank = group.world_size, group.rank
    if exchange.scatters:
        # Agreement and exchange of `direct`: leave the sum of this rank's shard in `sums`.
        cuts = shard_cuts(message.layout, n)
        yield from split(identity, message, cuts, sums, group, transport, last=True)
        sums.write(cuts[rank].elements)
        return group.sent_bytes

    whole = whole_cut(message.layout)
    sizes = [message.nbytes] * n
    if message.slots is None:
        table = yield from exchange_sizes([message.nbytes], identity, transport)
        sizes = [row[0] for row in table]
        check_announced(sizes, [whole] * n, message.value_dtype)
    received: dict[int, torch.Tensor] = {}
    batches = sums.batches(n)

    def add_in_rank_order(sender: int, records: torch.Tensor) -> None:
        received[sender] = records
        while batches and all(each in received for each in batches[0]):
            ranks = batches.pop(0)
            parts = [received[each] for each in ranks]
            sums.add_messages(parts, whole, ranks, fresh=ranks.start == 0)

    room = sums.take("received", sum(sizes) - sizes[rank])
    own = message.buffer[: message.nbytes]
    yield from pairwise_all_gather(own, room, sizes, group, add_in_rank_order)
    sums.write(whole.elements)
    return group.sent_bytes


def buffers(sizes: BufferSizes) -> dict[str, int]:
    """All ranks' messages, but for this rank's own; for a reduce-scatter their parts of its shard.

    `scheme.nccl_engine` has room for its own, too.
    """
    if sizes.scatters:
        received = sizes.ranks * sizes.message_bytes(sizes.shards[sizes.rank])
    else:
        others = sizes.ranks - (not sizes.options.nccl_engine)
        received = others * sizes.message_bytes(sizes.whole)
    return sizes.of_sparse_sum({"received": received})


def cost(run: DryRun) -> None:
    """The predicted time: runs the same rounds on the modelled clocks of `run`.

    With messages of m bytes: (n - 1) (alpha + m beta) (SparCML, section 5). Added: the agreement;
    and additions in rank order, in two batches, so that most ranks add late. Each message is priced
    as an addition of its own, which is too much for those that find the sum in a cache. A
    reduce-scatter is `split_cost`.
    """
    record_format = run.messages(SCHEME.message_format(run.options))
    if run.scatter:
        split_cost(run, record_format)
        return
    if not run.has_slots:
        run.agree()
    n, whole = run.n, run.piece()
    nbytes = float(record_format.nbytes(whole, run.message_density()[0], run.b))
    density = float(run.densities.whole(1))
    first_s = record_format.seconds(CodecOp.DECODE, whole, density, run.b)
    addition_s = record_format.seconds(CodecOp.DECODE_ADD, whole, density, run.b)
    half = (n + 1) // 2
    # Local work of each rank [n] when it has received so many messages, while the next one arrives.
    work_s = np.zeros((n, n))
    work_s[_half_complete(n, half), np.arange(n)] = first_s + (half - 1) * addition_s
    work_s[-1] += (n - half) * addition_s
    run.shifts([(received + 1, nbytes, work_s[received]) for received in range(n - 1)])
    run.work(work_s[-1])


def _half_complete(n: int, half: int) -> np.ndarray:
    """How many messages each rank [n] has received when it has those of ranks 0 to `half` - 1.

    Rank r receives the messages of ranks r + 1, r + 2, ... (modulo n). So a rank that is one of
    them, but not rank 0, has the last of them with its last message. The messages of the other
    ranks are complete then at the earliest: they are added at the end.
    """
    ranks = np.arange(n)
    return np.where(ranks >= half, n - 1 - (ranks - half), np.where(ranks == 0, half - 1, n - 1))


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=agsparse,
    place=70,
    cost=cost,
    buffers=buffers,
    takes_slots=True,
    has_engine=True,
    runs_across_nodes=True,
)
