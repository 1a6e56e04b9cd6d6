"""Dense all-reduces and reduce-scatters: rounds, bytes and additions of each.

On one level, with n ranks and N b = s bytes: `dense` and `dense_ring` 2 (n - 1) alpha +
2 (n - 1) / n s beta (Patarasuk and Yuan 2009; SpCCL's equation 2 and PCCL's, twice); `dense_rhd`
2 log2 n alpha and as many bytes (PCCL, section 2.2); `dense_allpairs` 2 alpha and as many;
`dense_broadcast` (2 (n - 2) + ceil(log2 n)) alpha + (2 (n - 2) / (n - 1) + ceil(log2 n)) s beta
(StragglAR, appendix F; `straggler.cost`). A reduce-scatter has the first half of each.
`dense_hierarchical` is PCCL's section 4.1: rings of m ranks within nodes, log2 k rounds between.

Added: an addition of a piece in each round of the first half; two rounds of everything where ranks
fold (n no power of two). A dense plan selects nothing: it sends gradient and residual whole
(`Selector.take_whole`), which is free while there is no residual.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.planner.cluster import CodecOp
from megatron_sparse.planner.cost_models.dry_run import DryRun
from megatron_sparse.planner.cost_models.shape import BucketShape


def dense(run: DryRun) -> None:
    """The backend's own collective, as a ring of what was measured of it (`ClusterModel.dense`)."""
    if run.cluster.device == "cpu":
        run.agree()
    link = run.cluster.dense_link(run.n)
    rounds = (run.n - 1) * (1 if run.scatter else 2)
    nbytes = math.ceil(run.shape.numel / run.n) * run.b
    run.clocks.work(rounds * (link.alpha_s + link.beta_s * nbytes))


def dense_ring(run: DryRun) -> None:
    """Reduce-scatter round the ring, all-gather round the ring."""
    ring_reduce_scatter(run, run.shape.numel)
    if not run.scatter:
        ring_all_gather(run, run.shape.numel)


def ring_reduce_scatter(run: DryRun, numel: float) -> None:
    """In n - 1 rounds of a piece, each with an addition."""
    addition_s = run.plain(CodecOp.ADD, numel / run.n)
    for _ in range(run.n - 1):
        run.shift(-1, numel / run.n * run.p)
        run.work(addition_s)


def ring_all_gather(run: DryRun, numel: float) -> None:
    """In n - 1 rounds of a piece."""
    for _ in range(run.n - 1):
        run.shift(-1, numel / run.n * run.b)


def dense_rhd(run: DryRun) -> None:
    """Recursive halving, then doubling."""
    halve_and_double(run, run.shape.numel)


