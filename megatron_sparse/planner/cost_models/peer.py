"""The two-shot collective over peer memory, `peer_two_shot`: a MODEL; nothing of it was measured.

With shard i of a message of m(i) bytes, of the sum of s(i), n ranks and their links inside a node:

    put     2 m bytes through a rank's own memory: its message into its window
    meet    alpha
    add     max((n - 1) m(i) beta, n additions of shard i), by its owner
    encode  the sum of shard i, by its owner
    meet    alpha
    write   max(sum of all s but the own beta, decoding of all s)

A reduce-scatter ends behind `add`. Records are read where they lie and added in the same pass, so
the slower of the two counts. What passes over memory cost is the cluster file's: its codecs as they
were measured for the same records. Sums from `scheme.ring_gather_density` on are dense; no sizes
are agreed upon, with capacity mode or without, and slots are not read beyond their records. Left
out: launches (they are in the cluster's `host_s_per_bucket`), and what `in_order_of_coming` copies.
"""

from __future__ import annotations

import numpy as np

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import DryRun
from megatron_sparse.planner.cost_models.records import Density, Piece, RecordFormat

FP32_BYTES = 4


def peer_two_shot(run: DryRun) -> None:
    """Messages to their owners' adders, sums to everybody."""
    n, shard = run.n, run.piece(run.n)
    if n == 1:
        return
    beta_s = run.clocks.topology.intra.beta_s
    form = RecordFormat(SCHEMES["peer_two_shot"].message_format(run.options), run.cluster)
    own_n = run.densities.shards(1, n)
    message_n = np.broadcast_to(form.nbytes(shard, own_n, run.b), n)
    run.work(run.plain(CodecOp.COPY, float(message_n.sum()) / FP32_BYTES))
    run.clocks.everybody_at_once(0.0)
    adding_n = form.seconds(CodecOp.DECODE, shard, own_n, run.b) + (n - 1) * form.seconds(
        CodecOp.DECODE_ADD, shard, own_n, run.b
    )
    _read(run, (n - 1) * message_n * beta_s, adding_n)
    if run.scatter:
        return
    sums_n3 = np.array([_of_sum(run, shard, float(d)) for d in run.densities.shards(n, n)])
    bytes_n, encoding_n, decoding_n = sums_n3.T
    run.work(encoding_n)
    run.clocks.everybody_at_once(0.0)
    _read(run, (bytes_n.sum() - bytes_n) * beta_s, decoding_n.sum())


def _of_sum(run: DryRun, shard: Piece, density: float) -> tuple[float, float, float]:
    """Bytes of the sum's record of a shard, and the seconds of encoding and decoding it."""
    *_, gather = run.options.ring_densities()
    name = "dense" if density >= gather else run.options.format
    form = RecordFormat(name, run.cluster)
    seconds = [
        float(form.seconds(op, shard, density, run.b)) for op in (CodecOp.ENCODE, CodecOp.DECODE)
    ]
    return float(form.nbytes(shard, density, run.b)), seconds[0], seconds[1]


def _read(run: DryRun, network_n: Density, local_n: Density) -> None:
    """What comes over the links and is worked on as it comes."""
    run.clocks.work(np.maximum(network_n, run.local(local_n)))
