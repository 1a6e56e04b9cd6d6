"""PCCL's figures 9 and 11: the dense reduce-scatter on up to 2048 GPUs.

PCCL's hierarchical algorithm, `dense_hierarchical`, runs on the virtual cluster with all its
messages. The bucket has a few elements for each rank. The scaled price is exact, because dense
messages have no headers (`pricing`). The libraries' flat rings would take 4 million messages on
2048 GPUs; `pricing.seconds_of_ring` prices them, which is the virtual cluster's clock in closed
form. The paper's figures show the all-gather, too: it is the same rounds in reverse order, without
additions.

Bandwidths are the hardware's. RCCL and NCCL stripe their ring over all cards of a node. Latencies
are FITTED, because the paper states none. Each machine has two: for a step of the vendor's ring,
and of PCCL's recursive algorithms between nodes. Fitted to the paper's all-gather: 7x over RCCL at
1024 MB and 33x at 16 MB on 2048 GCDs; 2 to 3x over NCCL at 256 MB and 5x at 16 MB on 2048 GPUs. The
latencies include every cost of a message at that scale, also contention; a ping-pong would measure
less. All other points of the figures are predictions of the model.
"""

from __future__ import annotations

from functools import cache

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Canvas, Figure, Row
from megatron_sparse.simulate.machines import FRONTIER_LANES, GB, MIB, PERLMUTTER_LANES, Machine
from megatron_sparse.simulate.pricing import Job, price, seconds_of_ring
from megatron_sparse.transport import Link

NUMEL_A_RANK = 2
RANKS, FAST_RANKS = (32, 64, 128, 256, 512, 1024, 2048), (16, 32)
SIZES_MB = (16, 32, 64, 128, 256, 512, 1024)


@cache
def run_s(machine: Machine, world_size: int, size_mb: int) -> float:
    """Seconds of PCCL's reduce-scatter on the virtual cluster, additions included.

    `machine`: as modelled for PCCL; `world_size`: whole nodes; `size_mb`: MiB of the whole buffer.
    """
    numel = NUMEL_A_RANK * world_size
    job = Job(machine, world_size, size_mb * MIB, numel, CollectiveOp.REDUCE_SCATTER)
    return price(job, "dense_hierarchical", lambda _: torch.ones(numel)).time_s


def pccl_s(machine: Machine, world_size: int, size_mb: int) -> float:
    """Seconds of PCCL's reduce-scatter: `run_s` of the smallest and the largest size, interpolated.

    All ranks do the same at the same time, so the time is a sum of terms alpha + beta m. It is
    linear in the size, so the interpolation is exact.
    """
    low, high = SIZES_MB[0], SIZES_MB[-1]
    low_s, high_s = (run_s(machine, world_size, size) for size in (low, high))
    return low_s + (high_s - low_s) * (size_mb - low) / (high - low)


def vendor_s(machine: Machine, world_size: int, size_mb: int) -> float:
    """Time of the vendor's flat ring, striped over the four 25 GB/s cards of a node."""
    # PCCL runs the vendor's ring within nodes, so between them this ring has that latency too.
    inter = Link(machine.intra.alpha_s, 1 / (100 * GB))
    return seconds_of_ring(world_size, size_mb * MIB, (machine.intra, inter))


def _rows(machine: Machine, vendor: str, fast: bool) -> list[Row]:
    """A row for each size and number of ranks: the vendor's time, and PCCL's speedup over it.

    `fast`: fewer sizes and ranks.
    """
    # [::3]: every third size, including the smallest and the largest.
    ranks, sizes = (FAST_RANKS, SIZES_MB[::3]) if fast else (RANKS, SIZES_MB)
    rows = []
    for size in sizes:
        for n in ranks:
            time_s = vendor_s(machine, n, size)
            rows.append(
                {
                    "series": f"{vendor}, {size} MB",
                    "machine": machine.name,
                    "collective": "reduce_scatter",
                    "ranks": n,
                    "size_mb": size,
                    "time_ms": time_s * 1e3,
                    "pccl_speedup": time_s / pccl_s(machine, n, size),
                }
            )
    return rows


def draw_speedups(rows: list[Row], canvas: Canvas) -> None:
    """A heatmap of the speedup over sizes and ranks."""
    of = ("collective", "size_mb", "pccl_speedup", "ranks")
    for axes in figures.heatmaps(canvas, rows, *of, most=32, number="{:.2g}").values():
        axes.set_ylabel("buffer (MB)")


def _heatmap(number: int, machine: Machine, vendor: str) -> Figure:
    """The figure of PCCL's speedup over a vendor's library."""
    return Figure(
        "pccl",
        number,
        f"PCCL figure {number}: reduce-scatter, speedup over {vendor} on {machine.name}",
        "link rates published, latencies fitted to the paper's text (docs/results/figures.md)",
        lambda fast: _rows(machine, vendor, fast),
        draw_speedups,
    )


FIGURES = (_heatmap(9, FRONTIER_LANES, "RCCL"), _heatmap(11, PERLMUTTER_LANES, "NCCL"))
