"""PCCL's figures 7 to 11: all-gather and reduce-scatter on up to 2048 GPUs, all dense.

PCCL's hierarchical algorithms run on the virtual cluster with all their messages: the
reduce-scatter of `dense_hierarchical`, and its all-gather (`all_gather.hierarchical`). The bucket
has a few elements for each rank. The scaled price is exact, because dense messages have no headers
(`pricing`). The libraries' flat rings would take 4 million messages on 2048 GPUs;
`all_gather.seconds_of_ring` prices them, which is the virtual cluster's clock in closed form.

Bandwidths are the hardware's. RCCL and NCCL stripe their ring over all cards of a node; Cray-MPICH
uses one, and adds on the host (sections 3.2 and 3.3). Latencies are FITTED, because the paper
states none. Each machine has three: for a step of the vendor's ring, of PCCL's recursive algorithms
between nodes, and of Cray-MPICH's ring. Fitted to: 7x over RCCL at 1024 MB and 33x at 16 MB on 2048
GCDs; 2 to 3x over NCCL at 256 MB and 5x at 16 MB on 2048 GPUs; Cray-MPICH's stated distance on
both. The latencies include every cost of a message at that scale, also contention; a ping-pong
would measure less. All other points of the figures are predictions of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.base import Steps
from megatron_sparse.simulate import all_gather, figures
from megatron_sparse.simulate.figures import Axes, Canvas, Figure, Row
from megatron_sparse.simulate.machines import FRONTIER_LANES, GB, MIB, PERLMUTTER_LANES, Machine
from megatron_sparse.simulate.pricing import ChargingTimer, Job, drive, make_bucket, price
from megatron_sparse.transport import Link
from megatron_sparse.transport.virtual import VirtualTransport

NUMEL_A_RANK = 2
RANKS, FAST_RANKS = (32, 64, 128, 256, 512, 1024, 2048), (16, 32)
SIZES_MB = (16, 32, 64, 128, 256, 512, 1024)
HOST_ADDS_RATE = 12.5 * GB
"""Bytes a second that Cray-MPICH reduces on the host; fitted to 10 to 15x behind RCCL (3.3)."""


@dataclass(frozen=True)
class System:
    """A machine and the libraries that PCCL is compared with there.

    Attributes:
        machine: the machine as modelled for PCCL's own algorithms.
        vendor: the GPU vendor's library.
        mpi_alpha_s: fitted latency of Cray-MPICH's ring between nodes.
    """

    machine: Machine
    vendor: str
    mpi_alpha_s: float


FRONTIER = System(FRONTIER_LANES, "RCCL", 200e-6)
PERLMUTTER = System(PERLMUTTER_LANES, "NCCL", 30e-6)


@cache
def run_s(system: System, kind: str, world_size: int, size_mb: int) -> float:
    """PCCL's time from the virtual cluster, with its additions and its shuffle.

    Args:
        system: the machine.
        kind: all_gather or reduce_scatter.
        world_size: ranks, whole nodes.
        size_mb: MiB of the whole buffer.
    """
    numel = NUMEL_A_RANK * world_size
    scatter = kind == "reduce_scatter"
    op = CollectiveOp.REDUCE_SCATTER if scatter else CollectiveOp.ALL_REDUCE
    job = Job(system.machine, world_size, size_mb * MIB, numel, op)
    if scatter:
        return price(job, "dense_hierarchical", lambda _: torch.ones(numel)).time_s

    def start(transport: VirtualTransport, timer: ChargingTimer) -> Steps:
        return all_gather.hierarchical(make_bucket(job, torch.ones(numel)), transport, timer)

    return drive(job, start).time_s


def pccl_s(system: System, kind: str, world_size: int, size_mb: int) -> float:
    """`run_s`, interpolated between the smallest and the largest size.

    All ranks do the same at the same time, so the time is a sum of terms alpha + beta m. It is
    linear in the size, so the interpolation is exact.
    """
    low, high = SIZES_MB[0], SIZES_MB[-1]
    low_s, high_s = (run_s(system, kind, world_size, size) for size in (low, high))
    return low_s + (high_s - low_s) * (size_mb - low) / (high - low)


def library_s(system: System, library: str, kind: str, world_size: int, size_mb: int) -> float:
    """Time of a library's flat ring: the system's `vendor`, or Cray-MPICH."""
    intra, adding_s_a_byte = system.machine.intra, 0.0
    # PCCL runs the vendor's ring within nodes, so between them this ring has that latency too.
    inter = Link(intra.alpha_s, 1 / (100 * GB))
    if library == "Cray-MPICH":
        inter = Link(system.mpi_alpha_s, 1 / (25 * GB))
        adding_s_a_byte = 1 / HOST_ADDS_RATE if kind == "reduce_scatter" else 0.0
    return all_gather.seconds_of_ring(world_size, size_mb * MIB, (intra, inter), adding_s_a_byte)


def _rows(
    system: System,
    kinds: Sequence[str],
    sizes: Sequence[int],
    ranks: Sequence[int],
    libraries: Sequence[str],
) -> list[Row]:
    """A row for each collective, size in MiB, number of ranks and library."""
    rows = []
    for kind, size, n in itertools.product(kinds, sizes, ranks):
        own_s = pccl_s(system, kind, n, size)
        for library in libraries:
            time_s = own_s if library == "PCCL" else library_s(system, library, kind, n, size)
            rows.append(
                {
                    "series": f"{library}, {size} MB",
                    "library": library,
                    "machine": system.machine.name,
                    "collective": kind,
                    "ranks": n,
                    "size_mb": size,
                    "time_ms": time_s * 1e3,
                    "pccl_speedup": time_s / own_s,
                }
            )
    return rows


def _line_rows(system: System, kinds: Sequence[str], sizes: Sequence[int], fast: bool) -> list[Row]:
    ranks = FAST_RANKS if fast else RANKS
    return _rows(system, kinds, sizes, ranks, ("PCCL", system.vendor, "Cray-MPICH"))


def _heat_rows(system: System, fast: bool) -> list[Row]:
    """The vendor's times for both collectives, with PCCL's speedup over them."""
    ranks, sizes = (FAST_RANKS, SIZES_MB[::3]) if fast else (RANKS, SIZES_MB)
    return _rows(system, ("all_gather", "reduce_scatter"), sizes, ranks, (system.vendor,))


def _draw_lines(rows: list[Row], canvas: Canvas, titles: Sequence[str]) -> None:
    """A panel of times over ranks for each title; `titles` has the one of each row's panel."""
    titled = [row | {"panel": title} for row, title in zip(rows, titles, strict=True)]
    styles = figures.styles_of(rows, "library", "size_mb")
    columns = ("panel", "ranks", "time_ms")
    panels = figures.line_panels(
        canvas, titled, *columns, styles, log="xy", ticks=True, xlabel="ranks"
    )
    _label(panels, "time (ms)")


