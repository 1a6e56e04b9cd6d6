"""Schemes in which shards are sent to the rank that adds them up: `direct`, OmniReduce, ZEN, PS.

ZEN's equation 1, with d the density of a message and D that of the sum of n ranks: Balanced
Parallelism takes (n - 1) / n (d + D) 2 M / B for COO. Its appendix B.1 has the parameter server
with contiguous shards at s times that, s being the skewness of the densest one (definition 5):
`direct` and OmniReduce are that, each shard with its own density, and `zen` has s = 1. `sparse_ps`
has one server: (n - 1)(d + D) 2 M / B.

Added: bytes of the real records (Pici, bitmaps, blocks, dense where smaller); n - 1 rounds of alpha
in each half; encoding and adding up, each server one message after the other; ZEN's cut by hash,
and the pass over the bucket that its Pull's sum begins with.
"""

from __future__ import annotations

import numpy as np

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import WORD_BYTES, DryRun
from megatron_sparse.planner.cost_models.records import (
    BlockFormat,
    Density,
    RecordFormat,
    pull_bytes,
    push_bytes,
)

Format = RecordFormat | BlockFormat


def direct(run: DryRun) -> None:
    """Contiguous shards to their owners, their sums to everybody."""
    form = run.format(SCHEMES["direct"].message_format(run.options))
    split(run, form)
    if not run.scatter:
        form = run.format()
        sum_n = run.densities.shards(run.n, run.n)
        encode_own_shard(run, form, sum_n)
        nbytes_n = form.nbytes(run.piece(run.n), run.sum_density(run.n), run.b)
        gather_sums(run, nbytes_n, form.seconds(CodecOp.DECODE, run.piece(run.n), sum_n, run.b))


def split(run: DryRun, form: Format) -> None:
    """Agreement, n - 1 rounds of one shard each, and n additions (`direct.split`)."""
    if not run.has_slots:
        run.agree()
    shard, n = run.piece(run.n), run.n
    sizes_n = form.nbytes(shard, run.message_density(n), run.b)
    send_shards(run, sizes_n)
    own_n = run.densities.shards(1, n)
    first_n = form.seconds(CodecOp.DECODE, shard, own_n, run.b)
    run.work(first_n + (n - 1) * form.seconds(CodecOp.DECODE_ADD, shard, own_n, run.b))


def send_shards(run: DryRun, sizes: Density) -> None:
    """Every rank sends each other its shard, pairwise; sizes are by owner."""
    ranks, sizes_n = np.arange(run.n), np.broadcast_to(sizes, run.n)
    run.shifts([(step, sizes_n[(ranks - step) % run.n], 0.0) for step in range(1, run.n)])


def encode_own_shard(run: DryRun, form: Format, sum_n: np.ndarray) -> None:
    """Each owner encodes its sum; sizes are told unless they are fixed."""
    run.work(form.seconds(CodecOp.ENCODE, run.piece(run.n), sum_n, run.b))
    if not run.has_slots:
        run.agree()


def gather_sums(run: DryRun, sizes: Density, decoding: Density) -> None:
    """Every owner sends its sum to all, pairwise; each is decoded while the next is on its way."""
    ranks = np.arange(run.n)
    sizes_n, decoding_n = (np.broadcast_to(values, run.n) for values in (sizes, decoding))
    run.shifts(
        [(step, sizes_n, decoding_n[(ranks + step - 1) % run.n]) for step in range(1, run.n)]
    )
    run.work(decoding_n[(ranks + run.n - 1) % run.n])


def omnireduce(run: DryRun) -> None:
    """`direct` with blocks."""
    form, shard, n = run.format("blocks"), run.piece(run.n), run.n
    size = run.options.block_size
    own_n = run.densities.block_density(1, n, size)
    run.agree()
    send_shards(run, form.nbytes(shard, own_n, run.b))
    first_n = form.seconds(CodecOp.DECODE, shard, own_n, run.b)
    run.work(first_n + (n - 1) * form.seconds(CodecOp.DECODE_ADD, shard, own_n, run.b))
    if not run.scatter:
        sum_n = run.densities.block_density(n, n, size)
        encode_own_shard(run, form, sum_n)
        decoding_n = form.seconds(CodecOp.DECODE, shard, sum_n, run.b)
        gather_sums(run, form.nbytes(shard, sum_n, run.b), decoding_n)


def sparse_ps(run: DryRun) -> None:
    """Everything to rank 0 and back."""
    n, whole = run.n, run.piece()
    own, form = run.format(SCHEMES["sparse_ps"].message_format(run.options)), run.format()
    is_server_n = np.arange(n) == 0
    one = run.densities.whole(1)
    run.agree()
    run.clocks.with_root(np.full(n, float(own.nbytes(whole, one, run.b))), run.host_s)
    adding_s = own.seconds(CodecOp.DECODE, whole, one, run.b) + (n - 1) * own.seconds(
        CodecOp.DECODE_ADD, whole, one, run.b
    )
    parts = n if run.scatter else 1
    piece, sum_n = run.piece(parts), run.densities.shards(n, parts)
    encoding_s = np.sum(form.seconds(CodecOp.ENCODE, piece, sum_n, run.b))
    run.work(is_server_n * (adding_s + encoding_s))
    nbytes_n = np.broadcast_to(form.nbytes(piece, sum_n, run.b), (n,))
    run.clocks.with_root(np.full(n, WORD_BYTES), run.host_s)
    run.clocks.with_root(nbytes_n, run.host_s)
    run.work(~is_server_n * form.seconds(CodecOp.DECODE, piece, sum_n, run.b))


def zen(run: DryRun) -> None:
    """Shards by hash: all servers carry the same."""
    n, numel, cost = run.n, run.shape.numel, run.cluster.codec_s
    kept = run.shape.kept_numel / numel if numel else 0.0
    # What is always sent whole goes the same way, among the pairs.
    one, total = (kept + (1 - kept) * run.densities.whole(ranks) for ranks in (1, n))
    positions = numel / n
    run.work(cost(CodecOp.PARTITION, "pairs", numel, one, run.b))
    run.work(n * cost(CodecOp.ENCODE, "pairs", positions, one, run.b))
    run.agree()
    pushed = float(push_bytes(positions, one, run.b))
    send_shards(run, pushed)
    run.work(run.clearing_s(positions))
    run.work(n * cost(CodecOp.DECODE_ADD, "pairs", positions, one, run.b))
    run.work(cost(CodecOp.ENCODE, "hash_bitmap", positions, total, run.b))
    run.agree()
    run.work(run.clearing_s(numel))
    decoding_s = cost(CodecOp.DECODE_ADD, "hash_bitmap", positions, total, run.b)
    pulled = float(pull_bytes(positions, total, run.b))
    gather_sums(run, pulled, decoding_s)
