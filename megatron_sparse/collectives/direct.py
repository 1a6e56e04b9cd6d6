"""Direct: the once-encoded bucket's shards are exchanged pairwise, added, and all-gathered.

ZEN's point-to-point with parallelism (its section on the schemes' design space), on the records as
selection has encoded them. No sum fills in on the way. The scheme encodes one shard more than
AGsparse does; a ring encodes one in each step.

Agreement: one all-gather of the collective's identity and of every rank's n shard sizes, 8 (2 + n)
bytes a rank.
Phase 1, n - 1 rounds (`split`): rank r sends shard i of its message to rank i, one peer at a time.
Rank i adds the n records in rank order: the sum of a shard is made in one place, in fp32.
All-reduce only: the sum is encoded once, in few bits with `scheme.sum_bits`, the sizes are
all-gathered (as many bytes), and in phase 2, n - 1 rounds, each rank sends its sum to every other.

In capacity mode all sizes are known. There is no agreement (the identity is in the tag of the
messages and in the records' headers), and |sum_r| is the largest size that the sum can have.

Rank r sends |message_r| - |shard_r of it| and (n - 1) |sum_r| bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch

from megatron_sparse.collectives.base import (
    SMALL_BYTES,
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    Yielded,
    exchange_sizes,
    names_of,
)
from megatron_sparse.collectives.gather import (
    doubling_all_gather,
    pairwise_all_gather,
    pairwise_all_to_all,
)
from megatron_sparse.collectives.nccl_sum import sum_in_one_call
from megatron_sparse.collectives.records import (
    Cut,
    check_announced,
    group_of,
    message_parts,
    reads_reports,
    shard_cuts,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.records import Density, RecordFormat

NAME = "direct"


@reads_reports
def direct(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards in both forms.
    """
    sums, communicator = SparseSum(exchange, message), exchange.transport.communicator
    if message.slots is not None and communicator is not None:
        return (yield from sum_in_one_call(NAME, sums, communicator, by_owners=True))
    return (yield from reduce_shards(NAME, sums))


def reduce_shards(
    scheme: str, sums: SparseSum, *, doubling: bool = False, dense: bool = False
) -> Steps:
    """All of `direct`, or a scheme that differs from it in the kind of sum or in phase 2.

    Args:
        scheme: the name that ranks agree on.
        sums: of the message. Mutated.
        doubling: the sums are gathered by recursive doubling instead of pairwise.
        dense: the sums travel dense.
    """
    exchange, message = sums.exchange, sums.message
    identity = Identity.of_message(scheme, exchange, message)
    group = group_of(identity, message, exchange.transport)
    cuts = shard_cuts(message.layout)
    yield from split(identity, cuts, sums, group, last=exchange.scatters)
    if exchange.scatters:
        sums.write(cuts[group.rank].elements)
        return group.sent_bytes
    buffer, sizes = yield from encode_own_shard(identity, cuts, sums, dense=dense)
    place = sums.placer(cuts, dense=dense)
    if doubling:
        yield from doubling_all_gather(buffer, sizes, group, place)
    else:
        own_bytes = sizes[group.rank]
        own, room = buffer[:own_bytes], buffer[own_bytes : sum(sizes)]
        yield from pairwise_all_gather(own, room, sizes, group, place)
    return group.sent_bytes


def split(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, group: Subgroup, *, last: bool
) -> Phase:
    """Leaves the sum of this rank's shard in `sums`: the agreement and phase 1.

    Args:
        identity: of the collective.
        cuts: the shard of each rank.
        sums: of a message that is cut at their borders. Mutated.
        group: the ranks of the transport of `sums.exchange`.
        last: this rank will post nothing more.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's records are not what was announced.
    """
    n, rank, message = group.world_size, group.rank, sums.message
    names = names_of(sums.exchange.transport)
    sent = message_parts(message, cuts)
    own_sizes = [records.numel() for records in sent]
    sizes = [own_sizes[rank]] * n  # of messages in slots: the same on every rank
    if message.slots is None:
        small = last and sum(own_sizes) <= SMALL_BYTES
        transport = sums.exchange.transport
        table = yield from exchange_sizes(own_sizes, identity, transport, unordered=small)
        sizes = [row[rank] for row in table]
        check_announced(sizes, [cuts[rank]] * n, message.value_dtype, names)
    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[rank] = sent[rank]
    yield from pairwise_all_to_all(sent, received, group, last=last)
    sums.add_messages(received, cuts[rank], names)


