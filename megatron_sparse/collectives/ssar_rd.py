"""SSAR recursive doubling (SparCML, Renggli et al. 2019): the whole sparse sum, doubled each round.

For small or very sparse buckets: few rounds, but every rank sends its growing sum in each of them.
Let m be the largest power of two that is at most n. Ranks below m are active; rank m + i folds into
rank i.

Agreement: one all-gather of the collective's identity, 8 (2 + n) bytes a rank.
Fold (if n > m): rank m + i sends its message to rank i, which adds it.
Doubling: for d = 1, 2, ..., m / 2, ranks at distance d exchange their sums and add. Addition
commutes, so both have the same bits. A message that has not changed is not encoded again.
Unfold (if n > m): rank i sends the sum to rank m + i.

Each of these log2 m (+ 2) steps is two rounds: 8 bytes with the size, then the records. Rank r < m
sends the records of the sum of its d (folded ones too) for each d; the fold sends |message|, the
unfold |sum|. Partial sums are encoded again in every step, sparse or dense, whichever is smaller.
All-reduce only.
"""

import numpy as np

from megatron_sparse.collectives.base import Exchange, Identity, Steps, exchange_sizes, whole_group
from megatron_sparse.collectives.records import exchange_records, whole_cut
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import WORD_BYTES, DryRun
from megatron_sparse.pricing.records import PerRank, each

NAME = "ssar_rd"


def ssar_rd(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`.
    """
    identity = Identity.of_message(NAME, exchange, message)
    group = whole_group(exchange.transport, identity.tag)
    n, rank = group.world_size, group.rank
    active = 1 << (n.bit_length() - 1)  # m
    whole = whole_cut(message.layout)
    yield from exchange_sizes([], identity, exchange.transport)
    sums = SparseSum(exchange, message)
    own = message.records()
    room = sums.take("received", whole.capacity("fp32", message.value_dtype))
    out = sums.take("encoded", whole.capacity("fp32"))

    if rank >= active:  # fold and unfold of a folded rank
        lead = rank - active  # the rank that it folds into
        yield from exchange_records(group, (lead, own), None)
        room = room[: whole.capacity(sums.final_dtype)]
        records = yield from exchange_records(group, None, (lead, room), last=True)
        sums.add_sum(records, whole, sums.final_dtype, lead, fresh=True)
        sums.unify_bits(whole)
        sums.write(slice(None))
        return group.sent_bytes

    sums.add_message(own, whole, rank, fresh=True)
    folded = rank + active if rank + active < n else None  # the rank that folds into this one
    if folded is not None:
        space = room[: whole.capacity(message.value_dtype)]
        records = yield from exchange_records(group, None, (folded, space))
        sums.add_message(records, whole, folded)
        # Rounds this rank's sum as its peer will receive it: both then add the same two numbers.
        sums.round_partial(whole)
    distance = 1
    while distance < active:
        peer = rank ^ distance
        # In the first exchange a rank with no folded rank sends its own message, not a sum.
        sends_sum = distance > 1 or folded is not None
        receives_sum = distance > 1 or peer + active < n
        sent = sums.encode(whole, sums.partial_dtype, out) if sends_sum else own
        dtype = sums.partial_dtype if receives_sum else message.value_dtype
        space = room[: whole.capacity(dtype)]
        is_last = folded is None and 2 * distance == active
        records = yield from exchange_records(group, (peer, sent), (peer, space), last=is_last)
        if receives_sum:
            sums.add_sum(records, whole, dtype, peer)
        else:
            sums.add_message(records, whole, peer)
        sums.round_partial(whole)
        distance *= 2
    sums.unify_bits(whole)
    if folded is not None:
        sent = sums.encode(whole, sums.final_dtype, out)
        yield from exchange_records(group, (folded, sent), None, last=True)
    sums.write(slice(None))
    return group.sent_bytes


def cost(run: DryRun) -> None:
    """Predicts the time of `ssar_rd`, whose sum covers twice as many ranks in each round.

    log2 n alpha + beta times the sum of the sizes of the sums of 1, 2, 4, ..., n / 2 ranks
    (SparCML, section 5; for COO this is ZEN's equation 2). Added: the size that is sent before each
    record; folding where n is no power of two; and the encoding of the sum in each step.
    """
    n, whole = run.n, run.piece()
    active = 1 << (n.bit_length() - 1)  # m; `run.p` are bytes of a value of a partial sum
    ranks = np.arange(n)
    is_active_n = ranks < active
    is_lead_n = ranks < n - active  # whether another rank folds into the rank
    own, sums = run.messages(SCHEME.message_format(run.options)), run.sum_format()
    run.agree()

    def density_of(count_n: np.ndarray) -> np.ndarray:
        return np.asarray(each(lambda count: run.densities.whole(round(count)), count_n))

    def pass_records(target_n: np.ndarray, nbytes_n: PerRank) -> None:
        """Runs the two rounds of a step: sizes, then records; a target of -1 sends nothing."""
        run.exchanges([(target_n, WORD_BYTES), (target_n, nbytes_n)])

    own_density = run.densities.whole(1)
    message_bytes = float(own.nbytes(whole, own_density, run.b))
    message_addition_s = own.seconds(CodecOp.DECODE_ADD, whole, own_density, run.b)
    run.work(is_active_n * own.seconds(CodecOp.DECODE, whole, own_density, run.b))
    if n > active:  # fold
        pass_records(np.where(is_active_n, -1, ranks - active), message_bytes)
        run.work(is_lead_n * message_addition_s)
    count_n = np.where(is_lead_n, 2, 1)  # messages in each rank's sum
    is_sum_n = is_lead_n  # whether the rank's sum has more than its own message
    distance = 1
    while distance < active:  # doubling
        peer_n = np.where(is_active_n, ranks ^ distance, -1)
        density_n = density_of(count_n)
        encoding_n = sums.seconds(CodecOp.ENCODE, whole, density_n, run.p)
        run.work(is_active_n * is_sum_n * encoding_n)
        sum_bytes_n = sums.nbytes(whole, density_n, run.p)
        pass_records(peer_n, np.where(is_sum_n, sum_bytes_n, message_bytes))
        sender_n = np.where(is_active_n, peer_n, 0)  # 0: any valid index, for folded ranks
        sum_addition_n = sums.seconds(CodecOp.DECODE_ADD, whole, density_n[sender_n], run.p)
        run.work(is_active_n * np.where(is_sum_n[sender_n], sum_addition_n, message_addition_s))
        count_n = count_n + count_n[sender_n] * is_active_n
        is_sum_n = is_active_n
        distance *= 2
    if n > active:  # unfold
        density = run.densities.whole(n)
        run.work(is_lead_n * sums.seconds(CodecOp.ENCODE, whole, density, run.b))
        target_n = np.where(is_lead_n, ranks + active, -1)
        pass_records(target_n, float(sums.nbytes(whole, density, run.b)))
        run.work(~is_active_n * sums.seconds(CodecOp.DECODE, whole, density, run.b))


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=ssar_rd,
    place=90,
    cost=cost,
    ops=ALL_REDUCE_ONLY,
)