def halve_and_double(run: DryRun, numel: float) -> None:
    """`dense_rhd` of some elements: the same steps as the collective's, on its cuts."""
    n, ranks = run.n, np.arange(run.n)
    active = 1 << (n.bit_length() - 1)
    surplus = n - active
    leads = np.array([2 * j if j < surplus else j + surplus for j in range(active)] + [n])
    guests = leads[:surplus] + 1
    cuts = np.array(even_cuts(round(numel), n))
    index_n = np.searchsorted(leads, ranks, side="right") - 1
    is_active_n = np.isin(ranks, leads)

    def to_leads() -> np.ndarray:
        target_n = np.full(n, -1)
        target_n[guests] = leads[:surplus]
        return target_n

    def from_leads() -> np.ndarray:
        target_n = np.full(n, -1)
        target_n[leads[:surplus]] = guests
        return target_n

    def flip(distance: int) -> np.ndarray:
        return np.where(is_active_n, leads[index_n ^ distance], -1)

    def block(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return cuts[leads[last]] - cuts[leads[first]]

    if surplus:
        run.exchange(to_leads(), numel * run.p)
        run.work(np.isin(ranks, leads[:surplus]) * run.plain(CodecOp.ADD, numel))
    distance = active // 2
    while distance:
        theirs = (index_n ^ distance) // distance * distance
        own = index_n // distance * distance
        run.exchange(flip(distance), block(theirs, theirs + distance) * run.p)
        added = block(own, own + distance).max()
        run.work(is_active_n * run.plain(CodecOp.ADD, float(added)))
        distance //= 2
    if run.scatter:
        if surplus:
            run.exchange(from_leads(), numel / n * run.p)
        return
    distance = 1
    while distance < active:
        own = index_n // distance * distance
        run.exchange(flip(distance), block(own, own + distance) * run.b)
        distance *= 2
    if surplus:
        run.exchange(from_leads(), numel * run.b)


def dense_allpairs(run: DryRun) -> None:
    """All pieces at once, twice; the n parts of a piece are added in between."""
    numel = run.shape.numel / run.n
    run.clocks.everybody_at_once(numel * run.b, run.host_s)
    run.work((run.n - 1) * run.plain(CodecOp.ADD, numel) + 2 * run.plain(CodecOp.COPY, numel))
    if not run.scatter:
        run.clocks.everybody_at_once(numel * run.b, run.host_s)


def dense_broadcast(run: DryRun) -> None:
    """All but the last rank all-reduce; then one and the last; then everybody else."""
    n, numel = run.n, run.shape.numel
    if n == 1:
        return
    successor_n = (np.arange(n) + 1) % (n - 1)
    successor_n[n - 1] = -1
    if n > 2:
        piece = numel / (n - 1)
        for _ in range(n - 2):
            run.exchange(successor_n, piece * run.p)
            run.work(run.plain(CodecOp.ADD, piece))
        for _ in range(n - 2):
            run.exchange(successor_n, piece * 4)
    meeting_n = np.full(n, -1)
    meeting_n[0], meeting_n[n - 1] = n - 1, 0
    run.exchange(meeting_n, numel * run.p)
    run.work(run.plain(CodecOp.ADD, numel))
    order, holders = [0, n - 1, *range(1, n - 1)], 2
    while holders < n:
        target_n = np.full(n, -1)
        for place in range(min(holders, n - holders)):
            target_n[order[place]] = order[place + holders]
        run.exchange(target_n, numel * run.b)
        holders *= 2


def dense_hierarchical(run: DryRun) -> None:
    """Rings within nodes, halving and doubling between them; surplus ranks fold into a lane."""
    sizes = run.clocks.topology.node_sizes
    lanes, nodes = min(sizes), len(sizes)
    guests = max(sizes) - lanes
    numel = run.shape.numel
    if run.scatter:
        run.work(run.plain(CodecOp.COPY, numel))
    intra = run.clocks.topology.intra
    if guests:
        # A lane takes its guests one after another.
        most = -(-guests // lanes)
        run.clocks.work(most * (intra.alpha_s + intra.beta_s * numel * run.p))
        run.work(most * run.plain(CodecOp.ADD, numel))
    node = run.node(lanes)
    inside = run.part(run.shape, node)
    ring_reduce_scatter(inside, numel)
    run.clocks.wait_for(inside.clocks)
    across = run.part(_lane_shape(run, nodes, numel / lanes), run.lane(lanes))
    halve_and_double(across, numel / lanes)
    run.clocks.wait_for(across.clocks)
    if not run.scatter:
        inside = run.part(run.shape, node)
        ring_all_gather(inside, numel)
        run.clocks.wait_for(inside.clocks)
    if guests:
        nbytes = numel / run.n * run.p if run.scatter else numel * run.b
        run.clocks.work(intra.alpha_s + -(-guests // lanes) * intra.beta_s * nbytes)


def _lane_shape(run: DryRun, nodes: int, numel: float) -> BucketShape:
    op = CollectiveOp.REDUCE_SCATTER if run.scatter else CollectiveOp.ALL_REDUCE
    return BucketShape(round(numel), 0, run.b, op, nodes, run.p)