def encode_own_shard(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, *, dense: bool = False
) -> Generator[Yielded, None, tuple[torch.Tensor, list[int]]]:
    """Encodes the sum of this rank's shard; if sizes are not fixed, sends its size to every rank.

    `dense` records have fixed sizes, and so has every record in capacity mode.

    Returns:
        A buffer that begins with this rank's records and has room for those of all ranks; the size
        of each rank's records.
    """
    transport = sums.exchange.transport
    own_cut = cuts[transport.rank]
    if dense:
        sizes = [cut.capacity(sums.final_dtype) for cut in cuts]
        buffer = sums.take("gathered", sum(sizes))
        sums.encode(own_cut, sums.final_dtype, buffer, dense=True)
        return buffer, sizes
    slots_S = sums.slots_of_sum(own_cut)
    if slots_S is not None:  # capacity mode; the last offset is the end of the records
        offsets_by_cut = [sums.slots_of_sum(cut) for cut in cuts]
        # Where one shard has slots all have: the test is for type checkers.
        sizes = [int(offsets[-1]) for offsets in offsets_by_cut if offsets is not None]
        buffer = sums.take("gathered", sum(sizes))
        sums.encode(own_cut, sums.gather_dtype, buffer, slots_S=slots_S)
        return buffer, sizes
    buffer = sums.take("gathered", sum(cut.capacity(sums.gather_dtype) for cut in cuts))
    own = sums.encode(own_cut, sums.gather_dtype, buffer)
    # Short messages may mix with those of other buckets. Each rank decides about its own.
    small = own.numel() <= SMALL_BYTES
    table = yield from exchange_sizes([own.numel()], identity, transport, unordered=small)
    sizes = [row[0] for row in table]
    check_announced(sizes, cuts, sums.gather_dtype, names_of(transport))
    return buffer, sizes


def cost(run: DryRun) -> None:
    """Contiguous shards to their owners, the owners' sums to every rank.

    ZEN's appendix B.1, the parameter server with contiguous shards: s times the (n - 1) / n (d + D)
    2 M / B of ZEN's equation 1 (`zen.cost`), s being the skewness of the densest shard (definition
    5). Here each shard has its own density instead. Added: bytes of the real records; n - 1 rounds
    of alpha in each half; encoding, and adding one message after the other.
    """
    split_cost(run, run.messages(SCHEME.message_format(run.options)))
    if not run.scatter:
        sum_n = run.densities.shards(run.n, run.n)
        spread_sums_cost(run, run.gathered_sums(), sum_n, run.sum_density(run.n))


def split_cost(run: DryRun, form: RecordFormat) -> None:
    """Agreement, n - 1 rounds of one shard each, and n additions (`direct.split`)."""
    if not run.has_slots:
        run.agree()
    send_shards_cost(run, form.nbytes(run.piece(run.n), run.message_density(run.n), run.b))
    add_shards_cost(run, form, run.densities.shards(1, run.n))


def send_shards_cost(run: DryRun, sizes: Density) -> None:
    """Every rank sends every owner its shard, pairwise; `sizes` are by owner."""
    ranks, sizes_n = np.arange(run.n), np.broadcast_to(sizes, run.n)
    run.shifts([(step, sizes_n[(ranks - step) % run.n], 0.0) for step in range(1, run.n)])


def add_shards_cost(run: DryRun, form: RecordFormat, own_n: np.ndarray) -> None:
    """Every owner adds the n records of its shard; `own_n` are their densities by owner."""
    shard = run.piece(run.n)
    first_n = form.seconds(CodecOp.DECODE, shard, own_n, run.b)
    run.work(first_n + (run.n - 1) * form.seconds(CodecOp.DECODE_ADD, shard, own_n, run.b))


def spread_sums_cost(
    run: DryRun,
    form: RecordFormat,
    sum_n: np.ndarray,
    sent_n: np.ndarray,
    gather: Callable[[DryRun, Density, Density], None] | None = None,
) -> None:
    """Each owner encodes its sum, sizes are exchanged unless they are fixed, and all gather.

    Args:
        run: the collective's.
        form: of the sums.
        sum_n: their densities by owner.
        sent_n: those of what is sent: in capacity mode of the slots.
        gather: takes bytes and seconds of decoding by owner; None is `gather_sums_cost`.
    """
    shard = run.piece(run.n)
    run.work(form.seconds(CodecOp.ENCODE, shard, sum_n, run.b))
    if not run.has_slots:
        run.agree()
    decoding_n = form.seconds(CodecOp.DECODE, shard, sum_n, run.b)
    (gather or gather_sums_cost)(run, form.nbytes(shard, sent_n, run.b), decoding_n)


def gather_sums_cost(run: DryRun, sizes: float | np.ndarray, decoding: float | np.ndarray) -> None:
    """Every owner sends its sum to all, pairwise; a sum is decoded while the next one travels.

    Args:
        run: its clocks are advanced.
        sizes: bytes of each owner's sum, or one number for all.
        decoding: seconds to decode each owner's sum, or one number for all.
    """
    ranks = np.arange(run.n)
    sizes_n, decoding_n = (np.broadcast_to(values, run.n) for values in (sizes, decoding))
    # Step, bytes, and the decoding of what the round before brought; at first the rank's own sum.
    run.shifts(
        [(step, sizes_n, decoding_n[(ranks + step - 1) % run.n]) for step in range(1, run.n)]
    )
    run.work(decoding_n[(ranks + run.n - 1) % run.n])


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=direct,
    place=80,
    cost=cost,
    needs_shards=True,
    takes_slots=True,
    has_engine=True,
)
