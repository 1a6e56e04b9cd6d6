"""Which parameters stay dense; keys of draws."""

from __future__ import annotations

import pytest

from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.selection import draw_key
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError


@pytest.fixture
def keep():
    return ParameterFilter(
        CompressionConfig(keep_below_numel=100, keep_patterns=["router", r"^embedding\."])
    )


@pytest.mark.parametrize(
    ("name", "shape", "replicated", "expected"),
    [
        ("layers.0.fc1.weight", (64, 64), False, False),
        ("layers.0.fc1.weight", (64, 64), True, True),
        ("layers.0.fc1.bias", (4096,), False, True),
        ("layers.0.norm.weight", (4096,), False, True),
        ("layers.0.tiny.weight", (9, 11), False, True),
        ("layers.0.edge.weight", (10, 10), False, False),
        ("layers.0.mlp.router.weight", (64, 64), False, True),
        ("embedding.word.weight", (64, 64), False, True),
        ("output.embedding.weight", (64, 64), False, False),
    ],
)
def test_filter(keep, name, shape, replicated, expected):
    assert keep.slice_of(name, 0, 1, shape, replicated).keep is expected


def test_a_bad_pattern_is_a_config_error():
    with pytest.raises(ConfigError, match="regular expression"):
        ParameterFilter(CompressionConfig(keep_patterns=["("]))


def test_keys_depend_on_everything_and_on_nothing_else():
    keys = {
        draw_key(seed, step, kind, name)
        for seed in (0, 1)
        for step in (0, 1)
        for kind in ("sample", "round")
        for name in ("a", "b")
    }
    assert len(keys) == 16
    assert all(0 <= key < 2**63 for key in keys)
    # A fixed value: another one would make resumed runs draw other samples.
    assert draw_key(1234, 7, "sample", "w") == 7764680529657946306


def test_names_are_not_run_together():
    assert draw_key(1, 2, "ab", "c") != draw_key(1, 2, "a", "bc")
