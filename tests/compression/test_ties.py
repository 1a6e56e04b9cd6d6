"""What ties at the threshold is drawn: sent densities are right, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.compression import CompressionConfig
from tests.compression.distributions import DISTRIBUTIONS
from tests.compression.rank import Rank

NUMEL = 20_000
CONFIG = CompressionConfig(density=0.01, samples=5000)
TIED = ("constant", "outlier", "two_levels_0.02", "integers", "zeros_0.999", "denormals")


def _rank(rank=0):
    return Rank(CONFIG, [ParameterSlice("w", 0, NUMEL)], rank)


@pytest.mark.parametrize("name", TIED)
def test_nothing_is_lost(name):
    """Sent + residual == gradient + old residual, bit for bit, for 20 steps."""
    rank, before = _rank(), torch.zeros(NUMEL)
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        gradient_N = DISTRIBUTIONS[name](NUMEL, draw)
        sent_N = rank.send(gradient_N, step)
        assert torch.equal(sent_N + rank.residual, gradient_N + before), step
        assert not ((sent_N != 0) & (rank.residual != 0)).any(), "an element is sent whole or not"
        before = rank.residual


def test_ranks_and_steps_draw_different_ties():
    gradient_N = torch.full((NUMEL,), 0.5)
    one, other = _rank(), _rank(1)
    sent = [one.send(gradient_N, 0) != 0, other.send(gradient_N, 0) != 0]
    again = _rank().send(gradient_N, 0) != 0
    later = _rank().send(gradient_N, 1) != 0
    assert torch.equal(sent[0], again)
    for different in (sent[1], later):
        # Independent draws of 1 % have 2 elements of 20,000 in common.
        assert int((sent[0] & different).sum()) < 15


def test_capacity_holds_where_everything_ties():
    """Dropping all but the first is what an overflow does: the draw leaves none."""
    rank = _rank()
    sent_N = rank.send(torch.full((NUMEL,), 0.5), 0, capacity=2.0)
    kept_K = sent_N.nonzero().squeeze(1)
    assert 150 < len(kept_K) < 250
    assert int(kept_K[-1]) > 0.9 * NUMEL, "all of the gradient is drawn from"
