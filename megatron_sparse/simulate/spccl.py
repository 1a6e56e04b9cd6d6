"""SpCCL's figures 7 and 8: sparse all-reduce and reduce-scatter on Perlmutter.

Gradients are uniform and independent across ranks (section VI-A), messages in format Pici, density
thresholds the paper's. The simulated bucket always has 2^19 elements (2 MiB), for every priced size
(`pricing`). The dense baseline is the ring that NCCL uses; the network hides its additions, as in
NCCL.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Canvas, Figure, Row
from megatron_sparse.simulate.gradients import uniform
from megatron_sparse.simulate.machines import CODEC_FRACTION, MIB, PERLMUTTER_RING
from megatron_sparse.simulate.pricing import Gradients, Job, price, seconds_of_ring

NUMEL, FAST_NUMEL = 2**19, 2**15
SIZES_MIB, RANKS, SPARSITIES = (256, 512, 1024, 2048), (8, 16, 32, 64), (0.90, 0.95, 0.99)
ASSUMPTIONS = (
    f"100 GB/s links, 4 GPUs a node; codec at {CODEC_FRACTION:.0%} of HBM's peak, not pipelined"
)


@lru_cache(maxsize=3 * RANKS[-1])
def _gradient(numel: int, sparsity: float, rank: int) -> torch.Tensor:
    return uniform(numel, 1 - sparsity).gradient(rank)


def gradients(numel: int, sparsity: float) -> Gradients:
    """Uniform and independent; drawn once for all collectives and sizes."""
    return lambda rank: _gradient(numel, sparsity, rank).clone()


def dense_s(op: CollectiveOp, world_size: int, full_bytes: int) -> float:
    """Seconds of NCCL's ring for a buffer of so many bytes, without charges for additions."""
    links = (PERLMUTTER_RING.intra, PERLMUTTER_RING.inter)
    one_way_s = seconds_of_ring(world_size, full_bytes, links)
    return one_way_s * (2 if op is CollectiveOp.ALL_REDUCE else 1)


def _rows(op: CollectiveOp, fast: bool) -> list[Row]:
    """A row for each sparsity, size and number of ranks: SpCCL's cost, and the dense ring's."""
    sparsities, sizes, ranks, numel = SPARSITIES, SIZES_MIB, RANKS, NUMEL
    if fast:
        sparsities, sizes, ranks, numel = SPARSITIES[-1:], SIZES_MIB[::3], (4, 8), FAST_NUMEL
    rows = []
    for sparsity, size, n in itertools.product(sparsities, sizes, ranks):
        job = Job(PERLMUTTER_RING, n, size * MIB, numel, op, "pici")
        cost = price(job, "adaptive_ring", gradients(numel, sparsity))
        dense_time_s = dense_s(op, n, size * MIB)
        rows.append(
            {
                "series": "SpCCL (Pici)",
                "collective": str(op),
                "ranks": n,
                "size_mib": size,
                "sparsity": sparsity,
                "time_ms": cost.time_s * 1e3,
                "dense_ms": dense_time_s * 1e3,
                "speedup": dense_time_s / cost.time_s,
                "codec_ms": cost.local_s * 1e3,
                "wire_mib": cost.wire_bytes / MIB,
                "simulated_numel": numel,
            }
        )
    return rows


def draw_speedups(rows: list[Row], canvas: Canvas) -> None:
    """Draws a heatmap of the speedup by size and number of GPUs for each sparsity."""
    panels = figures.heatmaps(canvas, rows, "sparsity", "size_mib", "speedup", "GPUs", most=8)
    for sparsity, axes in panels.items():
        axes.set_title(f"{sparsity:.0%} sparsity", fontsize=9)
    next(iter(panels.values())).set_ylabel("buffer (MiB)")


def _heatmap(number: int, op: CollectiveOp, what: str) -> Figure:
    title = f"SpCCL figure {number}: {what} (Pici), speedup over NCCL's dense ring"
    return Figure(
        "spccl", number, title, ASSUMPTIONS, lambda fast: _rows(op, fast), draw_speedups, 3.6
    )


FIGURES = (
    _heatmap(7, CollectiveOp.ALL_REDUCE, "all-reduce"),
    _heatmap(8, CollectiveOp.REDUCE_SCATTER, "reduce-scatter"),
)
