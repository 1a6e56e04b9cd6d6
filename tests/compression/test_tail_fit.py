"""SIDCo's fitted thresholds: the oracle, and how far off the kept count is on known tails."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_sparse.compression.tail_fit import fit_limits, fit_thresholds, stages_of
from megatron_sparse.reference.tail_fit import fit_limit, fit_threshold

SAMPLES = 40_000


def _awkward_rows():
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randn(700, generator=draw).abs(), torch.rand(300, generator=draw)]
    rows += [torch.rand(500, generator=draw).log().neg() * 1e-20, torch.rand(40, generator=draw)]
    rows.append(torch.where(torch.rand(600, generator=draw) < 0.9, 0.0, 3.0))  # mostly zeros
    rows.append(torch.cat([torch.rand(90, generator=draw), torch.tensor([math.inf, math.nan])]))
    rows += [torch.full((200,), 7.0), torch.zeros(100), torch.tensor([2.0]), torch.tensor([0.0])]
    rows.append(torch.randn(900, generator=draw).exp() * 1e20)
    return rows


@pytest.mark.parametrize("density", [0.3, 0.05, 0.001])
def test_padded_rows_have_the_oracles_thresholds(density):
    rows = _awkward_rows()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    got = fit_thresholds(padded, density)
    stages = stages_of(density)
    expected = [fit_threshold(row.tolist(), density, stages) for row in rows]
    # Both in fp64, added up in another order; the variance cancels, which costs some digits more.
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("density", [0.3, 0.05, 0.001])
def test_padded_rows_have_the_oracles_limits(density):
    """Rows whose samples tie, or of whose shape the fit knows nothing, have their quantile."""
    draw = torch.Generator().manual_seed(4)
    rows = _awkward_rows()
    rows += [torch.randint(0, 9, (800,), generator=draw).float(), torch.full((90,), 1e-40)]
    rows.append(torch.where(torch.rand(900, generator=draw) < 0.02, 3.0, 0.1))
    rows.append(torch.randn(1000, generator=draw).abs())
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    got = fit_limits(padded, density)
    expected = [fit_limit(row.tolist(), density, stages_of(density)) for row in rows]
    for found, wanted in zip(got, zip(*expected, strict=True), strict=False):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=0)
    assert float(got.tie_chances[-4]) > 0, "integers tie"
    assert float(got.tie_chances[-1]) == 0, "normal values are fitted"


def test_something_is_sent_of_every_row_that_is_not_zero():
    rows = _awkward_rows()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    for row, threshold in zip(rows, fit_thresholds(padded, 0.001), strict=True):
        assert threshold.isfinite()
        if row.nan_to_num(posinf=0.0).any():
            assert (row > threshold).any(), "equal magnitudes would never be sent"
        else:
            assert threshold <= 0


def test_stages_divide_the_reduction_in_density():
    assert [stages_of(d) for d in (0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 1e-4)] == [
        1,
        1,
        1,
        2,
        2,
        3,
        4,
    ]


def _tails():
    """Inverse survival functions at u in (0, 1), or samplers, by name."""
    u = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    gamma = torch.distributions.Gamma(torch.tensor(0.5, dtype=torch.float64), 1.0)
    torch.manual_seed(5)
    return {
        "exponential": -u.log(),
        "laplace": torch.distributions.Laplace(0.0, 1.0).icdf(u).abs(),
        "normal": torch.special.ndtri(u).abs(),
        "gamma": gamma.sample((400_000,)),
        "pareto": (u**-0.2 - 1) / 0.2,
    }


# The largest error of the mean kept count over its target, in parts: the effect of the shape. Added
# are two standard deviations of the mean over 10 samples; at 1 % 400 of 40,000 are kept: 2 * 0.05 /
# sqrt(10).
BIAS = {"exponential": 0.02, "laplace": 0.02, "normal": 0.04, "gamma": 0.06, "pareto": 0.04}


def test_the_kept_counts_error_on_known_tails():
    """At density 1 %: bias as stated, and a spread no larger than that of a sample's quantile."""
    density, repeats = 0.01, 10
    for name, everything in _tails().items():
        everything = everything.float()
        draw = torch.Generator().manual_seed(1)
        picks = torch.randint(everything.numel(), (repeats, SAMPLES), generator=draw)
        thresholds = fit_thresholds(everything[picks], density)
        kept = torch.stack([(everything > t).double().mean() / density for t in thresholds])
        allowed = BIAS[name] + 2 * 0.05 / math.sqrt(repeats)
        assert abs(float(kept.mean()) - 1) < allowed, (name, kept)
        # A quantile's is sqrt(0.99 / (0.01 * 40000)) = 5 %; that of a standard deviation taken from
        # ten numbers is a quarter of it, and three of those are allowed.
        assert float(kept.std()) < 0.05 * 1.75, (name, kept)


def test_every_stage_is_needed_where_the_tail_is_not_the_fitted_one():
    """One fit for a normal tail down to 0.1 % keeps several times too many."""
    everything = _tails()["normal"].float()
    alone = fit_threshold(everything[::10].tolist(), 0.001, 1)
    staged = float(fit_thresholds(everything[None], 0.001))
    assert float((everything > alone).double().mean()) > 0.004
    assert float((everything > staged).double().mean()) == pytest.approx(0.001, rel=0.05)
