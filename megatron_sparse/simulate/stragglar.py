"""StragglAR's figures 5, 6c, 7 and 9: all-reduces in which one rank is late.

The registered collectives run on the virtual cluster with all their messages; the late rank's clock
begins later. As in the paper's section 4.3, time is alpha-beta alone: alpha = 3 us and the GPUs'
published point-to-point rate; local work takes no time. The paper's figures 6c, 7 and 9 show this
model too. Its figure 5 was measured on GPUs; here it is the same model at its sizes and delays.

Schemes that use a straggler have two series: *ideal*, where the delay hides all work that the early
ranks can do without the straggler, and *no delay*, the worst case. Times count from the last rank's
arrival.

Beyond the paper: the critical delay is also taken from the cluster, as the worst case less the
ring's time, beside the exact formula of appendix B and the one simplified for large n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Axes, Canvas, Figure, Row
from megatron_sparse.simulate.machines import DGX_A100, DGX_H100, GIB, MIB, Machine
from megatron_sparse.simulate.pricing import Job, price
from megatron_sparse.straggler.cost import dense_split
from megatron_sparse.transport import Link

NAMES = {
    "straggler": "StragglAR",
    "dense_ring": "ring",
    "dense_rhd": "RHD",
    "dense_allpairs": "MSCCL (all-pairs)",
    "dense_broadcast": "broadcast",
}
"""The paper's name of each scheme."""
AWARE = ("straggler", "dense_broadcast")
"""Schemes whose time depends on the delay."""
IDEAL_S = 10.0
"""A delay long enough to hide all other work."""
POWERS, FAST_POWERS = (4, 8, 16, 32, 64, 128, 256), (4, 8)
EVENS, FAST_EVENS = (6, 10, 12, 14, 18, 20, 24, 28, 36, 48, 60), (6, 10)
"""Not powers of two; from 60 ranks on, making a schedule takes seconds."""
MEAN_DELAYS_MS = {DGX_H100.name: 4.48, DGX_A100.name: 9.46}
"""Mean delay in the paper's fine-tuning runs (section 4.1)."""


@cache
def after_s(
    machine: Machine, scheme: str, world_size: int, full_bytes: int, delay_s: float
) -> float:
    """Seconds from the straggler's arrival to the last rank's end.

    Args:
        machine: the machine; all ranks are on one node.
        scheme: a dense one.
        world_size: ranks; the last one is late.
        full_bytes: size of the fp32 buffer.
        delay_s: the delay of the last rank.
    """
    # Divisible by n pieces and by n - 1 chunks.
    numel = world_size * (world_size - 1) * 2
    job = Job(machine, world_size, full_bytes, numel, charged=False)
    return price(job, scheme, lambda _: torch.ones(numel), late_s=delay_s).time_s - delay_s


def cases() -> list[tuple[str, str, float]]:
    """Name, scheme and delay of each series; schemes that use a straggler have two series."""
    found = []
    for scheme, name in NAMES.items():
        if scheme in AWARE:
            found += [(f"{name}, ideal", scheme, IDEAL_S), (f"{name}, no delay", scheme, 0.0)]
        else:
            found.append((name, scheme, 0.0))
    return found


def _row(
    panel: str, series: str, machine: Machine, n: int, size: int, delay_s: float, time_s: float
) -> Row:
    """One all-reduce of `size` bytes; `time_s` counts from the straggler's arrival."""
    return {
        "series": series,
        "panel": panel,
        "machine": machine.name,
        "ranks": n,
        "size_mib": size / MIB,
        "delay_ms": delay_s * 1e3,
        "time_ms": time_s * 1e3,
        "total_ms": (delay_s + time_s) * 1e3,
        "algbw_gbs": size / time_s / 1e9,
    }


