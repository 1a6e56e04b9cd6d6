"""Warm-up, ramp, target."""

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


def test_a_ramp_never_starts_below_the_target():
    config = _config(density=0.5)
    assert phase_and_density(config, 3) == (Phase.RAMP, 0.5)


@pytest.mark.parametrize("step", [0, 3, 100])
def test_disabled_is_off_at_every_step(step):
    assert phase_and_density(_config(enabled=False), step) == (Phase.OFF, 1.0)


def test_without_warmup_and_ramp_the_first_step_is_at_the_target():
    config = _config(warmup_iters=0, ramp_iters=0)
    assert phase_and_density(config, 0) == (Phase.TARGET, 0.01)
