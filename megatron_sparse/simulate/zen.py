"""ZEN's figures 8 and 15: sparse schemes against a dense all-reduce, on overlapping gradients.

The gradients are `gradients.embedding_like`. They are fitted to two numbers of the paper: the
density of one rank, and one density of a sum. Table 1 and section 5.1 give the first. The second is
computed from a stated speedup with the cost of the paper's scheme, so ZEN's own bar tests nothing
there (`WORKLOADS` says for which models). The bars of other schemes are predictions of the model.

Figure 8 counts bytes on the busiest port only, as section 2.4 does: no latency, no local work.
Figure 15 has 16 machines at 25 Gbit/s, with a rank for each. It leaves out the dense sum over
NVLink within a machine, which costs the same in every scheme. The all-reduce is a ring, as in the
backend; its additions are free. AGsparse, SparCML (recursive doubling) and the parameter server
send selections as index and value (COO), and sums in the smallest of dense, COO and Pici. ZEN's
formats have no fused kernel here. Every pass of their tensor operations is charged, which is far
more than the paper's kernels take; another series shows ZEN without any charge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sparse.simulate import figures
from megatron_sparse.simulate.figures import Canvas, Figure, Row
from megatron_sparse.simulate.gradients import GradientModel, embedding_like
from megatron_sparse.simulate.machines import AWS_25, BANDWIDTH_ONLY, CODEC_FRACTION
from megatron_sparse.simulate.pricing import Gradients, Job, JobCost, price

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
        ranks: the number of ranks in that sum.
        row_numel: elements of a row, which are all zero or all non-zero.
        gpus_a_rank: GPUs whose gradients are added up within a machine first.
    """

    name: str
    full_numel: float
    density: float
    sum_density: float
    ranks: int
    row_numel: int
    gpus_a_rank: int = GPUS_A_MACHINE

    def gradient_model(self, numel: int) -> GradientModel:
        """The gradient of one GPU (of a group of eight GPUs, if the model is split over them)."""
        return embedding_like(numel, self.density, self.sum_density, self.ranks, self.row_numel)


# Section 2.4: with 128 GPUs, Balanced Parallelism in COO takes 0.64 of the all-reduce's time. It
# sends d + d_128 of the elements with an index each: d_128 = 0.64 - 0.0247.
NMT = Workload("NMT", 112e6, 0.0247, 0.615, 128, 512)
WORKLOADS = (
    # 793,471 rows of 512. ZEN's 6.77x: 2 d_8 + 1/32 + d_128 = 2 / 6.77.
    Workload("LSTM", 406e6, 0.0113, 0.187, 128, 512),
    # Section 5.3: 2.80 % of one GPU are 5.2 % of eight.
    Workload("DeepFM", 214e6, 0.0280, 0.052, 8, 16),
    NMT,
    # 5 % of the gradient of eight GPUs that share one model. The paper states no speedup for this
    # model: assumed as for the other two.
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


def outcomes(job: Job, gradients: Gradients, names: dict[str, str]) -> dict[str, JobCost]:
    """Simulates the dense all-reduce (`AllReduce`) and the schemes `names`; returns costs by name.

    `names` has the schemes by their names in the result. The dense all-reduce has no local work;
    ZEN has a second cost without it. The job's message format is not used.
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


def _rows(
    workload: Workload, job: Job, model: GradientModel, found: dict[str, JobCost], dense: JobCost
) -> list[Row]:
    """A row for each cost in `found` (by name), with ratios to the cost `dense`.

    `model`: of the gradients, whose densities, overlap and skewness are columns too.
    """
    n = job.world_size
    return [
        {
            "series": name,
            "workload": workload.name,
            "ranks": n,
            "full_numel": workload.full_numel,
            "simulated_numel": job.numel,
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
        for name, outcome in found.items()
    ]


def rows_8(fast: bool) -> list[Row]:
    """The rows of figure 8: time over the time of the dense all-reduce, by number of GPUs.

    Among them are the costs that the paper counts for its own scheme.
    """
    numel = FAST_NUMEL if fast else NUMEL_8
    model = NMT.gradient_model(numel)
    # The paper leaves the parameter server out, too: its time is 40 times off the scale.
    on_scale = {name: scheme for name, scheme in SCHEME_OF.items() if name != "Sparse PS"}
    rows = []
    for n in (4, 16) if fast else (4, 8, 16, 32, 64, 128):
        job = Job(BANDWIDTH_ONLY, n, 4 * NMT.full_numel, numel, charged=False)
        found = outcomes(job, model.gradient, on_scale)
        dense = found["AllReduce"]
        # Balanced Parallelism sends the non-zero elements of a gradient (Push) and of the sum
        # (Pull); AllReduce sends all elements twice. In COO a value has an index of its length.
        share = (model.density + model.sum_density(n)) / 2
        for name, of_dense in (("in COO", 2 * share), ("without index", share)):
            ideal = JobCost(of_dense * dense.time_s, 0.0, of_dense * dense.wire_bytes)
            found[f"Balanced Parallelism {name} (counted)"] = ideal
        rows += _rows(NMT, job, model, found, dense)
    return rows


def rows_15(fast: bool) -> list[Row]:
    """The rows of figure 15: speedup over the dense all-reduce, for six models on 16 machines."""
    workloads = WORKLOADS[1:4:2] if fast else WORKLOADS  # DeepFM and Llama3.2-3B
    numel, machines = (FAST_NUMEL, 4) if fast else (NUMEL, 16)
    rows = []
    for workload in workloads:
        # A rank is a machine: its gradient is the sum over the machine's GPUs.
        model = workload.gradient_model(numel).summed(workload.gpus_a_rank)
        job = Job(AWS_25, machines, 4 * workload.full_numel, numel)
        found = outcomes(job, model.gradient, SCHEME_OF)
        dense = found.pop("AllReduce")  # its speedup is 1
        rows += _rows(workload, job, model, found, dense)
    return rows


def draw_normalised(rows: list[Row], canvas: Canvas) -> None:
    """Draws figure 8: the normalised time over the number of GPUs, both axes logarithmic."""
    axes, styles = canvas.subplots(), figures.styles_of(rows)
    figures.draw_lines(axes, rows, "ranks", "normalised_time", styles, log="xy", ticks=True)
    axes.set(xlabel="GPUs, one a node", ylabel="time / time of AllReduce")
    figures.shared_legend(canvas, [axes])


def draw_bars(rows: list[Row], canvas: Canvas) -> None:
    """Draws figure 15: the speedup, with a group of bars for each model."""
    axes = canvas.subplots()
    figures.draw_bars(axes, rows, "workload", "speedup")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speedup over AllReduce")
    figures.shared_legend(canvas, [axes])


FIGURES = (
    Figure(
        "zen",
        8,
        "ZEN figure 8: synchronising NMT's embedding gradient",
        "bytes on the busiest port only: no latency, no codec time",
        rows_8,
        draw_normalised,
        5.0,
    ),
    Figure(
        "zen",
        15,
        "ZEN figure 15: speedup over AllReduce, 16 machines, 25 Gbit/s",
        f"gradients fitted to the paper's text; codec at {CODEC_FRACTION:.0%} of a V100's HBM",
        rows_15,
        draw_bars,
        5.0,
    ),
)
