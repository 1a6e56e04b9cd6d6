"""AGsparse and SparCML's split and doubling all-reduces.

SparCML (Renggli et al. 2019, section 5) with messages of m bytes and a sum of M, n ranks:
`agsparse` (n - 1)(alpha + m beta); `ssar_rd` log2 n alpha + sum of the sizes of the sums of 1, 2,
4, ... n / 2 ranks times beta, which for COO is ZEN's equation 2; `ssar_split_ag`
((n - 1) + log2 n) alpha + (n - 1) / n (m + M) beta; `dsar_split_ag` the same with the dense size
for M.

Added: sizes that are sent first; folding where n is no power of two; the re-encoding of `ssar_rd`'s
sums in each step; who adds up when (`agsparse` adds in rank order, so all but rank 0 begin late).
"""

from __future__ import annotations

import numpy as np

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import WORD_BYTES, DryRun
from megatron_sparse.planner.cost_models.records import Density, each
from megatron_sparse.planner.cost_models.shards import encode_own_shard, split


def agsparse(run: DryRun) -> None:
    """Every message to every rank, pairwise."""
    form = run.format(SCHEMES["agsparse"].message_format(run.options))
    if run.scatter:
        split(run, form)
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

    They are added in rank order, so rank r > 0 waits for rank 0's, which comes as number n - r.
    """
    ranks = np.arange(n)
    own = np.where(number >= n - ranks, 1, 0)
    if number == n - 1:
        own = n - ranks + 1
    own[0] = 1
    return own


def ssar_rd(run: DryRun) -> None:
    """The whole sum, doubled in each round and encoded again."""
    n, whole = run.n, run.piece()
    active = 1 << (n.bit_length() - 1)
    ranks = np.arange(n)
    is_active_n, is_host_n = ranks < active, ranks < n - active
    own, sums = run.format(SCHEMES["ssar_rd"].message_format(run.options)), run.format()
    run.agree()

    def density_of(count_n: np.ndarray) -> np.ndarray:
        return np.asarray(each(lambda count: run.densities.whole(round(count)), count_n))

    def pass_records(target_n: np.ndarray, nbytes_n: Density) -> None:
        run.exchanges([(target_n, WORD_BYTES), (target_n, nbytes_n)])

    one = run.densities.whole(1)
    message_bytes = float(own.nbytes(whole, one, run.b))
    addition_s = own.seconds(CodecOp.DECODE_ADD, whole, one, run.b)
    run.work(is_active_n * own.seconds(CodecOp.DECODE, whole, one, run.b))
    if n > active:
        pass_records(np.where(is_active_n, -1, ranks - active), message_bytes)
        run.work(is_host_n * addition_s)
    count_n = np.where(is_host_n, 2, 1)
    is_sum_n = is_host_n
    distance = 1
    while distance < active:
        peer_n = np.where(is_active_n, ranks ^ distance, -1)
        density_n = density_of(count_n)
        encoding_n = sums.seconds(CodecOp.ENCODE, whole, density_n, run.p)
        run.work(is_active_n * is_sum_n * encoding_n)
        sum_bytes_n = sums.nbytes(whole, density_n, run.p)
        pass_records(peer_n, np.where(is_sum_n, sum_bytes_n, message_bytes))
        theirs_n = np.where(is_active_n, peer_n, 0)
        adding_n = sums.seconds(CodecOp.DECODE_ADD, whole, density_n[theirs_n], run.p)
        run.work(is_active_n * np.where(is_sum_n[theirs_n], adding_n, addition_s))
        count_n = count_n + count_n[theirs_n] * is_active_n
        is_sum_n = is_active_n
        distance *= 2
    if n > active:
        density = run.densities.whole(n)
        run.work(is_host_n * sums.seconds(CodecOp.ENCODE, whole, density, run.b))
        pass_records(
            np.where(is_host_n, ranks + active, -1), float(sums.nbytes(whole, density, run.b))
        )
        run.work(~is_active_n * sums.seconds(CodecOp.DECODE, whole, density, run.b))


def ssar_split_ag(run: DryRun) -> None:
    """Shards to their owners; their sums by recursive doubling."""
    split(run, run.format(SCHEMES["ssar_split_ag"].message_format(run.options)))
    form, shard = run.format(), run.piece(run.n)
    sum_n = run.densities.shards(run.n, run.n)
    encode_own_shard(run, form, sum_n)
    nbytes_n = form.nbytes(shard, run.sum_density(run.n), run.b)
    doubling_all_gather(run, nbytes_n, form.seconds(CodecOp.DECODE, shard, sum_n, run.b))


def dsar_split_ag(run: DryRun) -> None:
    """The same with dense sums, whose sizes are known."""
    split(run, run.format(SCHEMES["dsar_split_ag"].message_format(run.options)))
    form, shard = run.format("dense"), run.piece(run.n)
    run.work(form.seconds(CodecOp.ENCODE, shard, 1.0, run.b))
    decoding_s = form.seconds(CodecOp.DECODE, shard, 1.0, run.b)
    doubling_all_gather(run, form.nbytes(shard, 1.0, run.b), decoding_s)


def doubling_all_gather(run: DryRun, nbytes: Density, decoding: Density) -> None:
    """Bruck's order (`gather.doubling_all_gather`): pieces are decoded a round after they came."""
    n, ranks = run.n, np.arange(run.n)
    nbytes_n, decoding_n = (np.broadcast_to(values, n) for values in (nbytes, decoding))

    def of_next(values_n: np.ndarray, first: int, last: int) -> np.ndarray:
        """Of the ranks `first` to `last` after each one, together."""
        return sum((values_n[(ranks + place) % n] for place in range(first, last)), np.zeros(n))

    decoded, held = 0, 1
    rounds = []
    while held < n:
        more = min(held, n - held)
        rounds.append((held, of_next(nbytes_n, 0, more), of_next(decoding_n, decoded, held)))
        decoded, held = held, held + more
    run.shifts(rounds)
    run.work(of_next(decoding_n, decoded, n))
