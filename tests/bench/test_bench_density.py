"""`bench density`: the sent density is the one asked for, whatever the gradient looks like."""

from __future__ import annotations

import pytest

from megatron_sparse.bench.codec.density import DensityRow, measure, run
from megatron_sparse.bench.codec.gradients import DISTRIBUTIONS
from megatron_sparse.bench.codec.options import DensitySweep
from megatron_sparse.errors import ConfigError
from tests.bench.running import read_rows

TIED = ("constant", "outlier", "two_levels_0.02", "integers")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution_is_sent_at_the_density_asked_for(name):
    """20 steps of 100,000 elements: mean within 10 %, each step within 3 standard errors."""
    sweep = DensitySweep()
    rows = [measure(sweep, name, density) for density in sweep.densities]
    assert not [row for row in rows if row.bad]


def test_ties_are_right_with_one_threshold_a_bucket():
    sweep = DensitySweep(threshold_scope="bucket")
    rows = [measure(sweep, name, 0.01) for name in TIED]
    assert not [row for row in rows if row.bad]


@pytest.mark.parametrize("change", [{"mean": 1.11}, {"fed_mean": 0.89}, {"worst": 3.1}])
def test_a_missed_target_is_seen(change):
    good = {"mean": 0.91, "worst": 2.9, "fed_mean": 1.09, "fed_worst": 2.9}
    assert not DensityRow("constant", 0.01, **good).bad
    assert DensityRow("constant", 0.01, **good | change).bad


def test_the_table(tmp_path, capsys):
    sweep = DensitySweep(distributions=("constant",), densities=(0.25,), elements=999, steps=2)
    (row,) = run(sweep, tmp_path / "rows.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert '"samples": null, "elements": 999, "steps": 2' in printed[2]
    assert printed[4].split()[:2] == ["constant", "0.25"]
    assert read_rows(tmp_path / "rows.jsonl") == [row.to_dict()]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"distributions": ("cauchy",)}, "distribution is out of range"),
        ({"threshold_scope": "row"}, "compression.threshold_scope"),
    ],
)
def test_mistakes_are_one_error(options, word):
    with pytest.raises(ConfigError, match=word):
        run(DensitySweep(**options))