def rows_5(fast: bool) -> list[Row]:
    """Times on one node: each size with two delays (ideal, mean), the largest with each delay."""
    sizes = [2**power * MIB for power in ((4, 12) if fast else range(4, 13))]
    delays_ms = (0, 5) if fast else (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
    n = 8  # GPUs of a DGX
    rows = []
    for machine in (DGX_H100, DGX_A100):
        mean_s = MEAN_DELAYS_MS[machine.name] * 1e-3
        for scheme, name in NAMES.items():
            for size in sizes:
                for panel, delay_s in (("ideal delay", IDEAL_S), ("mean delay", mean_s)):
                    time_s = after_s(machine, scheme, n, size, delay_s)
                    rows.append(_row(panel, name, machine, n, size, delay_s, time_s))
            for delay_ms in delays_ms:
                delay_s = delay_ms * 1e-3
                time_s = after_s(machine, scheme, n, sizes[-1], delay_s)
                rows.append(_row("delays", name, machine, n, sizes[-1], delay_s, time_s))
    return rows


def _scaling_rows(ranks: Sequence[int]) -> list[Row]:
    """1 GiB for each number of ranks and series of `cases`, with the speedup over the ring."""
    rows = []
    for n in ranks:
        ring_s = after_s(DGX_H100, "dense_ring", n, GIB, 0.0)
        for series, scheme, delay_s in cases():
            time_s = after_s(DGX_H100, scheme, n, GIB, delay_s)
            row = _row("scaling", series, DGX_H100, n, GIB, delay_s, time_s)
            rows.append(row | {"speedup": ring_s / time_s})
    return rows


def critical_on_cluster_s(n: int, full_bytes: int) -> float:
    """The smallest delay at which the straggler-aware form beats the ring on the virtual cluster.

    A delay below the reduce-scatter's time is hidden completely, so the critical delay is the
    difference of the two times without a delay.
    """
    aware_s = after_s(DGX_H100, "straggler", n, full_bytes, 0.0)
    return aware_s - after_s(DGX_H100, "dense_ring", n, full_bytes, 0.0)


def rows_7(fast: bool) -> list[Row]:
    """The critical delay of 1 GiB, and its part due to beta, each also divided by s beta."""
    rows, link = [], DGX_H100.intra
    no_alpha, s_beta_s = Link(0.0, link.beta_s), GIB * link.beta_s
    for n in FAST_POWERS if fast else POWERS:
        log_n = math.log2(n)
        delays_s = {
            "on the cluster": critical_on_cluster_s(n, GIB),
            "appendix B, exact": dense_split(n, GIB, link, link).critical_s,
            "appendix B, simplified": (log_n - 2) * link.alpha_s + log_n / n * s_beta_s,
        }
        # The delay is linear in the size, so another GiB adds exactly the part due to beta.
        beta_parts_s = {
            "on the cluster": critical_on_cluster_s(n, 2 * GIB) - delays_s["on the cluster"],
            "appendix B, exact": dense_split(n, GIB, no_alpha, no_alpha).critical_s,
            "appendix B, simplified": log_n / n * s_beta_s,
        }
        for panel, times_s in (("critical delay", delays_s), ("beta only", beta_parts_s)):
            rows += [
                {
                    "series": series,
                    "panel": panel,
                    "machine": DGX_H100.name,
                    "ranks": n,
                    "time_ms": time_s * 1e3,
                    "ratio": time_s / s_beta_s,
                }
                for series, time_s in times_s.items()
            ]
    return rows


def draw_5(rows: list[Row], canvas: Canvas) -> None:
    """Figure 5: a line of panels for each machine, bandwidth over sizes, total time over delays."""
    by_machine = figures.groups(rows, "machine")
    most_panels = len(figures.groups(rows, "panel"))
    grid = canvas.subplots(len(by_machine), most_panels, squeeze=False)
    styles = figures.styles_of(rows)
    for line, (machine, of_machine) in zip(grid, by_machine.items(), strict=True):
        # A machine may have fewer panels: its last places stay empty.
        panels = figures.groups(of_machine, "panel").items()
        for axes, (panel, members) in zip(line, panels, strict=False):
            if panel == "delays":
                figures.draw_lines(axes, members, "delay_ms", "total_ms", styles)
                axes.set_title(f"{machine}, {members[0]['size_mib']:g} MiB", fontsize=9)
                axes.set(xlabel="delay (ms)", ylabel="total time (ms)")
            else:
                figures.draw_lines(axes, members, "size_mib", "algbw_gbs", styles, log="x")
                axes.set_title(f"{machine}, {panel}", fontsize=9)
                axes.set(xlabel="buffer (MiB)", ylabel="size / time (GB/s)")
                axes.set_xticks(sorted({row["size_mib"] for row in members})[::2])
    figures.shared_legend(canvas, list(grid.flat))


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
    """Speedup over the ring, and bandwidth."""
    left, right = canvas.subplots(1, 2)
    _draw_scaling(left, rows, "speedup", "speedup over the ring")
    _draw_scaling(right, rows, "algbw_gbs", "size / time (GB/s)")
    figures.shared_legend(canvas, [left, right])


def draw_7(rows: list[Row], canvas: Canvas) -> None:
    """The critical delay on the left, the ratio on the right."""
    styles = figures.styles_of(rows)
    panels = figures.panels(canvas, rows, "panel")
    for panel, axes, part in panels:
        y, ylabel, title = {
            "critical delay": ("time_ms", "critical delay (ms)", "1 GiB"),
            "beta only": ("ratio", "beta-competitive ratio", "what grows with s, over s beta"),
        }[panel]
        figures.draw_lines(axes, part, "ranks", y, styles, log="xy", ticks=True, title=title)
        axes.set(xlabel="ranks", ylabel=ylabel)
    figures.shared_legend(canvas, [axes for _, axes, _ in panels])


_LINKS = "alpha 3 us, {} GB/s between any two ranks; local work takes no time"
_H100 = _LINKS.format(450)

FIGURES = (
    Figure(
        "stragglar",
        5,
        "StragglAR figure 5: all-reduces of 8 ranks of which one is late",
        _LINKS.format("450 (H100) and 300 (A100)"),
        rows_5,
        draw_5,
        6.5,
    ),
    Figure(
        "stragglar",
        6,
        "StragglAR figure 6c: all-reduce of 1 GiB over the number of ranks",
        _H100,
        lambda fast: _scaling_rows(FAST_POWERS if fast else POWERS),
        draw_scaling,
    ),
    Figure("stragglar", 7, "StragglAR figure 7: the critical delay", _H100, rows_7, draw_7),
    Figure(
        "stragglar",
        9,
        "StragglAR figure 9: 1 GiB, even numbers of ranks that are no powers of 2",
        _H100,
        lambda fast: _scaling_rows(FAST_EVENS if fast else EVENS),
        draw_scaling,
    ),
)