def _label(panels: dict[str, Axes], ylabel: str) -> None:
    """Writes each panel's title above it, and the label of the first one's y axis."""
    for title, axes in panels.items():
        axes.set_title(title.replace("_", "-"), fontsize=9)
    next(iter(panels.values())).set_ylabel(ylabel)


def draw_sizes(rows: list[Row], canvas: Canvas) -> None:
    """The smaller two sizes on the left, the larger two on the right."""
    sizes = list(figures.groups(rows, "size_mb"))
    title_of = {}
    for half in (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]):
        title_of |= dict.fromkeys(half, " and ".join(map(str, half)) + " MB")
    _draw_lines(rows, canvas, [title_of[row["size_mb"]] for row in rows])


def draw_collectives(rows: list[Row], canvas: Canvas) -> None:
    """A panel for each collective."""
    _draw_lines(rows, canvas, [row["collective"] for row in rows])


def draw_speedups(rows: list[Row], canvas: Canvas) -> None:
    """A heatmap for each collective."""
    of = ("collective", "size_mb", "pccl_speedup", "ranks")
    _label(figures.heatmaps(canvas, rows, *of, most=32, number="{:.2g}"), "buffer (MB)")


_FITTED = "link rates published, latencies fitted to the paper's text (docs/results/figures.md)"


def _lines(number: int, system: System, kind: str) -> Figure:
    """The figure of one collective's times, by size and number of ranks."""
    return Figure(
        "pccl",
        number,
        f"PCCL figure {number}: {kind.replace('_', '-')} on {system.machine.name}",
        _FITTED,
        lambda fast: _line_rows(system, (kind,), (64, 128, 256, 512), fast),
        draw_sizes,
    )


def _heatmaps(number: int, system: System) -> Figure:
    title = f"PCCL figure {number}: speedup over {system.vendor} on {system.machine.name}"
    return Figure(
        "pccl", number, title, _FITTED, lambda fast: _heat_rows(system, fast), draw_speedups
    )


FIGURES = (
    _lines(7, FRONTIER, "all_gather"),
    _lines(8, FRONTIER, "reduce_scatter"),
    _heatmaps(9, FRONTIER),
    Figure(
        "pccl",
        10,
        "PCCL figure 10: all-gather and reduce-scatter on Perlmutter, A100",
        _FITTED,
        lambda fast: _line_rows(PERLMUTTER, ("all_gather", "reduce_scatter"), (64, 128), fast),
        draw_collectives,
    ),
    _heatmaps(11, PERLMUTTER),
)
