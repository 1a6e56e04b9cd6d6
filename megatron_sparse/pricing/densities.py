"""Expected densities of the sums of ranks' contributions: whole, by shard, by block.

A profile (`SparsityProfile`) says how dense the sum of k ranks is (ZEN, definition 4), how much
denser the densest of p partitions is than the mean (definition 5), for one rank and for the sum of
all, and which fraction of the blocks holds a non-zero element. The rest is assumed:

- The densest partitions lie within one another, from the bucket's beginning on, as for rows sorted
  by frequency: the densest of 4 is in the denser half. The skewness at 2, 4, ... n partitions is
  then a Lorenz curve, which gives the density of every shard.
- A shard's sum of k ranks lies on the power law in u = -log(1 - density) through its own densities
  for one and for all ranks, as in `SparsityProfile.sum_density` for the whole bucket. For
  independent positions this is SpCCL's equation 7, applied repeatedly.
- A shard's block is as likely non-zero as one of e independent elements would be; e is set so that
  all shards together have the measured fraction.

Legend: P partitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape

MOST_DENSITY = 1 - 1e-12
"""Replaces 1 where a logarithm would be infinite."""


class SumDensities:
    """Densities of the part of a bucket that selection may prune.

    Args:
        profile: of the whole bucket, or of its pruned part if it has as many elements as that; see
            `without_chance`.
        shape: the bucket.
        ranks_each: ranks whose sum counts as one contribution, as the sum of a node does.
        lanes: the densities are those of the first, densest, of this many parts of the bucket.
    """

    def __init__(
        self, profile: SparsityProfile, shape: BucketShape, ranks_each: int = 1, lanes: int = 1
    ) -> None:
        self._profile, self._shape = profile, shape
        self._ranks_each, self._lanes = ranks_each, lanes
        # Results of `_partitions` by its arguments; schemes ask for the same ones in every round.
        self._known: dict[tuple[int, int], np.ndarray] = {}
        # The fraction of elements that are always kept, to subtract if the profile includes them.
        self._kept = 0.0
        if 0 < shape.kept_numel < shape.numel and profile.numel != shape.pruned_numel:
            self._kept = shape.kept_numel / shape.numel

    def of_lane(self, ranks_each: int, lanes: int) -> SumDensities:
        """Densities of sums of `ranks_each` ranks, in the densest of `lanes` equal parts."""
        return SumDensities(self._profile, self._shape, ranks_each, lanes)

    def whole(self, ranks: int) -> float:
        """The density of the sum of `ranks` contributions."""
        if self._lanes > 1:
            return float(self._partitions(ranks * self._ranks_each, self._lanes)[0])
        return self._mean(ranks * self._ranks_each)

    def shards(self, ranks: int, parts: int) -> np.ndarray:
        """The density of the sum of `ranks` contributions in P equal parts, densest first."""
        return self._partitions(ranks * self._ranks_each, parts * self._lanes)[:parts]

    def block_density(self, ranks: int, parts: int, block_size: int) -> np.ndarray:
        """The fraction of non-zero blocks in each of P equal parts of the bucket, densest first.

        Args:
            ranks: number of summed contributions. Non-zero blocks were measured for one rank and
                for the sum of all; a smaller sum clusters its elements as the sum of all does.
            parts: P.
            block_size: elements of a block.
        """
        profile = self._profile
        by_size, measured_ranks = profile.block_density, 1
        if ranks > 1:
            by_size, measured_ranks = profile.sum_block_density, profile.world_size
        # The module's e, fitted to the whole bucket, as measured; 64 parts or more show skewness.
        whole_P = self._partitions(measured_ranks, max(parts, 64))
        block_elements = _independent_elements(whole_P, _at(by_size, block_size), block_size)
        shard_P = self.shards(ranks, parts)
        # 1 - (1 - density)^block_elements: the chance that not all of the elements are zero.
        return -np.expm1(block_elements * np.log1p(-np.minimum(shard_P, MOST_DENSITY)))

    def _mean(self, ranks: int) -> float:
        """The density of the sum of so many ranks in the whole pruned part."""
        density = self._profile.sum_density(ranks)
        return min(max((density - self._kept) / (1 - self._kept), 0.0), 1.0)

    def _partitions(self, ranks: int, parts: int) -> np.ndarray:
        """The density of the sum of `ranks` ranks in each of P parts of the bucket; cached."""
        key = (ranks, parts)
        if key not in self._known:
            self._known[key] = self._computed(ranks, parts)
        return self._known[key]

    def _computed(self, ranks: int, parts: int) -> np.ndarray:
        """Computes `_partitions` by the module's power law in u, scaled to the profile's mean."""
        everyone = self._profile.world_size
        one_P = self._mean(1) * _shares(self._profile.skewness, parts)
        if ranks == 1 or everyone == 1:
            density_P = one_P  # one rank is summed, or was measured: the law needs two points
        else:
            all_P = self._mean(everyone) * _shares(self._profile.sum_skewness, parts)
            # Clipped, because u must be above 0 and finite.
            u_one_P = -np.log1p(-np.clip(one_P, 1e-12, MOST_DENSITY))
            u_all_P = np.maximum(-np.log1p(-np.clip(all_P, 1e-12, MOST_DENSITY)), u_one_P)
            # The law through k = 1 and k = everyone: u(k) = u(1) k^exponent.
            exponent_P = np.log(u_all_P / u_one_P) / math.log(everyone)
            density_P = -np.expm1(-u_one_P * ranks**exponent_P)
        mean = density_P.mean()
        return np.minimum(density_P * (self._mean(ranks) / mean), 1.0) if mean else density_P


def without_chance(profile: SparsityProfile) -> SparsityProfile:
    """The profile without the skewness that chance alone adds to the densest partition.

    With m clumps of non-zero elements expected in each of p partitions, the fullest is about
    the fraction q / sqrt(m) above the mean, q being the largest of p normal numbers. Chance
    makes another partition the fullest on each rank and in each step. A clump: see `_clump_numel`.
    """
    clumps = profile.numel / _clump_numel(profile)

    def lasting(skewness: Mapping[int, float], density: float) -> dict[int, float]:
        """`skewness` without chance's part, for gradients (or sums) of this `density`."""
        found = {}
        for p, ratio in skewness.items():
            q = NormalDist().inv_cdf((p - 0.375) / (p + 0.25))  # Blom's approximation
            m = max(density * clumps / p, 1.0)
            found[p] = max(ratio - q / math.sqrt(m), 1.0)
        return found

    return replace(
        profile,
        skewness=lasting(profile.skewness, profile.density),
        sum_skewness=lasting(profile.sum_skewness, profile.sum_density(profile.world_size)),
    )


