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
        # A zero drawn as a value would not be sent.
        values_K[values_K == 0] = 1.0
        grad = torch.zeros(rows_R.numel(), self.row_numel)
        grad[rows_R] = values_K.view(-1, self.row_numel)
        return grad.flatten()

    def _rows(self, rank: int) -> np.ndarray:
        """For each row whether the rank has it: systematic sampling in random order.

        A row is drawn where the running sum of probabilities, from a random start, passes a whole
        number. That keeps both the rows' probabilities and their number.
        """
        rows = self.probability_R.size
        generator = np.random.default_rng([SEED, rank + 1])
        order, start = generator.permutation(rows), generator.random()
        held = np.zeros(rows, dtype=bool)
        reached = np.floor(np.cumsum(self.probability_R[order]) + start)
        held[order] = np.diff(reached, prepend=0.0) > 0
        return held

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
    """Row i is drawn with a rate proportional to (i + 1)^-exponent: most are near row 0.

    Args:
        numel: elements.
        density: expected, of one rank; below 1.
        exponent: 0 is uniform; the words of a language have about 1 (Zipf).
        row_numel: elements of a row.
    """
    return GradientModel(numel, row_numel, _zipf_probability(numel // row_numel, density, exponent))


def embedding_like(
    numel: int, density: float, sum_density: float, ranks: int, row_numel: int
) -> GradientModel:
    """`skewed`, with the exponent for which the sum of `ranks` ranks has `sum_density`.

    Args:
        numel: elements.
        density: expected, of one rank.
        sum_density: expected, of the sum of `ranks`: from `density` (full overlap) to that of
            uniform positions.
        ranks: the number of ranks in that sum.
        row_numel: elements of a row, such as the width of an embedding.

    Raises:
        ValueError: no exponent up to 8 gives that sum.
        DependencyError: scipy is missing.

    Example:
        >>> model = embedding_like(2**16, 0.02, 0.3, ranks=64, row_numel=16)
        >>> round(model.density, 3), round(model.sum_density(64), 3)
        (0.02, 0.3)
    """

    def excess(exponent: float) -> float:
        """The density of the sum at an exponent, above the wanted one; it falls."""
        return skewed(numel, density, exponent, row_numel).sum_density(ranks) - sum_density

    return skewed(numel, density, _root(excess, 0.0, 8.0), row_numel)


def _zipf_probability(rows: int, density: float, exponent: float) -> np.ndarray:
    """Probability that row i is drawn at least once, with as many draws as give the density."""
    popularity = np.arange(1, rows + 1, dtype=np.float64) ** -exponent

    def excess(log_draws: float) -> float:
        """The density after so many draws, above the wanted one; it grows."""
        return float(-np.expm1(-np.exp(log_draws) * popularity).mean()) - density

    # With `least` draws only the most popular row has a probability of `density`, with `most` even
    # the rarest one; in logarithms. A row's probability is 1 - exp(-draws * popularity).
    least = np.log(-np.log1p(-density))
    most = np.log(-np.log1p(-density) / popularity[-1])
    draws = np.exp(_root(excess, least - 1, most + 1))
    return -np.expm1(-draws * popularity)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    require_fits()
    from scipy.optimize import root_scalar

    return float(root_scalar(function, bracket=(low, high), xtol=1e-9).root)
