"""The density that is sent is the one asked for, whatever the gradient looks like."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.compression import CompressionConfig
from tests.compression.distributions import DISTRIBUTIONS
from tests.compression.rank import Rank

NUMEL, STEPS = 100_000, 20


def check(name, density, scope="parameter"):
    """First without residuals, then with: a constant gradient c becomes multiples of c.

    The mean of the steps is within 10 %, each step within 3 standard errors of the sample.
    """
    config = CompressionConfig(density=density, threshold_scope=scope)
    error = math.sqrt(density * (1 - density) / min(config.samples_at(density), NUMEL))
    for feedback in (False, True):
        draw, rank, found = torch.Generator().manual_seed(7), None, []
        for step in range(STEPS):
            if rank is None or not feedback:
                rank = Rank(config, [ParameterSlice("w", 0, NUMEL)])
            rank.send(DISTRIBUTIONS[name](NUMEL, draw), step)
            sent = rank.message.nnz
            # Zeros are never sent.
            nonzero = sent + int(rank.residual.count_nonzero())
            found.append((sent / NUMEL, min(density, nonzero / NUMEL)))
        assert fmean(s for s, _ in found) == pytest.approx(fmean(a for _, a in found), rel=0.1)
        assert max(abs(sent - asked) for sent, asked in found) < 3 * error


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution_is_sent_at_the_density_asked_for(name):
    for density in (0.001, 0.01, 0.05, 0.25):
        check(name, density)


@pytest.mark.parametrize("name", ["constant", "outlier", "two_levels_0.02", "integers"])
def test_ties_are_right_with_one_threshold_a_bucket(name):
    check(name, 0.01, "bucket")
