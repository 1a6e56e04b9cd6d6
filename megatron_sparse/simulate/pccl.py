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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.base import Steps
from megatron_sparse.simulate import all_gather, figures
from megatron_sparse.simulate.figures import Axes, Canvas, Figure, How, Row
from megatron_sparse.simulate.machines import FRONTIER_LANES, GB, PERLMUTTER_LANES, Machine
from megatron_sparse.simulate.pricing import ChargingTimer, Job, drive, make_bucket, price
from megatron_sparse.transport import Link
from megatron_sparse.transport.virtual import VirtualTransport

MB = 2**20
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
        vendor_links: its ring's links, inside a node and between nodes.
        mpi_links: Cray-MPICH's.
    """

    machine: Machine
    vendor: str
    vendor_links: tuple[Link, Link]
    mpi_links: tuple[Link, Link]


def _system(machine: Machine, vendor: str, mpi_alpha_s: float) -> System:
    # PCCL runs the vendor's ring within nodes, so this ring has that fitted latency too.
    ring = Link(machine.intra.alpha_s, 1 / (100 * GB))
    return System(
        machine, vendor, (machine.intra, ring), (machine.intra, Link(mpi_alpha_s, 1 / (25 * GB)))
    )


FRONTIER = _system(FRONTIER_LANES, "RCCL", 200e-6)
PERLMUTTER = _system(PERLMUTTER_LANES, "NCCL", 30e-6)


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
    job = Job(system.machine, world_size, size_mb * MB, numel, op)
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
    mpi = library == "Cray-MPICH"
    host = 1 / HOST_ADDS_RATE if mpi and kind == "reduce_scatter" else 0.0
    links = system.mpi_links if mpi else system.vendor_links
    return all_gather.seconds_of_ring(world_size, size_mb * MB, links, host)


def _rows(
    system: System, kind: str, sizes: tuple[int, ...], ranks: tuple[int, ...], *, mpi: bool
) -> list[Row]:
    rows = []
    for size in sizes:
        for n in ranks:
            own_s = pccl_s(system, kind, n, size)
            times = {"PCCL": own_s, system.vendor: library_s(system, system.vendor, kind, n, size)}
            if mpi:
                times["Cray-MPICH"] = library_s(system, "Cray-MPICH", kind, n, size)
            rows += [
                {
                    "series": f"{name}, {size} MB",
                    "library": name,
                    "machine": system.machine.name,
                    "collective": kind,
                    "ranks": n,
                    "size_mb": size,
                    "time_ms": seconds * 1e3,
                    "pccl_speedup": seconds / own_s,
                }
                for name, seconds in times.items()
            ]
    return rows


def _line_rows(
    system: System, kinds: tuple[str, ...], sizes: tuple[int, ...], fast: bool
) -> list[Row]:
    ranks = FAST_RANKS if fast else RANKS
    return [row for kind in kinds for row in _rows(system, kind, sizes, ranks, mpi=True)]


def _heat_rows(system: System, fast: bool) -> list[Row]:
    ranks, sizes = (FAST_RANKS, SIZES_MB[::3]) if fast else (RANKS, SIZES_MB)
    both = [
        _rows(system, kind, sizes, ranks, mpi=False) for kind in ("all_gather", "reduce_scatter")
    ]
    return [row for rows in both for row in rows if row["library"] == system.vendor]


def _draw_lines(rows: list[Row], canvas: Canvas, titles: Sequence[str]) -> None:
    """A panel for each title, which each row has one of."""
    titled = [row | {"panel": title} for row, title in zip(rows, titles, strict=True)]
    styles = figures.styles_of(rows, "library", "size_mb")
    how: How = {"log": "xy", "ticks": True, "xlabel": "ranks"}
    panels = figures.line_panels(canvas, titled, "panel", "ranks", "time_ms", styles, **how)
    _label(panels, "time (ms)")


def _label(panels: dict[str, Axes], ylabel: str) -> None:
    for title, axes in panels.items():
        axes.set_title(title.replace("_", "-"), fontsize=9)
    next(iter(panels.values())).set_ylabel(ylabel)


def draw_sizes(rows: list[Row], canvas: Canvas) -> None:
    """The smaller two sizes on the left, the larger two on the right."""
    sizes = list(figures.groups(rows, "size_mb"))
    halves = (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :])
    title_of = {size: " and ".join(map(str, half)) + " MB" for half in halves for size in half}
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
