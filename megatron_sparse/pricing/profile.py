"""The sparsity of one bucket's gradients in numbers, on which costs depend beside its size.

ZEN's characteristics (section 2.1): density (definition 2), overlap of two ranks (definition 3),
densification of sums (definition 4), skewness over even, contiguous partitions (definition 5); and
the fractions of blocks that hold a non-zero element. `sparsity` measures them.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from megatron_sparse.config.scheme import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from megatron_sparse.errors import ProfileError

MOST_PARTITIONS = 128
"""As in ZEN's figure 3; more where there are more ranks."""
BLOCK_SIZES = tuple(
    2**e for e in range(MIN_BLOCK_SIZE.bit_length() - 1, MAX_BLOCK_SIZE.bit_length())
)
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def union_counts(n: int) -> list[int]:
    """The numbers of ranks for which unions are measured: 1, 2, 4, ... and n.

    Example:
        >>> union_counts(6)
        [1, 2, 4, 6]
    """
    return [2**power for power in range(n.bit_length()) if 2**power < n] + [n]


def partition_counts(numel: int, world_size: int) -> list[int]:
    """Into how many partitions to cut a gradient: 2, 4, ..., 128 and `world_size`, if <= `numel`.

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
    """Measured sparsity of one bucket's gradients, the same on all ranks.

    If all elements are zero, ratios are 1 and overlaps are 0.

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
        """The density of the sum of the gradients of `ranks` ranks, at least one.

        A sum's density gives u = -log(1 - density), which adds up over ranks that choose their
        elements independently. Between two measured numbers of ranks, u follows a power law in
        that number; beyond the last one, the law of the last two. So it is exact for independent
        uniform positions (u grows with the ranks) and full overlap (u is constant). Never above 1.
        """
        points = {k: self.density * ratio for k, ratio in self.densification.items()}
        if ranks in points:
            return min(points[ranks], 1.0)
        if self.density == 0:
            return 0.0
        if any(k < ranks and density >= 1 for k, density in points.items()):
            return 1.0  # fewer ranks already have every element
        # Densities are limited to half an element below 1, because u would be infinite at 1.
        most = 1 - 0.5 / max(self.numel, 1)
        known = sorted(points)
        if len(known) == 1:  # only one rank was measured: ranks count as independent
            return -math.expm1(ranks * math.log1p(-min(points[1], most)))
        # The two measured points around `ranks`, or the last two.
        right = min(max(bisect_left(known, ranks), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        u_low, u_high = (-math.log1p(-min(points[k], most)) for k in (low, high))
        exponent = max(math.log(u_high / u_low) / math.log(high / low), 0.0)
        return -math.expm1(-u_low * (ranks / low) ** exponent)

    @classmethod
    def uniform(cls, numel: int, density: float, world_size: int) -> Self:
        """The profile of independent, uniform positions, assumed before the first measurement.

        `numel` elements on each of `world_size` ranks have the `density`, in [0, 1].
        """
        # Densities of the sums of k ranks.
        sums = {k: _any_of(density, k) for k in union_counts(world_size)}
        sum_of_all = sums[world_size]
        partitions = partition_counts(numel, world_size)
        return cls(
            numel,
            world_size,
            density,
            densification={k: union / density if density else 1.0 for k, union in sums.items()},
            skewness=dict.fromkeys(partitions, 1.0),
            sum_skewness=dict.fromkeys(partitions, 1.0),
            # Of one rank's elements, another rank has also selected this fraction.
            overlap=(density,) * len(QUANTILES),
            block_density={size: _any_of(density, size) for size in BLOCK_SIZES},
            sum_block_density={size: _any_of(sum_of_all, size) for size in BLOCK_SIZES},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return json.loads(json.dumps(vars(self)))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Reads the result of `to_dict`, also after a trip through JSON.

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


def _any_of(density: float, count: int) -> float:
    """1 - (1 - density)^count, without the rounding that takes it below a tiny `density`."""
    return -math.expm1(count * math.log1p(-density)) if density < 1 else 1.0


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
    """Refuses numbers that no gradients have, and NaN, for which every comparison is false."""
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
    are_ratios = all(0 <= overlap <= 1 for overlap in profile.overlap)
    if len(profile.overlap) != len(QUANTILES) or not are_ratios:
        raise _wrong("overlap", f"{len(QUANTILES)} ratios from 0 to 1", profile.overlap)
