"""Any sparse scheme across the nodes, dense sums within them (`collectives.hierarchical`).

With m lanes, k nodes and s = N b bytes: (m - 1)(alpha + 4 N / m beta) within the nodes, the inner
scheme on N / m elements and k ranks, and (m - 1)(alpha + s / m beta) within the nodes. It is PCCL's
dense hierarchy with another middle; the inner scheme sees the density of a node's sum, gamma of
definition 4 times that of a rank's.

Added: decoding the whole message first, counting and encoding a lane's part, surplus ranks. Of the
lanes the densest counts; where they share a network card, they share its rate by what each sends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import DryRun
from megatron_sparse.planner.cost_models.shape import FP32_BYTES, BucketShape


def hierarchical(run: DryRun, inner: Callable[[DryRun], None]) -> None:
    """The three phases; `inner` is the model of `scheme.inner`."""
    sizes = run.clocks.topology.node_sizes
    lanes, nodes, largest = min(sizes), len(sizes), max(sizes)
    whole, part = run.piece(), run.piece(lanes)
    form = run.format(SCHEMES["hierarchical"].message_format(run.options))
    run.agree()
    run.work(form.seconds(CodecOp.DECODE, whole, run.densities.whole(1), run.b))
    _within_node(run, largest, lanes, FP32_BYTES, run.plain(CodecOp.ADD, part.numel))
    if nodes > 1:
        _across(run, lanes, nodes, inner)
    if not run.scatter:
        _within_node(run, largest, lanes, run.b, 0.0)
    elif largest > lanes:
        link = run.clocks.topology.intra
        guests = -(-(largest - lanes) // lanes)
        run.clocks.work(link.alpha_s + guests * link.beta_s * FP32_BYTES * whole.numel / run.n)


def _within_node(run: DryRun, ranks: int, lanes: int, value_bytes: int, addition_s: float) -> None:
    """Each rank and each lane exchange a part, pairwise; one addition a round later."""
    inside = run.part(run.shape, run.node(ranks))
    nbytes = run.shape.numel / lanes * value_bytes
    inside.shifts([(step, nbytes, addition_s if step > 1 else 0.0) for step in range(1, ranks)])
    inside.work(addition_s if ranks > 1 else 0.0)
    run.clocks.wait_for(inside.clocks)


def _across(run: DryRun, lanes: int, nodes: int, inner: Callable[[DryRun], None]) -> None:
    name, sizes = run.options.inner, run.clocks.topology.node_sizes
    shared_out = len(set(sizes)) == 1 and run.shape.op in SCHEMES[name].ops
    op = run.shape.op if shared_out else CollectiveOp.ALL_REDUCE
    # Between nodes a value is fp32 unless `scheme.wire_dtype` narrows fp32 gradients.
    shape = BucketShape(
        round(run.shape.numel / lanes),
        round(run.shape.kept_numel / lanes),
        run.p,
        op,
        nodes,
        run.p,
    )
    densities = run.densities.of_lane(max(sizes), lanes)
    message, part = (
        run.format(SCHEMES["hierarchical"].message_format(run.options)),
        run.piece(lanes),
    )
    sent_L = sum(
        np.asarray(message.nbytes(part, run.densities.shards(ranks, lanes), run.p))
        for ranks in (max(sizes), run.n)
    )
    lane = run.part(shape, run.lane(float(np.sum(sent_L) / np.max(sent_L))), densities)
    message = lane.format(SCHEMES[name].message_format(lane.options))
    lane.work(message.seconds(CodecOp.ENCODE, lane.piece(), densities.whole(1), lane.b))
    inner(lane)
    run.clocks.wait_for(lane.clocks)
