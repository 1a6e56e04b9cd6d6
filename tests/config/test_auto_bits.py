"""The defaults are the preset `safe`; `auto` becomes a number of bits wherever that can work."""

from dataclasses import replace

import pytest

from megatron_sparse.collectives import SCHEMES, check, skips_straggler
from megatron_sparse.collectives.scheme import Input
from megatron_sparse.config.bits import DENSE_SCHEMES, FULL_VALUE_SCHEMES
from megatron_sparse.config.compression import VALUE_BITS, CompressionConfig
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.scheme import DTYPES, MESSAGE_FORMATS
from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig, SparseConfig
from megatron_sparse.config.straggler import StragglerConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.run.composition import compose
from megatron_sparse.run.preparation import decide, describe
from tests.commands import refusal


def bits_of(**overrides) -> tuple[int | str | None, int | str | None]:
    """What `compression.value_bits` and `scheme.sum_bits` become; the registry takes them."""
    config = check(SparseConfig.from_overrides(**overrides))
    return config.compression.value_bits, config.scheme.sum_bits


def for_scheme(name: str) -> dict[str, object]:
    pinned = StragglerConfig(mode="pinned", rank=0)
    return {"scheme": name} | ({"straggler": pinned} if skips_straggler(name) else {})


def test_the_default_is_the_preset_safe():
    assert SparseConfig() == SparseConfig.preset("safe") == SparseConfig.from_overrides()
    assert compose([]).sparse == compose(["preset=safe"]).sparse
    assert bits_of() == (4, 8)
    assert SparseConfig().compression.density == 0.22
    assert SparseConfig().parameters == ParametersConfig("auto")


def test_the_lists_of_schemes_are_the_registrys():
    dense = {name for name, scheme in SCHEMES.items() if scheme.takes is Input.DENSE}
    full = {name for name, s in SCHEMES.items() if s.own_format}
    assert (set(DENSE_SCHEMES), set(FULL_VALUE_SCHEMES)) == (dense, full)


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
@pytest.mark.parametrize("name", ["auto", *SCHEMES])
def test_the_defaults_go_with_every_scheme_and_format(name, form):
    scheme = SCHEMES.get(name)
    if scheme is not None and scheme.own_format:
        form = "auto"
    found = bits_of(**for_scheme(name), format=form)
    if name in (*DENSE_SCHEMES, *FULL_VALUE_SCHEMES) or form not in ("auto", "rice"):
        assert found == (None, None)
    else:
        assert found == (4, None if name == "hierarchical" else 8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        *(({"wire_dtype": dtype}, (None, None)) for dtype in DTYPES),
        ({"enabled": False}, (None, None)),
        ({"density": 1.0}, (None, None)),
        ({"density": 1}, (None, None)),
        ({"lossless_patterns": ["embedding"]}, (None, None)),
        ({"residual_dtype": "bf16"}, (4, None)),
        ({"nccl_engine": True}, (None, None)),
        ({"capacity": None}, (4, 8)),
        ({"scheme": "direct", "capacity": 1.5}, (4, 8)),
        ({"planner": PlannerConfig(schemes=["direct", "zen"])}, (None, None)),
        ({"planner": PlannerConfig(schemes=["dense", "dense_ring"])}, (None, None)),
        ({"planner": PlannerConfig(schemes=["dense", "direct"])}, (4, 8)),
        ({"planner": PlannerConfig(cluster="perlmutter")}, (4, 8)),
    ],
    ids=str,
)
def test_auto_is_null_where_few_bits_are_refused(overrides, expected):
    assert bits_of(**overrides) == expected


@pytest.mark.parametrize("bits", [*VALUE_BITS, None])
def test_bits_that_are_named_win(bits):
    assert bits_of(value_bits=bits) == (bits, None if bits is None else 8)
    assert bits_of(value_bits=8, sum_bits=bits) == (8, bits)
    assert bits_of(value_bits=None, format="rice", sum_bits=bits) == (None, bits)
    with pytest.raises(ConfigError, match=r"compression\.value_bits=null"):
        bits_of(scheme="zen", value_bits=4)


def test_sections_that_others_hold_are_not_changed():
    compression, scheme = CompressionConfig(), SchemeConfig()
    config = SparseConfig(compression, scheme)
    assert (compression.value_bits, scheme.sum_bits) == ("auto", "auto")
    assert (compression.given_value_bits, scheme.given_sum_bits) == (None, None)
    assert (config.compression.given_value_bits, config.scheme.given_sum_bits) == (4, 8)
    # Made anew from itself, as the planner and the device check do.
    assert replace(config) == config
    assert replace(config, scheme=replace(config.scheme, capacity=None)).scheme.sum_bits == 8


@pytest.mark.parametrize(
    ("key", "section"), [("value_bits", "compression"), ("sum_bits", "scheme")]
)
@pytest.mark.parametrize("value", ["4", "all", 5, True])
def test_other_words_are_refused(key, section, value):
    text = refusal(SparseConfig.from_overrides, **{key: value})
    assert f"{section}.{key}" in text
    assert "auto | 8 | 4 | 3 | 2" in text


def test_a_run_keeps_and_tells_what_auto_became(tmp_path):
    small = ["data=mock", "cluster.device=cpu"]
    for overrides, expected, told in (
        ([], (4, 8), "density 0.22 in 4 bits from"),
        (["compression=topk99"], (None, None), "density 0.01 from"),
        (["scheme=zen"], (None, None), "density 0.22 from"),
        (["plugin=false"], ("auto", "auto"), "without the plugin"),
    ):
        config = decide(compose([*small, *overrides]))
        assert (config.compression.value_bits, config.scheme.sum_bits) == expected
        assert told in describe(config, tmp_path)
