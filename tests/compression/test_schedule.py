"""Warm-up, ramp, target."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.sparse import CompressionConfig


def _config(**overrides):
    values = {"density": 0.01, "warmup_iters": 3, "ramp_iters": 4, "ramp_start_density": 0.25}
    return CompressionConfig(**(values | overrides))


def test_phases_follow_each_other():
    phases = [phase_and_density(_config(), step)[0] for step in range(9)]
    assert phases == [Phase.WARMUP] * 3 + [Phase.RAMP] * 4 + [Phase.TARGET] * 2


def test_exponential_ramp_has_equal_factors_and_lands_on_the_target():
    densities = [phase_and_density(_config(), step)[1] for step in range(3, 8)]
    factors = [b / a for a, b in itertools.pairwise(densities)]
    assert densities[0] == 0.25
    assert densities[-1] == 0.01
    # Equal up to the rounding of pow and division in float64.
    assert all(math.isclose(f, factors[0], rel_tol=1e-12) for f in factors)


def test_staircase_is_the_warm_up_of_deep_gradient_compression():
    """25, 6.25, 1.5625 and 0.4 % for an epoch each, then 0.1 % (its section 3.3)."""
    config = _config(density=0.001, warmup_iters=0, ramp_iters=8, ramp_shape="staircase")
    densities = [phase_and_density(config, step)[1] for step in range(10)]
    stairs = [0.25, 0.0625, 0.015625, 0.00390625]
    assert densities == [stair for stair in stairs for _ in range(2)] + [0.001] * 2


@pytest.mark.parametrize(
    ("start", "density", "stairs"),
    [(0.25, 0.0625, [0.25]), (0.16, 0.01, [0.16, 0.04]), (0.01, 0.01, [0.01]), (1, 0.9, [1])],
)
def test_a_stair_lies_above_the_target(start, density, stairs):
    config = _config(
        density=density,
        warmup_iters=0,
        ramp_iters=6,
        ramp_start_density=start,
        ramp_shape="staircase",
    )
    densities = [phase_and_density(config, step)[1] for step in range(7)]
    assert list(dict.fromkeys(densities[:6])) == stairs
    assert densities[6] == density


def test_linear_ramp_has_equal_differences():
    densities = [phase_and_density(_config(ramp_shape="linear"), s)[1] for s in range(3, 8)]
    differences = [b - a for a, b in itertools.pairwise(densities)]
    assert all(math.isclose(d, -0.06, rel_tol=1e-12) for d in differences)


def test_a_ramp_never_starts_below_the_target():
    config = _config(density=0.5)
    assert phase_and_density(config, 3) == (Phase.RAMP, 0.5)


@pytest.mark.parametrize("step", [0, 3, 100])
def test_disabled_is_off_at_every_step(step):
    assert phase_and_density(_config(enabled=False), step) == (Phase.OFF, 1.0)


def test_without_warmup_and_ramp_the_first_step_is_at_the_target():
    config = _config(warmup_iters=0, ramp_iters=0)
    assert phase_and_density(config, 0) == (Phase.TARGET, 0.01)
