"""SpCCL's figures 7 to 9: sparse all-reduce and reduce-scatter on Perlmutter.

Gradients are uniform and independent across ranks (section VI-A), messages Pici, thresholds the
paper's. The simulated bucket always has 2^19 elements (2 MiB), for every priced size (`pricing`).
The dense baseline is the ring that NCCL uses; the network hides its additions, as in NCCL. SparCML
is the best of its four algorithms. It sends selections as indices and values (COO), and sums in the
smallest format. It is priced once with the GPU's memory, and once with a quarter of the host's,
because the published code works on the CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, lru_cache

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Canvas, Figure, Row
from megatron_sparse.simulate.gradients import uniform
from megatron_sparse.simulate.machines import CODEC_FRACTION, GB, MIB, PERLMUTTER_RING, Machine
from megatron_sparse.simulate.pricing import Gradients, Job, JobCost, price, seconds_of_ring

NUMEL, FAST_NUMEL = 2**19, 2**15
SIZES_MIB, RANKS, SPARSITIES = (256, 512, 1024, 2048), (8, 16, 32, 64), (0.90, 0.95, 0.99)
SPARCML = ("ssar_rd", "ssar_split_ag", "dsar_split_ag", "sparse_ring")
# Eight channels of DDR4-3200 for four ranks (NERSC's description of the nodes).
HOST = replace(PERLMUTTER_RING, name="Perlmutter, host", memory_rate=204.8 * GB / 4)
ASSUMPTIONS = (
    f"100 GB/s links, 4 GPUs a node; codec at {CODEC_FRACTION:.0%} of HBM's peak, not pipelined"
)


@lru_cache(maxsize=3 * RANKS[-1])
def _gradient(numel: int, sparsity: float, rank: int) -> torch.Tensor:
    return uniform(numel, 1 - sparsity).gradient(rank)


def gradients(numel: int, sparsity: float) -> Gradients:
    """Uniform and independent; drawn once for all collectives and sizes."""
    return lambda rank: _gradient(numel, sparsity, rank).clone()


@cache
def dense_s(op: CollectiveOp, world_size: int, size_mib: int) -> float:
    """Seconds of NCCL's ring for a buffer of `size_mib` MiB, without charges for additions."""
    links = (PERLMUTTER_RING.intra, PERLMUTTER_RING.inter)
    one_way_s = seconds_of_ring(world_size, size_mib * MIB, links)
    return one_way_s * (2 if op is CollectiveOp.ALL_REDUCE else 1)


@cache
def sparse(
    op: CollectiveOp, world_size: int, size_mib: int, sparsity: float, numel: int
) -> JobCost:
    """The cost of SpCCL's collective.

    Args:
        op: all-reduce or reduce-scatter.
        world_size: ranks.
        size_mib: MiB of the whole buffer.
        sparsity: 1 - density of each rank's input.
        numel: elements that are simulated.
    """
    job = Job(PERLMUTTER_RING, world_size, size_mib * MIB, numel, op, "pici")
    return price(job, "adaptive_ring", gradients(numel, sparsity))


@cache
def sparcml(
    machine: Machine, world_size: int, size_mib: int, sparsity: float, numel: int
) -> JobCost:
    """The cost of the fastest of SparCML's all-reduces."""
    job = Job(machine, world_size, size_mib * MIB, numel, format="coo")
    of_rank = gradients(numel, sparsity)
    return min((price(job, scheme, of_rank) for scheme in SPARCML), key=lambda cost: cost.time_s)


def _row(
    series: str,
    op: CollectiveOp,
    world_size: int,
    size_mib: int,
    sparsity: float,
    numel: int,
    outcome: JobCost,
) -> Row:
    """One collective's cost, and its speedup over the dense ring."""
    base_s = dense_s(op, world_size, size_mib)
    return {
        "series": series,
        "collective": str(op),
        "ranks": world_size,
        "size_mib": size_mib,
        "sparsity": sparsity,
        "time_ms": outcome.time_s * 1e3,
        "dense_ms": base_s * 1e3,
        "speedup": base_s / outcome.time_s,
        "codec_ms": outcome.local_s * 1e3,
        "wire_mib": outcome.wire_bytes / MIB,
        "simulated_numel": numel,
    }


