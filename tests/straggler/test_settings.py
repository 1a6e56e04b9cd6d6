"""The section `straggler:`, and its consistency with the scheme."""

from __future__ import annotations

import pytest

from megatron_sparse.collectives import check
from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.run.composition import compose

TIMED = {"deterministic": False}


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "sometimes"},
        {"mode": "pinned"},
        {"mode": "dynamic", "rank": 1},
        {"mode": "pinned", "rank": -1},
        {"mode": "persistent", "min_delay_ms": -1.0},
    ],
)
def test_wrong_values_are_one_error_that_names_the_key(values):
    with pytest.raises(ConfigError, match=r"straggler\."):
        StragglerConfig(**values)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"scheme": "straggler"}, "needs a straggler"),
        (
            {"scheme": "straggler_direct", "straggler": StragglerConfig("observe")},
            "needs a straggler",
        ),
        ({"scheme": "direct", "straggler": StragglerConfig("pinned", 0)}, "waits for every rank"),
        ({"straggler": StragglerConfig("persistent")}, "decides from timing"),
        ({"scheme": "straggler", "straggler": StragglerConfig("dynamic")}, "decides from timing"),
    ],
)
def test_sections_that_contradict_one_another_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(SparseConfig.from_overrides(**overrides))


@pytest.mark.parametrize("mode", ["persistent", "dynamic"])
def test_timing_decides_if_allowed(mode):
    config = SparseConfig.from_overrides(straggler=StragglerConfig(mode), **TIMED)
    assert config.straggler.mode == mode


def test_ranks_are_those_of_the_data_parallel_group():
    with pytest.raises(ConfigError, match=r"straggler\.rank is out of range"):
        compose(["scheme=straggler", "straggler.mode=pinned", "straggler.rank=2"])
    found = compose(["scheme=straggler", "straggler.mode=pinned", "straggler.rank=1"])
    assert found.sparse.straggler.rank == 1
