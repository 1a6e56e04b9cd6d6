"""ZEN's figures 8 and 15: sparse schemes against a dense all-reduce, on overlapping gradients.

The gradients are `gradients.embedding_like`. What the paper states fits them: density of one rank,
and one density of a sum. Table 1 and section 5.1 give the first; the second is read from a stated
speedup by the cost that the paper's scheme has, which makes that bar of ZEN's own no test
(`WORKLOADS` says which). Bars of other schemes are the model's.

Figure 8 counts bytes on the busiest port only, as section 2.4 does: no latency, no local work.
Figure 15 is 16 machines at 25 Gbit/s, a rank for each: what a machine's GPUs have added up densely
over NVLink before costs the same in every scheme and is left out. The all-reduce is a ring, as
the backend's; its additions are free. AGsparse, SparCML (recursive doubling) and the parameter
server send index and value (COO) of what is selected, but of sums the smallest of dense, COO and
Pici. ZEN's formats have no fused kernel here: what is charged is every pass of their tensor
operations, far more than the paper's kernels take; without any charge it is a series of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.simulate.figures import (
    Figure,
    Row,
    draw_lines,
    log_axis,
    shared_legend,
    styles_of,
)
from megatron_sparse.simulate.figures import draw_bars as draw_grouped
from megatron_sparse.simulate.gradients import GradientModel, embedding_like
from megatron_sparse.simulate.machines import AWS_25, BANDWIDTH_ONLY, CODEC_FRACTION
from megatron_sparse.simulate.pricing import Gradients, Job, Outcome, price

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NUMEL, FAST_NUMEL = 2**20, 2**16
NUMEL_8 = 2**19
GPUS_A_MACHINE = 8


@dataclass(frozen=True)
class Workload:
    """A model whose gradient is synchronised.

    Attributes:
        name: the model.
        full_numel: elements of the sparse gradient (tables 1 and 2).
        density: of one rank.
        sum_density: of the sum of `ranks` ranks.
        ranks: see there.
        row_numel: elements that are zero or not together.
        gpus_a_rank: ranks that are added up within a machine first.
    """

    name: str
    full_numel: float
    density: float
    sum_density: float
    ranks: int
    row_numel: int
    gpus_a_rank: int = GPUS_A_MACHINE

    def gradient_model(self, numel: int) -> GradientModel:
        """Of one GPU (of a group of eight, for a model that is split over them)."""
        return embedding_like(numel, self.density, self.sum_density, self.ranks, self.row_numel)


# Section 2.4: with 128 GPUs Balanced Parallelism in COO, which sends d + d_128 of the elements
# with an index each, takes 0.64 of the all-reduce's time: d_128 = 0.64 - 0.0247.
NMT = Workload("NMT", 112e6, 0.0247, 0.615, 128, 512)
WORKLOADS = (
    # 793,471 rows of 512. ZEN's 6.77x: 2 d_8 + 1/32 + d_128 = 2 / 6.77.
    Workload("LSTM", 406e6, 0.0113, 0.187, 128, 512),
    # Section 5.3: 2.80 % of one GPU are 5.2 % of eight.
    Workload("DeepFM", 214e6, 0.0280, 0.052, 8, 16),
    NMT,
    # 5 % of the gradient of eight GPUs that share one model. No speedup is stated for this one:
    # as the other two.
    Workload("Llama3.2-3B", 3.2e9, 0.05, 0.44, 16, 1, 1),
    # ZEN's 3.44x and 3.51x: 2 d + 1/32 + d_16 = 2 / speedup.
    Workload("OPT-2.7B", 2.7e9, 0.05, 0.45, 16, 1, 1),
    Workload("Gemma2-2B", 2.6e9, 0.05, 0.44, 16, 1, 1),
)
SCHEME_OF = {
    "AGsparse": "agsparse",
    "SparCML": "ssar_rd",
    "Sparse PS": "sparse_ps",
    "OmniReduce": "omnireduce",
    "direct (this project)": "direct",
    "ZEN": "zen",
}
OWN_FORMAT = ("omnireduce", "zen", "direct")
"""Schemes that choose their own message format."""


def available() -> dict[str, str]:
    """The figures' schemes that are in the registry; prints the names of missing ones."""
    for name, scheme in SCHEME_OF.items():
        if scheme not in SCHEMES:
            print(f"{name} is left out: {scheme} is not in the registry")
    return {name: scheme for name, scheme in SCHEME_OF.items() if scheme in SCHEMES}


