"""AGsparse: every rank sends its sparse message to every other, and each adds them all up.

The all-gather of SparCML (Renggli et al. 2019, section 5.3) and of PyTorch's sparse all-reduce.
No message fills in on the way. Each rank sends (n - 1) messages, so the scheme suits few ranks.

Agreement: one all-gather of the collective's identity and of every rank's message size, 8 (2 + n)
bytes a rank.
Phase 1, n - 1 rounds: every rank sends its message to every other, one peer at a time. Meanwhile
the rank clears the sum and adds the messages that have arrived, in rank order, so that all ranks
hold the same bits.
The reduce-scatter form is `direct`'s: each peer gets only the records of its own shard.

In capacity mode sizes are known and there is no agreement: the identity is in the tag of the
messages and in the records' headers.

Rank r sends (n - 1) |message_r| bytes, in a reduce-scatter |message_r| - |shard_r of it|.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_sparse.collectives.base import Exchange, Identity, Steps, exchange_sizes
from megatron_sparse.collectives.direct import split, split_cost
from megatron_sparse.collectives.gather import pairwise_all_gather
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    SparseSum,
    check_announced,
    group_of,
    reads_reports,
    shard_cuts,
    whole_cut,
)
from megatron_sparse.collectives.scheme import Input, Scheme
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
        return (
            yield from sum_in_one_call(
                NAME, exchange, message, sums, transport.communicator, by_owners=exchange.scatters
            )
        )
    identity = Identity.of_message(NAME, exchange, message)
    group = group_of(identity, message, transport)
    n, rank = group.world_size, group.rank
    if exchange.scatters:
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
    held: dict[int, torch.Tensor] = {}
    added = 0

    def arrived(sender: int, records: torch.Tensor) -> None:
        nonlocal added
        if not held:
            sums.clear()
        held[sender] = records
        while added in held:
            sums.add_message(held[added], whole, added)
            added += 1

    room = sums.take("received", sum(sizes) - sizes[rank])
    own = message.buffer[: message.nbytes]
    yield from pairwise_all_gather(own, room, sizes, group, arrived)
    sums.write(whole.elements)
    return group.sent_bytes


def cost(run: DryRun) -> None:
    """Every message to every rank, pairwise.

    With messages of m bytes: (n - 1) (alpha + m beta) (SparCML, section 5). Added: the sizes that
    are sent first; and additions in rank order, so that every rank but 0 starts to add late. A
    reduce-scatter is `split_cost`.
    """
    form = run.format(SCHEME.message_format(run.options))
    if run.scatter:
        split_cost(run, form)
        return
    if not run.has_slots:
        run.agree()
    n, whole = run.n, run.piece()
    nbytes = float(form.nbytes(whole, run.message_density()[0], run.b))
    density = float(run.densities.whole(1))
    addition_s = form.seconds(CodecOp.DECODE_ADD, whole, density, run.b)
    clearing_s = run.clearing_s(whole.numel)
    work = [addition_s * _additions(n, number) for number in range(n)]
    work[0] = work[0] + clearing_s
    run.shifts([(number + 1, nbytes, work[number]) for number in range(n - 1)])
    run.work(work[-1])


def _additions(n: int, number: int) -> np.ndarray:
    """Messages that each rank adds when it holds its own and those of `number` ranks after it.

    Messages are added in rank order. Rank r > 0 therefore waits for the message of rank 0, which
    arrives as number n - r.
    """
    ranks = np.arange(n)
    own = np.where(number >= n - ranks, 1, 0)
    if number == n - 1:
        own = n - ranks + 1
    own[0] = 1
    return own


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=agsparse,
    place=70,
    cost=cost,
    takes_slots=True,
    has_engine=True,
    runs_across_nodes=True,
)
