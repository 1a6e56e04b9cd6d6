"""The sparse ring and SpCCL's adaptive one.

SpCCL's equation 6 for the all-gather: (p - 1) alpha + (p - 1) / p n' beta + T_cd, with n' the bytes
of the records (equation 4 for Pici) and T_cd one encoding and p - 1 decodings (equation 5). The
reduce-scatter encodes and adds in each step, and in step s a shard is as dense as the sum of s
ranks: (p - 1) alpha + sum over s of (n'_s / p beta + T_comp + T_decomp), in the paper's words.

Added: 8 bytes with the size before each record; the shards' own densities (the crowded shard passes
every rank, so each step waits for it); and for `adaptive_ring` its rule, followed link by link with
equation 7 and what each record would calibrate it to (`link_density`).
"""

from __future__ import annotations

import numpy as np

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import WORD_BYTES, DryRun
from megatron_sparse.planner.cost_models.records import RecordFormat
from megatron_sparse.planner.cost_models.shards import Format


def sparse_ring(run: DryRun) -> None:
    """Encoded again in each step."""
    own = run.format(SCHEMES["sparse_ring"].message_format(run.options))
    ring_reduce_scatter(run, own, run.format(), thresholds=(np.inf, np.inf))
    if not run.scatter:
        ring_gather_sums(run, np.zeros(run.n, dtype=bool), run.format())


def adaptive_ring(run: DryRun) -> None:
    """Dense from a density on that depends on the link."""
    intra, inter, gather = run.options.ring_densities()
    own = run.format(SCHEMES["adaptive_ring"].message_format(run.options))
    form = run.format(run.options.format)
    density_n = ring_reduce_scatter(run, own, form, (intra, inter))
    if not run.scatter:
        ring_gather_sums(run, density_n >= gather, form)


def ring_reduce_scatter(
    run: DryRun, own: Format, form: Format, thresholds: tuple[float, float]
) -> np.ndarray:
    """In n - 1 steps of one shard; the thresholds are those of links within and between nodes.

    Returns:
        What each rank takes its own shard's density for at the end.
    """
    n, ranks, shard = run.n, np.arange(run.n), run.piece(run.n)
    nodes = np.array(run.clocks.topology.nodes)
    inside_n = nodes == nodes[(ranks + 1) % n]
    threshold_n = np.where(inside_n, *thresholds)
    initial, one_n = run.densities.whole(1), run.densities.shards(1, n)
    run.agree()
    run.work(np.sum(own.seconds(CodecOp.DECODE, shard, one_n, run.b)))
    link_n = np.zeros(n)
    plain_s = run.plain(CodecOp.ADD, shard.numel)
    for step in range(1, n):
        # What rank r sends: the sum of `step` ranks of shard r - step.
        sent_n = run.densities.shards(step, n)[(ranks - step) % n]
        link_n = 1 - (1 - link_n) * (1 - initial)
        is_sum = step > 1
        dense_n = (link_n >= threshold_n) & is_sum
        if is_sum:
            encoding_n = form.seconds(CodecOp.ENCODE, shard, sent_n, run.p)
            run.work(np.where(dense_n, 0.0, encoding_n))
            sparse_bytes_n = form.nbytes(shard, sent_n, run.p)
            adding_n = form.seconds(CodecOp.DECODE_ADD, shard, sent_n, run.p)
        else:
            sparse_bytes_n = own.nbytes(shard, sent_n, run.b)
            adding_n = own.seconds(CodecOp.DECODE_ADD, shard, sent_n, run.b)
        if not dense_n.all():
            run.shift(-1, np.where(dense_n, 0, WORD_BYTES))
        run.shift(-1, np.where(dense_n, shard.numel * run.p, sparse_bytes_n))
        run.work(np.where(dense_n, plain_s, adding_n)[ranks - 1])
        link_n = np.where(dense_n, link_n, sent_n)
    return 1 - (1 - link_n[ranks - 1]) * (1 - initial)


def ring_gather_sums(run: DryRun, dense_n: np.ndarray, form: Format) -> None:
    """Each sum is encoded once and goes round; those marked go as dense records."""
    n, ranks, shard = run.n, np.arange(run.n), run.piece(run.n)
    total_n, whole = run.densities.shards(n, n), RecordFormat("dense", run.cluster)
    ones_n = np.ones(n)

    def seconds(op: CodecOp) -> np.ndarray:
        return np.where(
            dense_n,
            whole.seconds(op, shard, ones_n, run.b),
            form.seconds(op, shard, total_n, run.b),
        )

    run.work(seconds(CodecOp.ENCODE))
    run.agree()
    nbytes_n = np.where(
        dense_n, whole.nbytes(shard, ones_n, run.b), form.nbytes(shard, total_n, run.b)
    )
    decoding_n = seconds(CodecOp.DECODE)
    # In a round rank r passes on the sum of rank r - step + 1, and decodes it meanwhile.
    places = [(ranks - step + 1) % n for step in range(1, n)]
    run.shifts([(-1, nbytes_n[place_n], decoding_n[place_n]) for place_n in places])
    run.work(decoding_n[(ranks + 1) % n])