def outcomes(job: Job, gradients: Gradients, names: dict[str, str]) -> dict[str, Outcome]:
    """The costs of schemes and of the dense all-reduce.

    Args:
        job: machine and number of ranks; its format is overridden here.
        gradients: makes each rank's gradient.
        names: schemes by the name under which their costs are returned.

    Returns:
        `AllReduce` and the others, by name.
    """
    found = {"AllReduce": price(replace(job, charged=False), "dense", gradients)}
    for name, scheme in names.items():
        message_format = "auto" if scheme in OWN_FORMAT else "coo"
        chosen = replace(job, format=message_format)
        found[name] = price(chosen, scheme, gradients)
        if scheme == "zen" and job.charged:
            free = replace(chosen, charged=False)
            found[f"{name}, codec free"] = price(free, scheme, gradients)
    return found


def _row(name: str, where: Row, outcome: Outcome, dense: Outcome, model: GradientModel) -> Row:
    n = where["ranks"]
    return {
        "series": name,
        **where,
        "density": model.density,
        "sum_density": model.sum_density(n),
        "overlap": model.overlap(),
        "skewness": model.skewness(n),
        "time_ms": outcome.time_s * 1e3,
        "codec_ms": outcome.local_s * 1e3,
        "wire_mib": outcome.wire_bytes / 2**20,
        "normalised_time": outcome.time_s / dense.time_s,
        "speedup": dense.time_s / outcome.time_s,
    }


def rows_8(fast: bool) -> list[Row]:
    """Time over the dense all-reduce's, against the number of GPUs."""
    numel = FAST_NUMEL if fast else NUMEL_8
    model = NMT.gradient_model(numel)
    names = available()
    names.pop("Sparse PS", None)  # Not in the paper's figure; 40 times off its scale.
    rows = []
    for n in (4, 16) if fast else (4, 8, 16, 32, 64, 128):
        job = Job(BANDWIDTH_ONLY, n, 4 * NMT.full_numel, numel, charged=False)
        found = outcomes(job, model.gradient, names)
        dense = found["AllReduce"]
        # As the paper counts: every element that is pushed, and every one that is pulled.
        pushed = (model.density + model.sum_density(n)) / 2
        for name, part in (("in COO", 2 * pushed), ("without index", pushed)):
            ideal = Outcome(part * dense.time_s, 0.0, part * dense.wire_bytes)
            found[f"Balanced Parallelism {name} (counted)"] = ideal
        where = {"workload": NMT.name, "ranks": n, "full_numel": NMT.full_numel}
        where["simulated_numel"] = numel
        rows += [_row(name, where, outcome, dense, model) for name, outcome in found.items()]
    return rows


@cache
def _workload_rows(workload: Workload, numel: int, machines: int) -> tuple[Row, ...]:
    model = workload.gradient_model(numel).summed(workload.gpus_a_rank)
    job = Job(AWS_25, machines, 4 * workload.full_numel, numel)
    found = outcomes(job, model.gradient, available())
    where = {
        "workload": workload.name,
        "ranks": machines,
        "full_numel": workload.full_numel,
        "simulated_numel": numel,
    }
    dense = found.pop("AllReduce")
    return tuple(_row(name, where, outcome, dense, model) for name, outcome in found.items())


def rows_15(fast: bool) -> list[Row]:
    """Speedup over the dense all-reduce of six models on 16 machines."""
    workloads = WORKLOADS[1:4:2] if fast else WORKLOADS
    numel, machines = (FAST_NUMEL, 4) if fast else (NUMEL, 16)
    return [row for workload in workloads for row in _workload_rows(workload, numel, machines)]


def draw_normalised(rows: list[Row], canvas: Canvas) -> None:
    """One panel, both axes logarithmic."""
    axes = canvas.subplots()
    draw_lines(axes, rows, "ranks", "normalised_time", styles_of(rows))
    for which in "xy":
        log_axis(axes, which)
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    axes.set_xlabel("GPUs, one a node")
    axes.set_ylabel("time / time of AllReduce")
    shared_legend(canvas, [axes])


def draw_bars(rows: list[Row], canvas: Canvas) -> None:
    """A group of bars for each model."""
    axes = canvas.subplots()
    draw_grouped(axes, rows, "workload", "speedup")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speedup over AllReduce")
    shared_legend(canvas, [axes])


def _figure(
    number: int,
    title: str,
    assumptions: str,
    rows: Callable[[bool], list[Row]],
    draw: Callable[[list[Row], Canvas], None],
) -> Figure:
    return Figure("zen", number, f"ZEN figure {number}: {title}", assumptions, rows, draw, 5.0)


FIGURES = (
    _figure(
        8,
        "synchronising NMT's embedding gradient",
        "bytes on the busiest port only: no latency, no codec time",
        rows_8,
        draw_normalised,
    ),
    _figure(
        15,
        "speedup over AllReduce, 16 machines, 25 Gbit/s",
        f"gradients fitted to the paper's text; codec at {CODEC_FRACTION:.0%} of a V100's HBM",
        rows_15,
        draw_bars,
    ),
)
