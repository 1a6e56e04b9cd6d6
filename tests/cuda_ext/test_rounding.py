"""Stochastic rounding: its error bound, its mean, and the independence of its random bits."""

import math

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.triton_kernels.counter_hash import DRAW_RESIDUAL, DRAW_VALUE, counter_hash
from tests.codec import pruning_of
from tests.cuda_ext import cases

# Mantissa bits after the first, and the smallest step.
FORMATS = {1: (7, -133), 2: (10, -24)}
FORMAT_NAMES = {1: "bf16", 2: "fp16"}


def narrow(x, wire, key, residual_dtype=torch.float32):
    grad, residual = x.clone(), torch.zeros(len(x), dtype=residual_dtype)
    ops.prune_(grad, pruning_of(residual, -1.0, key=key), wire)
    return grad, residual


@pytest.mark.parametrize("wire", [1, 2], ids=FORMAT_NAMES.get)
@pytest.mark.parametrize("key", [3, -1], ids=["stochastic", "nearest"])
def test_the_error_is_less_than_a_step_and_goes_to_the_residual(wire, key):
    x = cases.make("spread", 50_000, torch.float32, seed=1)
    x = x[x.abs() < 65000]  # saturation has a test of its own
    out, residual = narrow(x, wire, key)
    mantissa, least = FORMATS[wire]
    exponent = torch.frexp(x.double()).exponent.double() - 1
    step = torch.exp2((exponent - mantissa).clamp(min=least))
    error = (out.double() - x.double()).abs()
    # Less than one step of the narrow type at x; half of one, inclusively, for nearest.
    assert bool((error < step).all() if key >= 0 else (error <= step / 2).all())
    assert error.max() > 0
    dtype = cases.DTYPES[wire]
    cases.assert_same_bits(out, out.to(dtype).float(), "representable")
    # Where a tiny value was rounded up to the smallest step, the remainder is longer than fp32's
    # mantissa and is itself rounded, to half a unit of its last place.
    lost = (out.double() + residual.double() - x.double()).abs()
    assert bool((lost <= error * 2**-24).all())
    if key < 0:
        assert torch.equal(out, x.to(dtype).float())


@pytest.mark.parametrize("wire", [1, 2], ids=FORMAT_NAMES.get)
@pytest.mark.parametrize("value", [1.003, -0.3333, 1.7e-7, 3e-5, 700.1])
def test_the_mean_is_unbiased(wire, value):
    n = 200_000
    x = torch.full((n,), value)
    out, _ = narrow(x, wire, key=11)
    low, high = float(out.min()), float(out.max())
    assert low < high
    chance = (float(x[0]) - low) / (high - low)
    # Five standard deviations of a binomial mean: one such test in 1.7 million fails by chance,
    # and the key is fixed.
    bound = 5 * math.sqrt(chance * (1 - chance) / n) * (high - low)
    assert abs(float(out.double().mean()) - float(x[0])) <= bound


def test_a_bf16_residual_is_unbiased_and_independent_of_the_value_rounding():
    n = 200_000
    x = torch.full((n,), 1.0 + 2**-8 + 2**-17 + 2**-20)
    out, residual = narrow(x, wire=1, key=5, residual_dtype=torch.bfloat16)
    error = out.double() + residual.double() - x.double()
    # The remainder is at most 2^-7, whose bf16 step is 2^-14: one rounding's standard deviation is
    # at most half a step. Five of the mean's are allowed.
    assert abs(float(error.mean())) <= 5 * 0.5 * 2**-14 / math.sqrt(n)
    assert float(error.abs().max()) < 2**-14


def test_draws_and_keys_are_uncorrelated():
    n = 100_000
    index = torch.arange(n)
    uniform = [
        counter_hash(key, draw, index).double() / 2**32 - 0.5
        for key, draw in ((1, DRAW_VALUE), (1, DRAW_RESIDUAL), (2, DRAW_VALUE), (2**40, DRAW_VALUE))
    ]
    # Correlations of independent uniform numbers have standard deviation 1 / sqrt(n).
    for i, a in enumerate(uniform):
        for b in [*uniform[:i], a.roll(1)]:
            assert abs(float((a * b).mean()) * 12) < 5 / math.sqrt(n)


def test_the_upper_half_of_the_index_changes_the_bits():
    index = torch.arange(1000)
    assert float((counter_hash(1, 0, index) == counter_hash(1, 0, index + 2**32)).sum()) == 0


@pytest.mark.parametrize(
    ("dtype", "wire", "limit"),
    [
        (torch.float32, 1, torch.finfo(torch.bfloat16).max),
        (torch.float32, 2, 65504.0),
        (torch.bfloat16, 2, 65280.0),  # the largest value of both
    ],
)
def test_finite_values_saturate(dtype, wire, limit):
    grad = torch.tensor([cases.FLT_MAX, -cases.FLT_MAX, math.inf, -math.inf]).to(dtype)
    grad[:2] = torch.tensor([1, -1]) * torch.finfo(dtype).max
    residual = torch.zeros(4)
    expected = grad.float().tolist()
    ops.prune_(grad, pruning_of(residual, -1.0, key=9), wire)
    assert grad.tolist() == [limit, -limit, math.inf, -math.inf]
    assert residual.tolist() == [expected[0] - limit, expected[1] + limit, 0, 0]
