"""What is known about the sparsity of one bucket's gradients: ZEN's characteristics C1, C2 and C3.

ZEN (section 2.1): the density of a rank's gradient (definition 2); the overlap ratio of two ranks'
(definition 3); the densification ratio of the sum of k ranks' (definition 4); the skewness ratio
over even, contiguous partitions (definition 5). To them come the fractions of blocks that hold a
non-zero element, which OmniReduce sends by.

`profile_of` is exact; `planner.sampling` estimates the same numbers in training. A sum's non-zero
elements are those that some rank has: that two values cancel is not looked for. `-0.0` counts as
zero, NaN does not.

Deviations: definition 4 with k below the number of ranks is the mean over groups of k neighbouring
ranks; definition 5 is the mean over ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch

from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.config.sparse import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from megatron_sparse.errors import ProfileError
from megatron_sparse.sparsity.bit_sets import (
    overlap_ratios,
    pack,
    size_of,
    union_counts,
    unions,
)

MOST_PARTITIONS = 128
"""As in ZEN's figure 3; more where there are more ranks."""
BLOCK_SIZES = tuple(
    2**e for e in range(MIN_BLOCK_SIZE.bit_length() - 1, MAX_BLOCK_SIZE.bit_length())
)
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_PAIRS = 64 * 63 // 2
"""Pairs of ranks whose overlap is looked at: all of 64 ranks."""


def partition_counts(numel: int, world_size: int) -> list[int]:
    """Into how many partitions a gradient is cut: 2, 4, ..., 128 and the number of ranks.

    Example:
        >>> partition_counts(1000, 3)
        [2, 3, 4, 8, 16, 32, 64, 128]
    """
    powers = {2**power for power in range(1, MOST_PARTITIONS.bit_length())}
    return sorted(count for count in powers | {world_size} if 1 < count <= max(numel, 1))


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """The quantiles of `QUANTILES`; zeros where there is no value."""
    if not values:
        return (0.0,) * len(QUANTILES)
    return tuple(np.quantile(values, QUANTILES).tolist())


