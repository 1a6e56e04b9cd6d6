"""The density that is sent is the one asked for, whatever the gradient looks like.

Of elements that tie at the threshold some are drawn, and nothing is lost.
"""

import math
from collections.abc import Callable
from statistics import fmean

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.compression import CompressionConfig
from tests.compression.rank import Rank

type Draw = Callable[[int, torch.Generator], torch.Tensor]


def _two_levels(large: float) -> Draw:
    return lambda n, g: torch.where(torch.rand(n, generator=g) < large, 3.0, 0.1)


def _outlier(numel: int, generator: torch.Generator) -> torch.Tensor:
    gradient_N = torch.full((numel,), 0.1)
    gradient_N[int(torch.randint(numel, (), generator=generator))] = 10.0
    return gradient_N


def _mostly_zero(zeros: float) -> Draw:
    def draw(numel: int, generator: torch.Generator) -> torch.Tensor:
        values_N = torch.randn(numel, generator=generator)
        return values_N.where(torch.rand(numel, generator=generator) >= zeros, 0)

    return draw


def _blocks(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Runs of a thousand elements, each with a scale of its own."""
    scale = torch.randn(math.ceil(numel / 1000), generator=generator).exp()
    return torch.randn(numel, generator=generator) * scale.repeat_interleave(1000)[:numel]


def _not_finite(numel: int, generator: torch.Generator) -> torch.Tensor:
    gradient_N = torch.randn(numel, generator=generator)
    gradient_N[:2] = torch.tensor([math.nan, math.inf])
    return gradient_N


DISTRIBUTIONS: dict[str, Draw] = {
    "constant": lambda n, g: torch.full((n,), 0.1),
    "outlier": _outlier,
    "two_levels_0.002": _two_levels(0.002),
    "two_levels_0.02": _two_levels(0.02),
    "two_levels_0.3": _two_levels(0.3),
    "integers": lambda n, g: torch.randint(-8, 9, (n,), generator=g).float(),
    "half_zeros": _mostly_zero(0.5),
    "zeros_0.999": _mostly_zero(0.999),
    "normal": lambda n, g: torch.randn(n, generator=g),
    "bf16": lambda n, g: torch.randn(n, generator=g).bfloat16(),
    "heavy_tail": lambda n, g: torch.randn(n, generator=g) / torch.randn(n, generator=g),
    "sorted": lambda n, g: torch.randn(n, generator=g).sort().values,
    "blocks": _blocks,
    "alternating": lambda n, g: 0.1 - 0.2 * (torch.arange(n) % 2),
    "denormals": lambda n, g: torch.randint(-99, 100, (n,), generator=g).float() * 1e-44,
    "not_finite": _not_finite,
}
"""Makes the gradient of one step, fp32 or bf16, from its length and a generator. The two levels are
0.1 and, in the named part of the elements, 3; the integers are those from -8 to 8."""

NUMEL, STEPS = 100_000, 20
TIED_NUMEL = 20_000
TIED = ("constant", "outlier", "two_levels_0.02", "integers", "zeros_0.999", "denormals")
CONFIG = CompressionConfig(density=0.01, samples=5000)


def _rank(config=CONFIG, numel=TIED_NUMEL, rank=0):
    return Rank(config, [ParameterSlice("w", 0, numel)], rank)


def check(name, density):
    """First without residuals, then with: a constant gradient c becomes multiples of c.

    The mean of the steps is within 10 %, each step within 3 standard errors of the sample.
    """
    config = CompressionConfig(density=density)
    error = math.sqrt(density * (1 - density) / min(config.samples_at(density), NUMEL))
    for feedback in (False, True):
        draw, rank, found = torch.Generator().manual_seed(7), None, []
        for step in range(STEPS):
            if rank is None or not feedback:
                rank = _rank(config, NUMEL)
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


@pytest.mark.parametrize("name", TIED)
def test_nothing_is_lost(name):
    """Sent + residual == gradient + old residual, bit for bit, for 20 steps."""
    rank, before = _rank(), torch.zeros(TIED_NUMEL)
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        gradient_N = DISTRIBUTIONS[name](TIED_NUMEL, draw)
        sent_N = rank.send(gradient_N, step)
        assert torch.equal(sent_N + rank.residual, gradient_N + before), step
        assert not ((sent_N != 0) & (rank.residual != 0)).any(), "an element is sent whole or not"
        before = rank.residual


def test_ranks_and_steps_draw_different_ties():
    gradient_N = torch.full((TIED_NUMEL,), 0.5)
    one, other = _rank(), _rank(rank=1)
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
    sent_N = rank.send(torch.full((TIED_NUMEL,), 0.5), 0, capacity=2.0)
    kept_K = sent_N.nonzero().squeeze(1)
    assert 150 < len(kept_K) < 250
    assert int(kept_K[-1]) > 0.9 * TIED_NUMEL, "all of the gradient is drawn from"