def _dense_row(op: CollectiveOp, n: int, size: int, sparsity: float, numel: int) -> Row:
    """The dense ring's cost, for a buffer of `size` MiB."""
    halves = 2 if op is CollectiveOp.ALL_REDUCE else 1
    outcome = JobCost(dense_s(op, n, size), 0.0, halves * size * MIB * (n - 1) / n)
    return _row("NCCL ring (dense)", op, n, size, sparsity, numel, outcome)


def rows_9(fast: bool) -> list[Row]:
    """Time of the all-reduce by sparsity, with SparCML."""
    ranks, numel = ((4,), FAST_NUMEL) if fast else (RANKS, NUMEL)
    rows = []
    for size in (512,) if fast else (512, 2048):
        for n in ranks:
            for s in SPARSITIES[1:] if fast else SPARSITIES:
                where = (CollectiveOp.ALL_REDUCE, n, size, s, numel)
                rows.append(_dense_row(*where))
                rows.append(_row("SpCCL (Pici)", *where, sparse(*where)))
                if n > 32 or size > 512:  # Minutes a point; and size changes little.
                    continue
                for name, machine in (("GPU", PERLMUTTER_RING), ("host", HOST)):
                    cost = sparcml(machine, *where[1:])
                    rows.append(_row(f"SparCML on the {name}", *where, cost))
    return rows


def _heat_rows(op: CollectiveOp, fast: bool) -> list[Row]:
    """SpCCL's cost by sparsity, size and number of ranks."""
    sparsities, sizes, ranks, numel = SPARSITIES, SIZES_MIB, RANKS, NUMEL
    if fast:
        sparsities, sizes, ranks, numel = SPARSITIES[-1:], SIZES_MIB[::3], (4, 8), FAST_NUMEL
    rows = []
    for sparsity, size, n in itertools.product(sparsities, sizes, ranks):
        where = (op, n, size, sparsity, numel)
        rows.append(_row("SpCCL (Pici)", *where, sparse(*where)))
    return rows


def draw_times(rows: list[Row], canvas: Canvas) -> None:
    """A panel for each size and number of ranks."""
    styles, by_size = figures.styles_of(rows), figures.groups(rows, "size_mib")
    columns = len(figures.groups(rows, "ranks"))
    panels = canvas.subplots(len(by_size), columns, squeeze=False, sharex=True, sharey="row")
    for line, (size, members) in zip(panels, by_size.items(), strict=True):
        for axes, (n, part) in zip(line, figures.groups(members, "ranks").items(), strict=True):
            percent = [row | {"percent": 100 * row["sparsity"]} for row in part]
            title = f"{n} GPUs, {size} MiB"
            figures.draw_lines(axes, percent, "percent", "time_ms", styles, log="y", title=title)
        line[0].set_ylabel("time (ms)")
    for axes in panels[-1]:
        axes.set_xlabel("input sparsity (%)")
    figures.shared_legend(canvas, list(panels.flat))


def draw_speedups(rows: list[Row], canvas: Canvas) -> None:
    """A heatmap for each sparsity."""
    panels = figures.heatmaps(canvas, rows, "sparsity", "size_mib", "speedup", "GPUs", most=8)
    for sparsity, axes in panels.items():
        axes.set_title(f"{sparsity:.0%} sparsity", fontsize=9)
    next(iter(panels.values())).set_ylabel("buffer (MiB)")


def _heatmap(number: int, op: CollectiveOp, what: str) -> Figure:
    title = f"SpCCL figure {number}: {what} (Pici), speedup over NCCL's dense ring"
    return Figure(
        "spccl", number, title, ASSUMPTIONS, lambda fast: _heat_rows(op, fast), draw_speedups, 3.6
    )


FIGURES = (
    _heatmap(7, CollectiveOp.ALL_REDUCE, "all-reduce"),
    _heatmap(8, CollectiveOp.REDUCE_SCATTER, "reduce-scatter"),
    Figure(
        "spccl", 9, "SpCCL figure 9: all-reduce, with SparCML", ASSUMPTIONS, rows_9, draw_times, 6.0
    ),
)
