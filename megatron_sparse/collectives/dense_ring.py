"""Dense ring: a reduce-scatter round the ring, then an all-gather round it.

The bandwidth-optimal ring (Patarasuk and Yuan 2009), as in NCCL and SpCCL's section II-A. The
bucket is cut into n pieces c_0 ... c_{n-1}.

Reduce-scatter, n - 1 rounds: in each, every rank passes one partially summed piece to its successor
and adds the one it gets to its own. Piece i starts at rank i + 1 and ends, complete, at rank i.
All-gather (all-reduce only), n - 1 rounds: the complete pieces go round once more.

Rank r sends (N - |c_r|) p bytes in the first half and (N - |c_{r+1}|) b in the second: with equal
pieces (n - 1) / n N (p + b). b are the bytes of a value, p those of a partial sum: 4, or 2 where
`wire_dtype=bf16` narrows an fp32 gradient. Each rank's sum of piece i begins with rank i + 1.
"""

import torch

from megatron_sparse.collectives.accumulator import Accumulator, dense_group, store
from megatron_sparse.collectives.base import Exchange, Phase, Steps, Subgroup, even_cuts
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun


def dense_ring(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `dense`."""
    bucket, scatter = exchange.bucket, exchange.scatters
    group = dense_group("dense_ring", exchange, values_N, step)
    cuts = even_cuts(bucket.numel, group.world_size)
    own = slice(cuts[group.rank], cuts[group.rank + 1])
    accumulator = Accumulator(exchange, values_N)
    yield from ring_reduce_scatter(accumulator, cuts, group, last=scatter)
    if scatter:
        store(bucket.grad_N[own], accumulator.sum_N[own])
        return group.sent_bytes
    store(values_N[own], accumulator.sum_N[own])
    yield from ring_all_gather(values_N, cuts, group, last=True)
    store(bucket.grad_N, values_N)
    return group.sent_bytes


def ring_reduce_scatter(
    accumulator: Accumulator, cuts: list[int], group: Subgroup, *, last: bool
) -> Phase:
    """Leaves the sum of piece `group.rank` in the accumulator; other pieces hold partial sums."""
    n, rank = group.world_size, group.rank
    for step in range(n - 1):
        # The piece for the successor, and the piece from the predecessor.
        give, take = (rank - 1 - step) % n, (rank - 2 - step) % n
        start, stop = cuts[take], cuts[take + 1]
        received = accumulator.incoming(stop - start)
        yield from group.exchange(
            [((rank + 1) % n, accumulator.outgoing(cuts[give], cuts[give + 1]))],
            [((rank - 1) % n, received)],
            last=last and step == n - 2,
        )
        accumulator.add(start, stop, received)


def ring_all_gather(
    values_N: torch.Tensor, cuts: list[int], group: Subgroup, *, last: bool
) -> Phase:
    """Spreads piece `group.rank` of each rank's `values_N` to all ranks, in place."""
    n, rank = group.world_size, group.rank
    for step in range(n - 1):
        # A rank passes on the piece that it received in the step before, at first its own.
        give, take = (rank - step) % n, (rank - 1 - step) % n
        yield from group.exchange(
            [((rank + 1) % n, values_N[cuts[give] : cuts[give + 1]])],
            [((rank - 1) % n, values_N[cuts[take] : cuts[take + 1]])],
            last=last and step == n - 2,
        )


def cost(run: DryRun) -> None:
    """Predicts the time of the reduce-scatter and the all-gather round the ring.

    With s = N b bytes: 2 (n - 1) alpha + 2 (n - 1) / n s beta (Patarasuk and Yuan 2009; twice
    equation 2 of SpCCL and of PCCL). A reduce-scatter takes the first half. Added: the addition of
    one piece in each round of the reduce-scatter.
    """
    ring_reduce_scatter_cost(run, run.shape.numel)
    if not run.scatter:
        ring_all_gather_cost(run, run.shape.numel)


def ring_reduce_scatter_cost(run: DryRun, numel: float) -> None:
    """Runs n - 1 rounds on the clocks of `run`: each sends and adds one of n pieces of `numel`."""
    addition_s = run.plain(CodecOp.ADD, numel / run.n)
    for _ in range(run.n - 1):
        run.shift(-1, numel / run.n * run.p)  # rank r sends to rank r - (-1), its successor
        run.work(addition_s)


def ring_all_gather_cost(run: DryRun, numel: float) -> None:
    """Each of n - 1 rounds sends one piece."""
    for _ in range(run.n - 1):
        run.shift(-1, numel / run.n * run.b)


SCHEME = Scheme("dense_ring", Input.DENSE, run=dense_ring, place=20, cost=cost)
