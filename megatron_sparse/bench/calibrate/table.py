"""The tables and figures of `megatron-sparse calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse.bench.calibrate.threshold_sweep import THRESHOLDS, SweepPoint
from megatron_sparse.bench.table import print_table
from megatron_sparse.errors import DependencyError
from megatron_sparse.extras import require_figures
from megatron_sparse.pricing.cluster import ClusterModel, CodecRate
from megatron_sparse.simulate.figures import Figure, Row, draw_lines, groups, styles_of, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FIGURE_TITLE = "Thresholds of the adaptive ring, one swept at a time (SpCCL, figure 2)"
SHOWN = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Densities of the codec's table; the file has more."""


def print_cluster(cluster: ClusterModel) -> None:
    """Prints links, host and codec rates."""
    print(
        f"cluster {cluster.name}: {cluster.device}, nodes of {', '.join(map(str, cluster.nodes))} "
        f"ranks, a port for each {cluster.nic}; "
        + "; ".join(f"{key}: {value}" for key, value in cluster.fingerprint.items())
    )
    print(f"\n{'':<7}{'alpha (us)':>12}{'Gbit/s':>10}")
    for kind, link, what in (
        ("intra", cluster.intra, "within a node"),
        ("inter", cluster.inter, "between nodes"),
        ("dense", cluster.dense, "the backend's all-reduce, as a ring"),
    ):
        rate = f"{8e-9 / link.beta_s:.3g}" if link.beta_s else "-"
        print(f"{kind:<7}{link.alpha_s * 1e6:>12.1f}{rate:>10}  {what}")
    print(
        f"\nhost: {cluster.host_s_per_message * 1e6:.1f} us a message, "
        f"{cluster.host_s_per_bucket * 1e6:.1f} us a bucket"
    )
    by_call: dict[tuple[str, str], list[CodecRate]] = {}
    for rate in cluster.codec:
        by_call.setdefault((rate.op, rate.format), []).append(rate)
    densities = [d for d in SHOWN if d in {rate.density for rate in cluster.codec}]
    print("codec: ns an element, by density; the file has more densities\n")
    shown = "".join(f"{density:>9.1%}" for density in densities)
    print(f"{'codec':<18}{'format':<12}{'us a call':>10}{shown}")
    for (op, form), rates in sorted(by_call.items()):
        ns = {rate.density: f"{rate.seconds_per_element * 1e9:.3g}" for rate in rates}
        most_us = max(rate.seconds_per_call for rate in rates) * 1e6
        shown = "".join(f"{ns.get(density, ''):>9}" for density in densities)
        print(f"{op:<18}{form:<12}{most_us:>10.1f}{shown}".rstrip())


def print_curves(
    points: Sequence[SweepPoint], found: Mapping[str, tuple[float, float, float]]
) -> None:
    """Prints each curve, the value that was taken marked, and the result."""
    print_table(points, None)
    for form, densities in found.items():
        named = zip(THRESHOLDS, densities, strict=True)
        keys = " ".join(f"scheme.ring_{name}_density={value:g}" for name, value in named)
        print(f"scheme.format={form} {keys}")


def draw_curves(points: Sequence[SweepPoint], what: str, label: str, folder: Path) -> list[Path]:
    """Writes the curves as CSV and, where matplotlib is installed, as PNG.

    A missing picture is a warning on standard error: the thresholds are the result.

    Args:
        points: of all curves.
        what: was swept where.
        label: says in the title whether it was measured.
        folder: made if missing.

    Returns:
        The files.
    """
    rows = [asdict(point) | {"series": point.format} for point in points]
    figure = Figure("spccl", 2, FIGURE_TITLE, what, lambda _: rows, _draw, 3.6, label)
    try:
        require_figures()
    except DependencyError as error:
        print(f"warning: the curves are not drawn: {error}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / f"{figure.name}.csv"
        write_csv(rows, table)
        return [table]
    return figure.make(folder, fast=False)


def _draw(rows: list[Row], canvas: Canvas) -> None:
    styles, panels = styles_of(rows), groups(rows, "threshold")
    axes_of = canvas.subplots(1, len(panels), squeeze=False, sharey=False)[0]
    for axes, (threshold, part) in zip(axes_of, panels.items(), strict=True):
        draw_lines(axes, part, "density", "time_us", styles)
        best = [(row["density"], row["time_us"]) for row in part if row["best"]]
        axes.plot(*zip(*best, strict=True), "k*", markersize=10)
        axes.set_title(threshold, fontsize=9)
        axes.set_xlabel("density from which sums go dense")
    axes_of[0].set_ylabel("time (us)")
    axes_of[-1].legend(fontsize=8)
