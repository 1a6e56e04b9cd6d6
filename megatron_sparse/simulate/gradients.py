"""Synthetic sparse gradients with a stated density, overlap and skew.

ZEN (section 2.1) characterises sparse gradients by three numbers: the overlap of two ranks'
positions (definition 3), the densification of the sum of n ranks (definition 4) and the skew over n
partitions (definition 5). Here a gradient consists of rows of consecutive elements, like an
embedding's. Each rank has row i with probability p_i, independently of other ranks. A rank's number
of rows is fixed to the sum of the p_i, as in top-k selection. The vector of probabilities then
determines all three numbers in closed form, and can be fitted to published values
(`embedding_like`).

Everything is a pure function of (arguments, rank). Values are normally distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_sparse.extras import require_fits

SEED = 0
"""Of the draws of rows."""


@dataclass(frozen=True)
class GradientModel:
    """Which elements of a rank's gradient are not zero.

    Attributes:
        numel: elements of the gradient.
        row_numel: elements of a row, which are all zero or all non-zero; divides `numel`.
        probability_R: float64; for each row the probability that a rank has it.

    Example:
        >>> model = uniform(4096, density=0.5)
        >>> round(model.densification(2), 3)  # 1 - 0.5^2 of the elements, over 0.5
        1.5
    """

    numel: int
    row_numel: int
    probability_R: np.ndarray

    def gradient(self, rank: int) -> torch.Tensor:
        """The gradient of a rank: fp32, `numel` elements on the CPU."""
        rows_R = torch.from_numpy(self._rows(rank))
        generator = torch.Generator().manual_seed(rank)
        values_K = torch.randn(int(rows_R.sum()) * self.row_numel, generator=generator)
        values_K[values_K == 0] = 1.0  # the rank has these elements, so they must not be zero
        grad = torch.zeros(rows_R.numel(), self.row_numel)
        grad[rows_R] = values_K.view(-1, self.row_numel)
        return grad.flatten()

    def _rows(self, rank: int) -> np.ndarray:
        """Draws the rank's rows by systematic sampling in random order; returns bool [R].

        The probabilities are added up in that order, from a random start below 1. A row is drawn
        where the sum passes a whole number. So each row has its probability, and the number of rows
        is their sum, rounded up or down.
        """
        rows = self.probability_R.size
        generator = np.random.default_rng([SEED, rank + 1])
        order, start = generator.permutation(rows), generator.random()
        is_drawn_R = np.zeros(rows, dtype=bool)
        reached = np.floor(np.cumsum(self.probability_R[order]) + start)
        is_drawn_R[order] = np.diff(reached, prepend=0.0) > 0
        return is_drawn_R

    def summed(self, n: int) -> GradientModel:
        """The model of a node's gradient: the sum over its n ranks, each with this model."""
        probability_R = 1 - (1 - self.probability_R) ** n
        return replace(self, probability_R=probability_R)

    @property
    def density(self) -> float:
        """Expected density of one rank's gradient."""
        return float(self.probability_R.mean())

    def sum_density(self, n: int) -> float:
        """Expected density of the sum of n ranks' gradients."""
        return float((1 - (1 - self.probability_R) ** n).mean())

    def densification(self, n: int) -> float:
        """ZEN's definition 4, expected."""
        return self.sum_density(n) / self.density

    def overlap(self) -> float:
        """ZEN's definition 3 for two ranks, expected."""
        return 2 - self.densification(2)

    def skewness(self, n: int) -> float:
        """ZEN's definition 5 with n partitions, expected."""
        parts = np.array_split(self.probability_R, n)
        return float(max(part.mean() for part in parts)) / self.density


def uniform(numel: int, density: float) -> GradientModel:
    """Positions are uniform and independent of one another and across ranks."""
    return GradientModel(numel, 1, np.full(numel, density))


def skewed(numel: int, density: float, exponent: float = 1.0, row_numel: int = 1) -> GradientModel:
    """A model in which row i is drawn at a rate proportional to (i + 1)^-exponent.

    `density`: expected, of one rank; below 1. `exponent`: 0 is uniform; the larger, the more rows
    near row 0; the words of a language have about 1 (Zipf).
    """
    return GradientModel(numel, row_numel, _zipf_probability(numel // row_numel, density, exponent))


def embedding_like(
    numel: int, density: float, sum_density: float, ranks: int, row_numel: int
) -> GradientModel:
    """`skewed`, with the exponent for which the sum of `ranks` ranks has `sum_density`.

    `density`: expected, of one rank. `sum_density`: expected, of the sum of `ranks` ranks'
    gradients: between `density` (the same rows on all ranks) and the sum's density for uniform
    rows. `row_numel`: elements of a row, such as the width of an embedding.

    Raises:
        ValueError: no exponent from 0 to 8 gives `sum_density`.
        DependencyError: scipy is missing.

    Example:
        >>> model = embedding_like(2**16, 0.02, 0.3, ranks=64, row_numel=16)
        >>> round(model.density, 3), round(model.sum_density(64), 3)
        (0.02, 0.3)
    """

    def excess(exponent: float) -> float:
        """How far the sum's density at this exponent is above `sum_density`; falls with it."""
        return skewed(numel, density, exponent, row_numel).sum_density(ranks) - sum_density

    return skewed(numel, density, _root(excess, 0.0, 8.0), row_numel)


def _zipf_probability(rows: int, density: float, exponent: float) -> np.ndarray:
    """[R] The probability that row i is drawn at least once, in as many draws as give `density`."""
    popularity = np.arange(1, rows + 1, dtype=np.float64) ** -exponent

    def excess(log_draws: float) -> float:
        """How far the density after exp(`log_draws`) draws is above `density`; grows with them."""
        return float(-np.expm1(-np.exp(log_draws) * popularity).mean()) - density

    # A row's probability is 1 - exp(-draws * popularity). It is `density` for the most popular row
    # (popularity 1) after exp(low) draws, for the rarest row after exp(high): search in between.
    low = np.log(-np.log1p(-density))
    high = np.log(-np.log1p(-density) / popularity[-1])
    draws = np.exp(_root(excess, low - 1, high + 1))
    return -np.expm1(-draws * popularity)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    require_fits()
    from scipy.optimize import root_scalar

    return float(root_scalar(function, bracket=(low, high), xtol=1e-9).root)
