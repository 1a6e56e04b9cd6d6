"""Which parameters stay dense or lossless; keys of draws."""

import pytest

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.selection import draw_key
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError

KEEP = CompressionConfig(keep_below_numel=100, keep_patterns=["router", r"^embedding\."])


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
def test_filter(name, shape, replicated, expected):
    assert ParameterFilter(KEEP).slice_of(name, 0, 1, shape, replicated).keep is expected


def test_the_filter_takes_the_name_whatever_the_size():
    chosen = ParameterFilter(
        CompressionConfig(keep_patterns=["router"], lossless_patterns=["word_", r"^bias$"])
    )
    assert chosen.slice_of("word_embeddings.weight", 3, 9, (2, 3), True) == ParameterSlice(
        "word_embeddings.weight", 3, 9, lossless=True
    )
    assert chosen.slice_of("bias", 0, 7, (7,), False).lossless
    assert chosen.slice_of("mlp.router", 0, 8192, (2, 4096), False).keep
    assert chosen.slice_of("mlp.weight", 0, 8192, (2, 4096), False).pruned
    assert chosen.slice_of("router.word_embeddings", 0, 6, (2, 3), False).lossless


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lossless_patterns": ["("]}, "compression.lossless_patterns is not a regular expression"),
        ({"lossless_patterns": "word_embeddings"}, "compression.lossless_patterns is not a list"),
    ],
)
def test_wrong_patterns_are_refused(options, text):
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        CompressionConfig(**options)


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
