"""The predicted time of each candidate for one bucket, and the comparison of the candidates.

Pure functions of a bucket's shape, its profile and the cluster: the planner in training, the
command `plan` and the bench of the planner all use them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_sparse.collectives import SCHEMES, Scheme, registry
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.planner.costs import predict_all
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape

DENSE = "dense"
"""The backend's own collective; the planner must not choose a slower scheme."""


def candidates(schemes: Collection[str] | None, value_bits: int | None) -> list[str]:
    """The schemes to choose from, in the order of the registry; always includes `dense`.

    Args:
        schemes: as `planner.schemes`; None takes all schemes.
        value_bits: as `compression.value_bits`; None: values are rounded by no scheme that
            `schemes` does not name.
    """
    if schemes is None:
        rounds = value_bits is not None
        return [name for name in registry.candidates() if rounds or not SCHEMES[name].sends_whole]
    return [name for name in registry.candidates() if name in {*schemes, DENSE}]


def runnable(names: Collection[str], options: SchemeConfig, device: str) -> list[str]:
    """The schemes of `names` that run without waits that no price includes.

    Args:
        names: of the schemes.
        options: of the schemes.
        device: `cpu` or `cuda`.
    """

    def waits(scheme: Scheme) -> bool:
        return scheme.waits_on_cuda or (scheme.takes_inner and waits(SCHEMES[options.inner]))

    return [name for name in names if device != "cuda" or not waits(SCHEMES[name])]


def prices_us(
    shape: BucketShape,
    profile: SparsityProfile,
    *,
    cluster: ClusterModel,
    options: SchemeConfig,
    names: Collection[str],
) -> dict[str, float]:
    """Predicted microseconds of the schemes in `names` that fit the operation and `options`.

    Raises:
        ConfigError: the cluster file lacks a rate.
    """
    found = predict_all(shape, profile, cluster, options, names)
    return {name: time_s * 1e6 for name, time_s in found.items()}


def takes_dense(scheme: str) -> bool:
    """Whether a scheme sends all elements: it has no use for a sample of the sparsity."""
    return SCHEMES[scheme].takes_all


def least(prices: dict[str, float], names: Collection[str]) -> str:
    """The name with the lowest price; among equals the first."""
    return min(names, key=lambda name: prices[name])


def prior(shape: BucketShape, density: float) -> SparsityProfile:
    """The profile assumed until a bucket is sampled: independent, uniform positions."""
    return SparsityProfile.uniform(shape.pruned_numel or shape.numel, density, shape.world_size)


def fully_overlapping(profile: SparsityProfile) -> SparsityProfile:
    """The profile if all ranks had selected the same elements: the best case."""
    return replace(
        profile,
        densification=dict.fromkeys(profile.densification, 1.0),
        overlap=(1.0,) * len(profile.overlap),
        sum_skewness=dict(profile.skewness),
        sum_block_density=dict(profile.block_density),
    )


def alike(first: SparsityProfile, second: SparsityProfile, tolerance: float) -> bool:
    """Whether the numbers that determine costs differ by at most the fraction `tolerance`."""

    def costs(profile: SparsityProfile) -> list[float]:
        n = profile.world_size
        ratios = [*profile.skewness.values(), *profile.sum_skewness.values()]
        blocks = [*profile.block_density.values(), *profile.sum_block_density.values()]
        return [profile.density, profile.sum_density(n), *ratios, *blocks]

    if (first.numel, first.world_size) != (second.numel, second.world_size):
        return False
    pairs = zip(costs(first), costs(second), strict=True)
    return all(abs(a - b) <= tolerance * max(a, b) for a, b in pairs)


def explain(chosen: str, prices: dict[str, float], basis: str) -> str:
    """The reason in words: the times of the chosen scheme, of dense and of the next best scheme."""
    told = [f"{chosen} {prices[chosen]:.0f} us"]
    others = [name for name in prices if name not in (chosen, DENSE)]
    if chosen != DENSE:
        told.append(f"dense {prices[DENSE]:.0f} us")
    if others:
        next_best = least(prices, others)
        told.append(f"{next_best} {prices[next_best]:.0f} us")
    return f"{', '.join(told)} ({basis})"
