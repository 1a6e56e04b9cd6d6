"""Direct: shards of the encoded messages are exchanged pairwise, added up, and all-gathered.

ZEN's point-to-point with parallelism (its section on the schemes' design space), on the records as
selection has encoded them. No sum fills in on the way. The scheme encodes one shard more than
AGsparse does; a ring encodes one in each step.

Agreement: one all-gather of the collective's identity and of every rank's n shard sizes, 8 (2 + n)
bytes a rank.
Phase 1, n - 1 rounds (`split`): rank r sends shard i of its message to rank i, one peer at a time.
Rank i adds the n records in rank order: the sum of a shard is made in one place, in fp32.
All-reduce only: the sum is encoded once, in few bits with `scheme.sum_bits`, the sizes are
all-gathered (as many bytes), and in phase 2, n - 1 rounds, each rank sends its sum to every other.

On a CPU each shard of a long message (`Message.by_shard`) is encoded during the round of the one
before. The agreement has no sizes then: each size is a message of 8 bytes to the shard's owner,
sent while the round before is still under way.

In capacity mode (`message.slots`) all sizes are known. There is no agreement (the identity is in
the tag of the messages and in the records' headers), and |sum_r| is the largest size of the sum.

Rank r sends |message_r| - |shard_r of it| and (n - 1) |sum_r| bytes.
"""

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch

