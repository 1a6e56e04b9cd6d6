"""StragglAR's figures 6c and 9: all-reduces in which one rank is late.

The registered collectives run on the virtual cluster with all their messages; the late rank's clock
begins later. As in the paper's section 4.3, time is alpha-beta alone: alpha = 3 us and the GPUs'
published point-to-point rate; local work takes no time. The paper's figures show this model too.

StragglAR has two series: *ideal*, where the delay hides all work that the early ranks can do
without the straggler, and *no delay*, the worst case. Times count from the last rank's arrival.

The paper's appendix F also has a broadcast, which is slower than the ring; it is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Axes, Canvas, Figure, Row
from megatron_sparse.simulate.machines import DGX_H100, GIB, MIB, Machine
from megatron_sparse.simulate.pricing import Job, price

NAMES = {
    "straggler": "StragglAR",
    "dense_ring": "ring",
    "dense_rhd": "RHD",
    "dense_allpairs": "MSCCL (all-pairs)",
}
"""The paper's name of each scheme."""
IDEAL_S = 10.0
"""A delay in which the early ranks finish all work that they can do without the straggler."""
POWERS, FAST_POWERS = (4, 8, 16, 32, 64, 128, 256), (4, 8)
EVENS, FAST_EVENS = (6, 10, 12, 14, 18, 20, 24, 28, 36, 48, 60), (6, 10)
"""Not powers of two; from 60 ranks on, making a schedule takes seconds."""


@cache
def after_s(
    machine: Machine, scheme: str, world_size: int, full_bytes: int, delay_s: float
) -> float:
    """Seconds of a dense scheme from the straggler's arrival until all ranks are done.

    All ranks are on one node of `machine`. The highest rank is late by `delay_s`. `full_bytes` is
    the size of the fp32 buffer.
    """
    # Simulated elements: divisible into the n pieces of a ring, and into n - 1 chunks.
    numel = world_size * (world_size - 1) * 2
    job = Job(machine, world_size, full_bytes, numel, charged=False)
    return price(job, scheme, lambda _: torch.ones(numel), late_s=delay_s).time_s - delay_s


def cases() -> list[tuple[str, str, float]]:
    """Returns (name, scheme, the straggler's delay in seconds) for each series of the figures."""
    found = []
    for scheme, name in NAMES.items():
        if scheme == "straggler":  # other schemes wait, so the delay does not change their time
            found += [(f"{name}, ideal", scheme, IDEAL_S), (f"{name}, no delay", scheme, 0.0)]
        else:
            found.append((name, scheme, 0.0))
    return found


def _scaling_rows(ranks: Sequence[int]) -> list[Row]:
    """A row for each number of ranks and series of `cases`: the time of a 1 GiB all-reduce.

    Times count from the straggler's arrival; the speedup is over the dense ring.
    """
    rows = []
    for n in ranks:
        ring_s = after_s(DGX_H100, "dense_ring", n, GIB, 0.0)
        for series, scheme, delay_s in cases():
            time_s = after_s(DGX_H100, scheme, n, GIB, delay_s)
            rows.append(
                {
                    "series": series,
                    "machine": DGX_H100.name,
                    "ranks": n,
                    "size_mib": GIB / MIB,
                    "delay_ms": delay_s * 1e3,
                    "time_ms": time_s * 1e3,
                    "algbw_gbs": GIB / time_s / 1e9,
                    "speedup": ring_s / time_s,
                }
            )
    return rows


def _draw_scaling(axes: Axes, rows: list[Row], y: str, label: str) -> None:
    """Draws the column y over ranks, and fills between StragglAR's worst and ideal case."""
    styles = figures.styles_of(rows)
    figures.draw_lines(axes, rows, "ranks", y, styles, log="x", ticks=True)
    axes.set(xlabel="ranks", ylabel=label)
    by_series = figures.groups(rows, "series")
    worst, ideal = (by_series[f"{NAMES['straggler']}, {case}"] for case in ("no delay", "ideal"))
    axes.fill_between(
        [row["ranks"] for row in worst],
        [row[y] for row in worst],
        [row[y] for row in ideal],
        color=figures.COLOURS[0],
        alpha=0.12,
        linewidth=0,
    )


def draw_scaling(rows: list[Row], canvas: Canvas) -> None:
    """Draws the speedup over the ring and the bandwidth, each over the number of ranks."""
    left, right = canvas.subplots(1, 2)
    _draw_scaling(left, rows, "speedup", "speedup over the ring")
    _draw_scaling(right, rows, "algbw_gbs", "size / time (GB/s)")
    figures.shared_legend(canvas, [left, right])


def _scaling(number: int, title: str, ranks: Sequence[int], fast_ranks: Sequence[int]) -> Figure:
    """A figure over numbers of ranks; `fast_ranks`: those of the reduced sweep."""
    return Figure(
        "stragglar",
        number,
        f"StragglAR figure {title}",
        "alpha 3 us, 450 GB/s between any two ranks; local work takes no time",
        lambda fast: _scaling_rows(fast_ranks if fast else ranks),
        draw_scaling,
    )


FIGURES = (
    _scaling(6, "6c: all-reduce of 1 GiB over the number of ranks", POWERS, FAST_POWERS),
    _scaling(9, "9: 1 GiB, even numbers of ranks that are no powers of 2", EVENS, FAST_EVENS),
)