def _clump_numel(profile: SparsityProfile) -> float:
    """How many elements are non-zero together, as in an embedding's row; 1 if independent.

    It is the mean count of non-zero elements in a non-zero block of the smallest size, divided by
    that count for independent positions.
    """
    size = min(profile.block_density)
    filled = profile.block_density[size]  # fraction of non-zero blocks
    if not filled:
        return 1.0
    measured = profile.density * size / filled  # non-zero elements of a non-zero block
    density = min(profile.density, MOST_DENSITY)
    # The same number for independent elements: of such blocks 1 - (1 - density)^size are non-zero.
    independent = density * size / -math.expm1(size * math.log1p(-density))
    return max(measured / independent, 1.0)


def _shares(skewness: Mapping[int, float], parts: int) -> np.ndarray:
    """The density of each of `parts` equal parts over the mean density, densest part first.

    These are the steps of the Lorenz curve. With `skewness[count]` = ratio, the densest of `count`
    partitions has ratio times the mean density, so it holds ratio / count of the non-zero elements.
    The curve is linear between these points.
    """
    bucket_shares, nnz_shares = [0.0], [0.0]
    for count, ratio in sorted(skewness.items(), reverse=True):
        bucket_shares.append(1 / count)
        nnz_shares.append(min(max(ratio / count, nnz_shares[-1]), 1.0))
    curve = np.interp(np.arange(parts + 1) / parts, [*bucket_shares, 1.0], [*nnz_shares, 1.0])
    return np.sort(np.diff(curve))[::-1] * parts


def _at(measured: Mapping[int, float], size: int) -> float:
    """The value at a block size, between the two nearest measured ones."""
    sizes = sorted(measured)
    return float(np.interp(math.log(size), np.log(sizes), [measured[key] for key in sizes]))


def _independent_elements(density_P: np.ndarray, fraction: float, block_size: int) -> float:
    """How many independent elements in a block make this fraction of the blocks non-zero."""
    log_empty_P = np.log1p(-np.minimum(density_P, MOST_DENSITY))

    def filled(elements: float) -> float:
        """The fraction of non-zero blocks if a block has so many elements; it grows with them."""
        return float(-np.expm1(elements * log_empty_P).mean())

    low, high = 0.0, float(block_size)
    if filled(high) <= fraction:  # a block has no more elements
        return high
    for _ in range(50):  # halvings: exact to fp64
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle) < fraction else (low, middle)
    return high
