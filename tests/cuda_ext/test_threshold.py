"""Sampled thresholds: the compiled op equals the oracle bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.errors import ExtensionError
from tests.codec import on_threads
from tests.cuda_ext import cases
from tests.cuda_ext.threshold_cases import DENSITIES, KEYS, assert_same_limits, seven_ranges
from tests.oracles import threshold as oracle


def check(grad, residual, offsets, densities, samples, keys, what=""):
    arguments = (grad, residual, offsets, densities, samples, keys)
    expected = oracle.sample_threshold(*arguments)
    assert_same_limits(ops.sample_threshold(*arguments), expected, what)
    return expected


def single(values, density, samples=1000, key=0):
    grad = torch.as_tensor(values, dtype=torch.float32)
    offsets = torch.tensor([0, grad.numel()])
    limits = check(grad, None, offsets, torch.tensor([density]), samples, torch.tensor([key]))
    return tuple(map(float, limits))


@pytest.mark.parametrize("residual_dtype", [None, *cases.DTYPES])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equals_the_oracle(dtype, residual_dtype):
    for numel in (0, 1, 16, 701, 4097):
        for kind in cases.kinds(numel):
            inputs = seven_ranges(kind, numel, dtype, residual_dtype)
            for samples in (1, 700):
                check(*inputs, DENSITIES, samples, KEYS, f"{kind} {numel} {samples}")


def test_independent_of_the_thread_count():
    grad, numel = cases.make("spread", cases.SIZES[-1], torch.float32), cases.SIZES[-1]
    offsets = cases.cut(numel, 9)
    arguments = (grad, None, offsets, torch.full((9,), 0.02), 2000, torch.arange(9))
    results = []
    for threads in (1, 2):
        with on_threads(threads):
            results.append(ops.sample_threshold(*arguments))
    assert_same_limits(*results, "threads")


def test_rank_of_the_threshold():
    values = torch.arange(1.0, 101.0)
    threshold, chance, ties = single(values, 0.125)
    assert (threshold, ties) == (88.0, 1)  # twelve are strictly greater, and half a one more
    assert chance in (0, 1)
    assert single(values, 0.999)[0] == 1.0
    assert single(values, 2**-10)[::2] == (100.0, 1)
    assert single(values, 1.0) == (-1.0, 0.0, 0)
    assert single([], 0.5) == (-1.0, 0.0, 0)


def test_ties_have_the_chance_that_sends_the_density():
    assert single([2.0, -2.0, 2.0, 2.0], 0.25) == (2.0, 0.25, 4)
    assert single([2.0, 2.0, 1.0, 1.0], 0.25) == (2.0, 0.5, 2)  # a tie at the top
    assert single([2.0, 1.0, 1.0, 1.0], 0.5) == (1.0, torch.tensor(1 / 3).item(), 3)
    assert single([0.0, -0.0, 0.0], 0.5) == (0.0, 0.0, 3)  # zeros are never sent
    assert single([0.0, 0.0, 1e-45, 0.0], 0.5) == (0.0, 0.0, 3)


def test_a_single_tie_is_drawn_by_its_ranges_key():
    """Each key decides for its range, whatever the place in the bucket; half of these do."""
    values, keys = torch.arange(1.0, 101.0), torch.arange(1000)
    densities = torch.full((1000,), 0.125)
    offsets = torch.arange(0, 100_001, 100)
    found = ops.sample_threshold(values.repeat(1000), None, offsets, densities, 100, keys)
    assert set(found.tie_chances.tolist()) == {0, 1}
    assert found.tie_chances.mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(1000))
    alone = [
        ops.sample_threshold(
            values, None, torch.tensor([0, 100]), densities[:1], 100, key[None]
        ).tie_chances
        for key in keys[:50]
    ]
    assert torch.equal(torch.cat(alone), found.tie_chances[:50])


def test_nan_and_infinity_are_the_largest():
    assert single([math.nan, 1.0, 2.0, 3.0], 0.25) == (3.0, 0.0, 1)
    # More than are wanted: only they are kept, for prune_ never drops them.
    assert single([math.nan, math.inf, math.nan, 3.0], 0.25) == (math.inf, 0.0, 3)


def test_the_kept_fraction_is_near_the_density():
    density, samples, numel = 0.05, 4000, 400_000
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, numel])
    threshold, *_ = ops.sample_threshold(
        grad, None, offsets, torch.tensor([density]), samples, torch.tensor([3])
    )
    kept = float((grad.abs() > threshold).float().mean())
    # The relative error's standard deviation is sqrt((1 - p) / (p samples)); five are allowed.
    assert abs(kept / density - 1) < 5 * math.sqrt((1 - density) / (density * samples))


@given(st.integers(1, 2**40), st.integers(1, 50), st.integers(0, 2**63 - 1))
@settings(max_examples=200)
def test_positions_ascend_inside_of_the_range(numel, samples, key):
    expected = oracle.sample_positions(numel, samples, key)
    assert all(0 <= p < numel for p in expected)
    assert expected == sorted(set(expected))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"samples": 0}, "samples is out of range"),
        ({"densities": torch.tensor([0.0])}, "a density is out of range"),
        ({"densities": torch.tensor([0.5, 0.5])}, "densities has the wrong length"),
        ({"keys": torch.tensor([1], dtype=torch.int32)}, "keys has the wrong dtype"),
        ({"offsets": torch.tensor([0, 4])}, "range_offsets does not cut"),
        ({"residual": torch.zeros(4)}, "residual has the wrong length"),
    ],
)
def test_refuses(change, problem):
    call = {
        "grad": torch.zeros(5),
        "residual": None,
        "offsets": torch.tensor([0, 5]),
        "densities": torch.tensor([0.5]),
        "samples": 10,
        "keys": torch.tensor([1]),
    } | change
    with pytest.raises(ExtensionError, match=problem):
        ops.sample_threshold(*call.values())