from megatron_sparse.collectives.base import (
    POSTED,
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
from megatron_sparse.collectives.checksummed import checksummed_size, verified_size
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
from megatron_sparse.pricing.records import PerRank, RecordFormat

NAME = "direct"


@reads_reports
def direct(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards also for an all-reduce.
    """
    sums, communicator = SparseSum(exchange, message), exchange.transport.communicator
    if message.slots is not None and communicator is not None:  # `scheme.nccl_engine`
        return (yield from sum_in_one_call(NAME, sums, communicator, by_owners=True))
    return (yield from reduce_shards(NAME, sums))


def reduce_shards(
    scheme: str, sums: SparseSum, *, doubling: bool = False, dense: bool = False
) -> Steps:
    """Runs both phases of `direct`, with options for the schemes that differ in phase 2.

    Args:
        scheme: the name that ranks agree on.
        sums: receives the sum; holds the exchange and this rank's message. Mutated.
        doubling: gather the sums by recursive doubling instead of pairwise.
        dense: gather the sums as dense records.
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
    write_sum = sums.sum_writer(cuts, dense=dense)
    if doubling:
        yield from doubling_all_gather(buffer, sizes, group, write_sum)
    else:
        own_bytes = sizes[group.rank]
        # The buffer may be longer than all records.
        own, room = buffer[:own_bytes], buffer[own_bytes : sum(sizes)]
        yield from pairwise_all_gather(own, room, sizes, group, write_sum)
    return group.sent_bytes


def split(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, group: Subgroup, *, last: bool
) -> Phase:
    """Runs the agreement and phase 1: leaves the sum of this rank's shard in `sums`.

    Args:
        identity: of the collective.
        cuts: the shard of each rank.
        sums: receives the sum; its message is cut at the borders of `cuts`. Mutated.
        group: the ranks of the transport of `sums.exchange`.
        last: this rank will post nothing more.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's records are not what was announced.
    """
    if sums.message.by_shard:
        yield from _encode_and_split(identity, cuts, sums, group, last=last)
        return
    n, rank, message = group.world_size, group.rank, sums.message
    names = names_of(sums.exchange.transport)  # the ranks' numbers in the whole group, for errors
    sent = message_parts(message, cuts)
    own_sizes = [records.numel() for records in sent]
    sizes = [own_sizes[rank]] * n  # in capacity mode: the same on every rank
    if message.slots is None:  # not in capacity mode
        small = last and sum(own_sizes) <= SMALL_BYTES  # then the next bucket may post meanwhile
        transport = sums.exchange.transport
        table = yield from exchange_sizes(own_sizes, identity, transport, unordered=small)
        sizes = [row[rank] for row in table]
        check_announced(sizes, [cuts[rank]] * n, message.value_dtype, names)
    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[rank] = sent[rank]  # this rank's own shard is not sent
    yield from pairwise_all_to_all(sent, received, group, last=last)
    sums.add_messages(received, cuts[rank], names)


def _encode_and_split(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, group: Subgroup, *, last: bool
) -> Phase:
    """`split` that encodes each shard while the one before is sent, its size first (8 bytes)."""
    n, rank, exchange = group.world_size, group.rank, sums.exchange
    names, received, rounds = names_of(exchange.transport), {}, []

    def encoded(owner: int) -> torch.Tensor:
        with exchange.timer.stage("prune"):
            return sums.message.records(cuts[owner].segments)

    for step in range(1, n):
        target, source = (rank - step) % n, (rank + step) % n
        shard = encoded(target)
        own_size = torch.tensor([checksummed_size(shard.numel())])
        size = torch.empty_like(own_size)
        announced = group.post([(target, own_size)], [(source, size)])
        if rounds:
            yield rounds[-1]
        else:
            yield from exchange_sizes([], identity, exchange.transport)
        yield announced
        nbytes = verified_size(int(size), names[source])
        check_announced([nbytes], [cuts[rank]], sums.message.value_dtype, [names[source]])
        received[source] = sums.take(f"received:{step}", nbytes)
        rounds.append(group.post([(target, shard)], [(source, received[source])]))
    if last:
        yield POSTED
    received[rank] = encoded(rank)  # this rank's own shard is not sent
    yield rounds[-1]
    sums.add_messages([received[owner] for owner in range(n)], cuts[rank], names)


def encode_own_shard(
    identity: Identity, cuts: Sequence[Cut], sums: SparseSum, *, dense: bool = False
) -> Generator[Yielded, None, tuple[torch.Tensor, list[int]]]:
    """Encodes the sum of this rank's shard, and finds out the size of every rank's encoded sum.

    Sizes are fixed for `dense` records and in capacity mode; else ranks all-gather them.

    Returns:
        (buffer, sizes): uint8, this rank's records followed by room for the other ranks' records;
        bytes of each rank's records.
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
        # No shard has None, since this one has not; type checkers need the test.
        sizes = [int(offsets[-1]) for offsets in offsets_by_cut if offsets is not None]
        buffer = sums.take("gathered", sum(sizes))
        sums.encode(own_cut, sums.gather_dtype, buffer, slots_S=slots_S)
        return buffer, sizes
    buffer = sums.take("gathered", sum(cut.capacity(sums.gather_dtype) for cut in cuts))
    own = sums.encode(own_cut, sums.gather_dtype, buffer)
    # A rank with a small sum lets the next bucket post meanwhile. Ranks need not decide alike.
    small = own.numel() * (transport.world_size - 1) <= SMALL_BYTES
    table = yield from exchange_sizes([own.numel()], identity, transport, unordered=small)
    sizes = [row[0] for row in table]
    check_announced(sizes, cuts, sums.gather_dtype, names_of(transport))
    return buffer, sizes


def cost(run: DryRun) -> None:
    """Predicts the time of `direct`: shards go to their owners, the owners' sums to every rank.

    ZEN's appendix B.1, the parameter server with contiguous shards: the time of ZEN's equation 1
    (`zen.cost`) times the skewness of the densest shard (definition 5). Here each shard has its own
    density instead. Added: bytes of the real records; n - 1 rounds of alpha in each phase;
    encoding, and adding one message after the other.
    """
    split_cost(run, run.messages(SCHEME.message_format(run.options)))
    if not run.scatter:
        sum_density_n = run.densities.shards(run.n, run.n)
        spread_sums_cost(run, run.gathered_sums(), sum_density_n, run.sum_density(run.n))


def split_cost(run: DryRun, form: RecordFormat) -> None:
    """Predicts the time of `split`: agreement, n - 1 rounds of one shard each, and n additions.

    `form` is the format of the messages. Encoding counts in full, also where rounds hide it.
    """
    if not run.has_slots:  # in capacity mode there is no agreement
        run.agree()
    # The bytes sent include the unused room of slots; the additions count only elements.
    send_shards_cost(run, form.nbytes(run.piece(run.n), run.message_density(run.n), run.b))
    add_shards_cost(run, form, run.densities.shards(1, run.n))


def send_shards_cost(run: DryRun, sizes: PerRank) -> None:
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
    sum_density_n: np.ndarray,
    sent_density_n: np.ndarray,
    gather_cost: Callable[[DryRun, PerRank, PerRank], None] | None = None,
) -> None:
    """Each owner encodes its sum, ranks all-gather the sizes unless they are fixed, then the sums.

    `sum_density_n`: density of each owner's sum, of format `form`. `sent_density_n`: the same; in
    capacity mode the density of full slots. `gather_cost`: prices the all-gather from `run`,
    each sum's bytes and each sum's seconds of decoding; None for `gather_sums_cost`.
    """
    shard = run.piece(run.n)
    run.work(form.seconds(CodecOp.ENCODE, shard, sum_density_n, run.b))
    if not run.has_slots:
        run.agree()
    decoding_n = form.seconds(CodecOp.DECODE, shard, sum_density_n, run.b)
    gather_cost = gather_cost or gather_sums_cost
    gather_cost(run, form.nbytes(shard, sent_density_n, run.b), decoding_n)


def gather_sums_cost(run: DryRun, sizes: float | np.ndarray, decoding: float | np.ndarray) -> None:
    """Every owner sends its sum to all, pairwise; a rank decodes a sum while it receives the next.

    `sizes`: bytes of each owner's sum; `decoding`: seconds to decode it. One number holds for all.
    """
    ranks = np.arange(run.n)
    sizes_n, decoding_n = (np.broadcast_to(values, run.n) for values in (sizes, decoding))
    rounds = []  # step, bytes by sender, local work meanwhile
    for step in range(1, run.n):
        # The sum that arrived in the round before, from rank r + step - 1; at first its own.
        decoded_n = (ranks + step - 1) % run.n
        rounds.append((step, sizes_n, decoding_n[decoded_n]))
    run.shifts(rounds)
    run.work(decoding_n[(ranks + run.n - 1) % run.n])  # the last sum that arrived


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=direct,
    place=80,
    cost=cost,
    needs_shards=True,
    sends_by_shard=True,
    takes_slots=True,
    has_engine=True,
)