@dataclass(frozen=True)
class SparsityProfile:
    """What all ranks know about one bucket's gradients.

    Where nothing is non-zero, ratios are 1 and overlaps are 0.

    Attributes:
        numel: elements of the bucket.
        world_size: ranks that were measured.
        density: mean over ranks of nnz / numel.
        densification: k ranks -> density of the sum of k ranks over `density`; k = 1, 2, 4, ...
            and `world_size`.
        skewness: partitions -> the densest partition's density over the mean one's, the mean over
            ranks; see `partition_counts`.
        sum_skewness: the same for the sum over all ranks.
        overlap: quantiles 0, 0.25, 0.5, 0.75 and 1 of the overlap ratios of pairs of ranks.
        block_density: elements of a block -> fraction of blocks with a non-zero element, the mean
            over ranks; blocks are counted from the bucket's start.
        sum_block_density: the same for the sum over all ranks.

    Raises:
        ProfileError: the numbers contradict one another.

    Example:
        >>> profile = SparsityProfile.uniform(10**6, density=0.01, world_size=4)
        >>> round(profile.sum_density(2), 4), round(profile.sum_density(64), 3)
        (0.0199, 0.474)
    """

    numel: int
    world_size: int
    density: float
    densification: dict[int, float]
    skewness: dict[int, float]
    sum_skewness: dict[int, float]
    overlap: tuple[float, ...]
    block_density: dict[int, float]
    sum_block_density: dict[int, float]

    def __post_init__(self) -> None:
        _check(self)

    def sum_density(self, ranks: int) -> float:
        """The density of the sum of `ranks` ranks' gradients.

        In the variable u = -log(1 - density), the mean number of ranks that have an element if they
        choose independently, it is a power law between two measured points and, beyond the last
        one, that of the last two. So it is exact for independent uniform positions (u grows with
        the number of ranks) and for full overlap (u is constant). Never above 1.

        Args:
            ranks: at least 1.
        """
        points = {k: self.density * ratio for k, ratio in self.densification.items()}
        if ranks in points:
            return min(points[ranks], 1.0)
        if self.density == 0:
            return 0.0
        if any(k < ranks and density >= 1 for k, density in points.items()):
            return 1.0
        # An element that nobody has is taken for half of one: full density would be infinite.
        most = 1 - 0.5 / self.numel
        known = sorted(points)
        if len(known) == 1:
            return -math.expm1(ranks * math.log1p(-min(points[1], most)))
        right = min(max(bisect_left(known, ranks), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        u_low, u_high = (-math.log1p(-min(points[k], most)) for k in (low, high))
        slope = max(math.log(u_high / u_low) / math.log(high / low), 0.0)
        return -math.expm1(-u_low * (ranks / low) ** slope)

    @classmethod
    def uniform(cls, numel: int, density: float, world_size: int) -> Self:
        """Independent, uniform positions: what is believed before anything was measured.

        Args:
            numel: elements of the bucket.
            density: in [0, 1].
            world_size: ranks.
        """
        sums = {k: 1 - (1 - density) ** k for k in union_counts(world_size)}
        even = dict.fromkeys(partition_counts(numel, world_size), 1.0)
        ratio = {k: s / density if density else 1.0 for k, s in sums.items()}
        total = sums[world_size]
        # Of |A| = |B| = d N elements, d of A's are in B.
        overlap = (density,) * len(QUANTILES)
        return cls(
            numel,
            world_size,
            density,
            ratio,
            even,
            dict(even),
            overlap,
            {size: 1 - (1 - density) ** size for size in BLOCK_SIZES},
            {size: 1 - (1 - total) ** size for size in BLOCK_SIZES},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: {str(key): number for key, number in value.items()}
            if isinstance(value, dict)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in plain.items()
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` gave, also after a trip through JSON.

        Raises:
            ProfileError: a field is missing, unknown or of the wrong kind, or numbers contradict
                one another.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(plain, Mapping) or set(plain) != set(names):
            got = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise _wrong("the fields", ", ".join(names), got)
        values: dict[str, Any] = {}
        for name, value in plain.items():
            try:
                if name in ("numel", "world_size"):
                    values[name] = _whole(value)
                elif name == "density":
                    values[name] = _real(value)
                elif name == "overlap":
                    values[name] = tuple(map(_real, value))
                else:
                    values[name] = {int(key): _real(number) for key, number in value.items()}
            except (TypeError, ValueError, AttributeError) as error:
                raise _wrong(name, "numbers as to_dict writes them", error) from None
        return cls(**values)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _real(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _wrong(field: str, expected: object, got: object) -> ProfileError:
    return ProfileError(
        f"a sparsity profile is wrong in {field}",
        expected=expected,
        got=got,
        remedy="profile the model again",
    )


def _check(profile: SparsityProfile) -> None:
    """Refuses what no gradients could have; the comparisons are also false for NaN."""
    if not profile.numel >= 0:
        raise _wrong("numel", "at least 0", profile.numel)
    if not profile.world_size >= 1:
        raise _wrong("world_size", "at least 1", profile.world_size)
    if not 0 <= profile.density <= 1:
        raise _wrong("density", "0 to 1", profile.density)
    expected = {
        "densification": union_counts(profile.world_size),
        "skewness": partition_counts(profile.numel, profile.world_size),
        "sum_skewness": partition_counts(profile.numel, profile.world_size),
        "block_density": list(BLOCK_SIZES),
        "sum_block_density": list(BLOCK_SIZES),
    }
    for name, keys in expected.items():
        found = getattr(profile, name)
        # Rounding may take a ratio a hair below 1.
        low, high = (0.0, 1.0) if "block" in name else (1 - 1e-9, math.inf)
        if sorted(found) != keys:
            raise _wrong(name, f"values for {keys}", sorted(found))
        for key, value in found.items():
            if not (low <= value <= high and math.isfinite(value)):
                raise _wrong(f"{name}[{key}]", f"{low:g} to {high:g}", value)
    if len(profile.overlap) != len(QUANTILES) or not all(0 <= v <= 1 for v in profile.overlap):
        raise _wrong("overlap", f"{len(QUANTILES)} ratios from 0 to 1", profile.overlap)


def nonzero_elements(gradient: torch.Tensor) -> np.ndarray:
    """The elements that are not zero: int64, ascending, counted in row-major order.

    Args:
        gradient: dense, or torch's sparse COO (an embedding's rows too); on any device, which is
            waited for.
    """
    if gradient.is_sparse:
        whole = gradient.coalesce()
        indices_SK, values = whole.indices(), whole.values()
        row_K = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
        for extent, index_K in zip(whole.shape, indices_SK, strict=False):
            row_K = row_K * extent + index_K
        inner = math.prod(whole.shape[whole.sparse_dim() :])
        flat = values.reshape(values.shape[0], inner) if values.numel() else values.view(0, inner)
        entry_K, column_K = flat.nonzero(as_tuple=True)
        return (row_K[entry_K] * inner + column_K).cpu().numpy()
    return gradient.detach().flatten().nonzero().squeeze(1).cpu().numpy()


def union_of(elements: Sequence[np.ndarray], numel: int) -> np.ndarray:
    """What any of some ranks has: int64, ascending.

    Args:
        elements: of each rank, in [0, numel).
        numel: of the whole; a byte each is used.
    """
    held_N = np.zeros(numel, dtype=bool)
    for own_K in elements:
        held_N[own_K] = True
    return np.flatnonzero(held_N)


def profile_of(gradients: Sequence[torch.Tensor]) -> SparsityProfile:
    """The exact profile of all ranks' gradients of one bucket.

    Holds N / 4 bytes for each rank of the gradients' N elements, and 8 bytes for each non-zero
    element of one rank. Takes n log n passes over N / 8 bytes, and one for each pair of ranks up
    to `MOST_PAIRS`; of more pairs, as many are looked at.

    Args:
        gradients: one for each rank, all of one shape; dense or torch's sparse COO.

    Raises:
        ProfileError: no gradient, or different shapes.

    Example:
        >>> a, b = torch.tensor([1.0, 2, 0, 0]), torch.tensor([3.0, 0, 0, 0])
        >>> profile = profile_of([a, b])
        >>> profile.density, profile.densification[2], profile.overlap[2]
        (0.375, 1.3333333333333333, 1.0)
    """
    if not gradients or len({tuple(gradient.shape) for gradient in gradients}) > 1:
        raise ProfileError(
            "gradients cannot be profiled together",
            expected="one gradient for each rank, all of one shape",
            got=[tuple(gradient.shape) for gradient in gradients],
        )
    elements = [nonzero_elements(gradient) for gradient in gradients]
    return profile_of_elements(elements, math.prod(gradients[0].shape))


def profile_of_elements(elements: Sequence[np.ndarray], numel: int) -> SparsityProfile:
    """What `profile_of` gives, from each rank's non-zero elements.

    Args:
        elements: of each rank, at least one: int64, ascending, in [0, numel).
        numel: of the whole gradient.
    """
    n = len(elements)
    shapes = [_Shape.of(own_K, numel, n) for own_K in elements]
    words_nW = np.stack([shape.words_W for shape in shapes])
    nnz = sum(shape.nnz for shape in shapes)
    nnz_of_sum = {k: sum(map(size_of, sets)) / len(sets) for k, sets in unions(words_nW)}
    of_sum = _Shape.of(union_of(elements, numel), numel, n)
    cuts, mean_nnz = partition_counts(numel, n), nnz / n
    return SparsityProfile(
        numel=numel,
        world_size=n,
        density=mean_nnz / numel if numel else 0.0,
        densification={k: size / mean_nnz if nnz else 1.0 for k, size in nnz_of_sum.items()},
        skewness={p: sum(shape.skewness[p] for shape in shapes) / n for p in cuts},
        sum_skewness=of_sum.skewness,
        overlap=quantiles(overlap_ratios(words_nW, MOST_PAIRS)),
        block_density={b: sum(shape.blocks[b] for shape in shapes) / n for b in BLOCK_SIZES},
        sum_block_density=of_sum.blocks,
    )


@dataclass(frozen=True)
class _Shape:
    """One gradient's non-zero elements, and how they are spread over partitions and blocks."""

    words_W: np.ndarray
    nnz: int
    skewness: dict[int, float]
    blocks: dict[int, float]

    @classmethod
    def of(cls, elements_K: np.ndarray, numel: int, n: int) -> Self:
        counts = {
            p: counts_between(elements_K, even_cuts(numel, p)) for p in partition_counts(numel, n)
        }
        return cls(
            words_W=pack(elements_K, numel),
            nnz=elements_K.size,
            skewness={p: skewness_ratio(found, numel) for p, found in counts.items()},
            blocks={size: block_fraction(elements_K, numel, size) for size in BLOCK_SIZES},
        )


def counts_between(elements_K: np.ndarray, cuts: Sequence[int]) -> list[int]:
    """How many of some ascending elements lie between each cut and the next."""
    return np.diff(np.searchsorted(elements_K, cuts)).tolist()


def skewness_ratio(counts: Sequence[float], numel: int) -> float:
    """The densest partition's density over the whole's (definition 5); 1 without any element.

    Args:
        counts: non-zero elements of each of the even partitions.
        numel: elements of them all.
    """
    total = sum(counts)
    if not total:
        return 1.0
    cuts = pairwise(even_cuts(numel, len(counts)))
    densest = max(count / (stop - start) for count, (start, stop) in zip(counts, cuts, strict=True))
    return densest / (total / numel)


def block_fraction(elements_K: np.ndarray, numel: int, size: int) -> float:
    """The fraction of blocks of `size` elements that hold one of some ascending elements."""
    blocks = -(-numel // size)
    if not elements_K.size:
        return 0.0
    return (1 + int(np.count_nonzero(np.diff(elements_K // size)))) / blocks
