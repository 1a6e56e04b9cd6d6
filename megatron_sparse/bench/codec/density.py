"""`bench density`: how near the sent density comes to the one asked for, whatever the gradient.

Each row is a distribution at a density. Twenty steps are selected from it as in training: first
without a residual, then with one, which adds up what was not sent (a constant gradient c becomes
multiples of c). For both the row gives the mean density over the steps as a part of the one asked
for, and the worst single step in standard errors of the sample, sqrt(d (1 - d) / samples).

Zeros are never sent: where fewer elements than that are not zero, these are what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import torch

from megatron_sparse.bench.codec.gradients import DISTRIBUTIONS
from megatron_sparse.bench.codec.options import DensitySweep
from megatron_sparse.bench.row import CellRow, cell
from megatron_sparse.bench.table import local
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer

MEAN_TARGET = 0.1
"""The part of the density asked for by which the mean over the steps may be off."""
STEP_TARGET = 3.0
"""The standard errors of the sample by which a single step may be off."""


@dataclass
class DensityRow(CellRow, gap="  "):
    """One line of the table and one JSON object."""

    distribution: str = cell("of the gradient", "<18")
    density: float = cell("asked for", ">8g")
    mean: float = cell(
        "density that was sent over the one asked for, mean over the steps without a residual",
        ">10.3f mean/asked",
    )
    worst: float = cell(
        "the largest error of one of these steps, in standard errors of the sample",
        ">11.1f worst(s.e.)",
    )
    fed_mean: float = cell("with error feedback", ">12.3f fed back: mean/asked")
    fed_worst: float = cell("with error feedback", ">11.1f worst(s.e.)")

    @property
    def bad(self) -> bool:
        """Whether any number misses its target."""
        mean = max(abs(self.mean - 1), abs(self.fed_mean - 1))
        return mean > MEAN_TARGET or max(self.worst, self.fed_worst) > STEP_TARGET


def measure(sweep: DensitySweep, distribution: str, density: float) -> DensityRow:
    """One row; a pure function of its arguments."""
    samples = min(sweep.config().samples_at(density), sweep.elements)
    error = math.sqrt(density * (1 - density) / samples)
    found: list[float] = []
    for feedback in (False, True):
        steps = list(sent_densities(sweep, distribution, density, feedback))
        found.append(fmean(sent for sent, _ in steps) / fmean(asked for _, asked in steps))
        found.append(max(abs(sent - asked) for sent, asked in steps) / error)
    return DensityRow(distribution, density, *found)


def sent_densities(
    sweep: DensitySweep, distribution: str, density: float, feedback: bool
) -> Iterator[tuple[float, float]]:
    """The density that each step sends, and the one it is asked for."""
    draw, selector = torch.Generator().manual_seed(7), None
    for step in range(sweep.steps):
        if selector is None or not feedback:  # a rank that has not sent anything yet
            residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.REPORTED)
            selector = Selector(sweep.config(), residuals, 0, MessageBuffers())
        gradient_N = DISTRIBUTIONS[distribution](sweep.elements, draw)
        slices = [ParameterSlice("w", 0, sweep.elements)]
        bucket = Bucket("b", gradient_N, slices, CollectiveOp.ALL_REDUCE, world_size=1)
        message = selector.select(bucket, MessageSpec(density), step=step, timer=StageTimer())
        selector.residuals.commit()
        nonzero = message.pruned_nnz + int(selector.residuals["b"].count_nonzero())
        yield message.pruned_nnz / sweep.elements, min(density, nonzero / sweep.elements)


def _rows(sweep: DensitySweep) -> Iterator[DensityRow]:
    for case in product(sweep.distributions or DISTRIBUTIONS, sweep.densities):
        yield measure(sweep, *case)


run = local("CPU only", _rows)
