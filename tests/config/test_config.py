"""The configuration's dataclasses: values that they refuse, and what help and page say of keys."""

import dataclasses
import math
import re

import pytest

from megatron_sparse.collectives import check
from megatron_sparse.config import described
from megatron_sparse.config.checks import are_patterns, divides, in_range, is_flag, one_of
from megatron_sparse.config.compression import LONG_RAMP_ITERS, RAMP_ITERS, WARMUP_ITERS
from megatron_sparse.config.model import ModelConfig
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.run import ClusterConfig, DataConfig, RunConfig, TrainingConfig
from megatron_sparse.config.sparse import (
    CompressionConfig,
    SchemeConfig,
    SparseConfig,
    TrackingConfig,
)
from megatron_sparse.run.composition import GROUPS, group_options
from tests.commands import refusal, run
from tests.integration.configuration_page import PAGE, page


class TestChecks:
    """Single values."""

    @pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, True, "1", None], ids=repr)
    def test_in_range_refuses(self, value):
        assert "key" in refusal(in_range, "key", value, 0, 1, low_open=True)

    def test_bounds_are_closed_unless_said_otherwise(self):
        for value in (1e-30, 0.5, 1):
            in_range("key", value, 0, 1, low_open=True)
        in_range("key", 0, 0, 1)
        assert "0 < key <= 1" in refusal(in_range, "key", 0, 0, 1, low_open=True)
        assert "0 <= key" in refusal(in_range, "key", -1, 0, math.inf)

    @pytest.mark.parametrize("value", [0.5, math.inf, "3", True])
    def test_whole_numbers(self, value):
        in_range("key", 3.0, 0, math.inf, integer=True)
        assert "whole number" in refusal(in_range, "key", value, 0, math.inf, integer=True)

    def test_others(self):
        one_of("key", "a", ("a", "b"))
        assert "a | b" in refusal(one_of, "key", "c", ("a", "b"))
        is_flag("key", False)
        for value in ("false", 0, None):
            refusal(is_flag, "key", value)
        are_patterns("key", [r"^bias$"])
        assert "unterminated" in refusal(are_patterns, "key", ["[a-"])
        divides("two", 2, "four", 4)
        assert "two does not divide four" in refusal(divides, "two", 3, "four", 4)


class TestPluginSections:
    """The configuration of `install` and `attach`."""

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            ({"scheme": "ring"}, ["scheme.name ", "auto | dense | dense_ring"]),
            ({"scheme": "zen", "format": "coo"}, ["scheme.name=zen", "scheme.format=auto"]),
            (
                {"scheme": "omnireduce", "value_bits": 4},
                ["scheme.name=omnireduce", "set compression.value_bits=null"],
            ),
        ],
    )
    def test_the_registry_refuses_options_that_no_scheme_takes(self, overrides, words):
        text = refusal(lambda: check(SparseConfig.from_overrides(**overrides)))
        assert all(word in text for word in words), text

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            (CompressionConfig, "density", 0),
            (CompressionConfig, "density", 1.01),
            (CompressionConfig, "density", "1.2.3%"),
            (CompressionConfig, "leak", -0.1),
            (CompressionConfig, "value_bits", 32),
            (CompressionConfig, "samples", 0),
            (CompressionConfig, "samples", "all"),
            (CompressionConfig, "enabled", "false"),
            (CompressionConfig, "keep_patterns", ["("]),
            (CompressionConfig, "residual_dtype", "fp16"),
            (SchemeConfig, "wire_dtype", "int8"),
            (SchemeConfig, "timeout_s", 0),
            (SchemeConfig, "deterministic", 1),
            (ParametersConfig, "method", "zipped"),
            (ParametersConfig, "bits", 5),
            (ParametersConfig, "verify_every", 0),
            (TrackingConfig, "console", True),
            (TrackingConfig, "sample_every", -1),
            (TrackingConfig, "profile_iters", 1.5),
        ],
    )
    def test_refusals_name_the_key(self, section, key, value):
        assert f".{key} " in refusal(section, **{key: value})

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            ({"value_bits": 4, "wire_dtype": "bf16"}, ["scheme.wire_dtype", "exclude each other"]),
            ({"value_bits": 2, "density": 1.0}, ["compression.density=1 ", "8 | 4"]),
            (
                {"value_bits": 8, "lossless_patterns": ["embed"]},
                ["lossless_patterns", "rounding error"],
            ),
            (
                {"scheme": "direct", "capacity": 1.5, "nccl_engine": True, "checksum": True},
                ["scheme.checksum does not reach the records of scheme.nccl_engine"],
            ),
        ],
    )
    def test_options_that_contradict_each_other_are_refused(self, overrides, words):
        text = refusal(SparseConfig.from_overrides, **overrides)
        assert all(word in text for word in words), text

    @pytest.mark.parametrize(
        "others",
        [{"capacity": None}, {"name": "direct", "capacity": None}, {"name": "ssar_split_ag"}],
    )
    def test_the_nccl_engine_needs_messages_of_fixed_size(self, others):
        wrong = SparseConfig(scheme=SchemeConfig(nccl_engine=True, **others))
        assert "nccl_engine=true with messages" in refusal(check, wrong)
        for name in ("auto", "direct", "agsparse"):
            scheme = SchemeConfig(name=name, capacity=1.5, nccl_engine=True)
            assert check(SparseConfig(scheme=scheme)).scheme.nccl_engine

    def test_from_overrides_sorts_keywords_into_sections(self):
        config = SparseConfig.from_overrides(density=0.5, scheme="dense", timeout_s=7)
        assert config.compression.density == 0.5
        assert (config.scheme.name, config.scheme.timeout_s) == ("dense", 7)
        assert "expected: density?" in refusal(SparseConfig.from_overrides, densty=0.5)


def test_nulls_of_a_model_stand_for_the_usual():
    model = ModelConfig(hidden_size=64, num_attention_heads=4, seq_length=32)
    assert (model.query_groups, model.ffn_width, model.positions) == (4, 256, 32)
    given = {"num_query_groups": 2, "ffn_hidden_size": 100, "max_position_embeddings": 40}
    grouped = dataclasses.replace(model, **given)
    assert (grouped.query_groups, grouped.ffn_width, grouped.positions) == (2, 100, 40)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (ModelConfig, {"num_query_groups": 3}, "num_query_groups"),
        (ModelConfig, {"num_layers": 0}, "num_layers"),
        (
            ModelConfig,
            {"seq_length": 512, "max_position_embeddings": 256},
            "max_position_embeddings",
        ),
        (ModelConfig, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (ModelConfig, {"dropout": 1.5}, "dropout"),
        # Exactly one source of data.
        (DataConfig, {"dir": "a", "prefix": "b"}, "data"),
        (DataConfig, {"dir": "a", "mock": True}, "data"),
        (DataConfig, {"dir": "a", "vocab_size": 8}, "data"),
        (DataConfig, {"dir": None, "prefix": "b"}, "data"),
        (DataConfig, {"dir": None, "mock": True, "vocab_size": 1}, "data"),
        (DataConfig, {"split": "0,0,0"}, "data"),
        (DataConfig, {"split": "a,b,c"}, "data"),
        (TrainingConfig, {"lr": 1e-3, "min_lr": 1e-2}, "training"),
        (TrainingConfig, {"seed": 0}, "training"),
        (TrainingConfig, {"overlap_grad_reduce": "true"}, "training"),
        (RunConfig, {"name": "a/b"}, "name"),
        (RunConfig, {"name": ".."}, "name"),
        (RunConfig, {"name": ""}, "name"),
        (RunConfig, {"resume": "yes"}, "never | auto | must"),
        (RunConfig, {"plugin": "no"}, "plugin"),
        (
            RunConfig,
            {
                "training": TrainingConfig(tensor_parallel=2),
                "model": ModelConfig(num_query_groups=1),
            },
            "num_query_groups",
        ),
        (
            RunConfig,
            {
                "training": TrainingConfig(pipeline_parallel=2),
                "model": ModelConfig(num_layers=3),
            },
            "num_layers",
        ),
    ],
)
def test_a_section_refuses(section, values, words):
    assert words in refusal(section, **values)


class TestRun:
    """Checks that involve several sections."""

    def test_sizes_follow_from_each_other(self):
        config = RunConfig(
            cluster=ClusterConfig(nodes=2, ranks_per_node=4),
            training=TrainingConfig(tensor_parallel=2, pipeline_parallel=2, micro_batch_size=3),
        )
        assert config.cluster.world_size == 8
        assert config.data_parallel == 2
        assert config.global_batch_size == 6
        assert config.sparse.parameters is config.parameters

    def test_the_ranks_of_a_context_parallel_group_take_one_batch(self):
        training = TrainingConfig(micro_batch_size=1, global_batch_size=1)
        cluster, megatron = ClusterConfig(ranks_per_node=2), {"context_parallel_size": 2}
        RunConfig(cluster=cluster, training=training, megatron=megatron)
        assert (
            RunConfig(
                cluster=cluster, megatron=megatron, training=TrainingConfig(micro_batch_size=3)
            ).global_batch_size
            == 3
        )

    @pytest.mark.parametrize(
        ("iterations", "given", "taken"),
        [
            (1, None, 0),
            (9, None, 0),
            (50, None, 5),
            (1000, None, 100),
            (9000, None, 100),
            (9, 7, 7),
        ],
    )
    def test_the_warm_up_of_a_short_run_is_derived(self, iterations, given, taken):
        assert TrainingConfig(iterations=iterations, lr_warmup_iters=given).lr_warmup == taken


class TestScheduleOfTheRunsLength:
    """`compression.warmup_iters=null` and `ramp_iters=null`."""

    @pytest.mark.parametrize(
        ("iterations", "given", "taken"),
        [
            (1, {}, (0, 0)),
            (19, {}, (0, 1)),
            (1000, {}, (50, 100)),
            (10_000, {}, (500, 1000)),
            (300_000, {}, (500, 1000)),
            (1000, {"warmup_iters": 0}, (0, 100)),
            (1000, {"ramp_iters": 2300}, (50, 2300)),
            (1500, {"density": 0.07}, (75, 1050)),
            (300_000, {"density": 0.015}, (500, 2300)),
            (9, {"warmup_iters": 7, "ramp_iters": 8}, (7, 8)),
        ],
    )
    def test_what_is_not_given_follows_the_runs_length(self, iterations, given, taken):
        run = RunConfig(
            training=TrainingConfig(iterations=iterations), compression=CompressionConfig(**given)
        )
        found = run.sparse.compression
        assert (found.warmup_iters, found.ramp_iters) == (found.warmup, found.ramp) == taken

    def test_without_a_run_it_is_the_longest(self):
        compression = SparseConfig().compression
        assert (compression.warmup, compression.ramp) == (WARMUP_ITERS, RAMP_ITERS) == (500, 1000)
        for name in ("balanced", "extreme"):
            assert SparseConfig.preset(name).compression.ramp == LONG_RAMP_ITERS == 2300

    @pytest.mark.parametrize("key", ["warmup_iters", "ramp_iters"])
    def test_refusals(self, key):
        for wrong in (-1, 0.5, "5%"):
            assert f"compression.{key}" in str(refusal(CompressionConfig, **{key: wrong}))


def test_the_number_of_keys_is_frozen():
    """CONTRIBUTING.md says what a new one needs."""
    assert len(described.every_key()) <= 92


SECTIONS = {"": RunConfig, **described.sections(RunConfig)}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_attribute_is_described(name):
    section = SECTIONS[name]
    assert described.summary(section).endswith(".")
    fields = [field.name for field in dataclasses.fields(section)]
    found = described.attributes(section)
    assert sorted(found) == sorted(fields)
    for line in map(described.first_sentence, found.values()):
        assert len(re.findall(r"[(\[]", line)) == len(re.findall(r"[)\]]", line)), "cut in brackets"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("one. two.", "one."),
        ("as 1.25, e.g. here, i.e. now. null: two", "as 1.25, e.g. here, i.e. now."),
    ],
)
def test_the_first_sentence(text, line):
    assert described.first_sentence(text) == line


def test_the_page_is_of_this_version():
    """`python -m tests.integration.configuration_page` writes it anew."""
    assert PAGE.read_text("utf-8") == page()


def test_the_page_has_every_key_in_plain_markdown():
    text = PAGE.read_text("utf-8")
    for key in described.every_key():
        (row,) = re.findall(rf"^\| `{re.escape(key)}` \| `[^|]+` \| [^|]+ \|$", text, re.MULTILINE)
        assert row
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / link).is_file(), link


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_has_every_option_and_every_key_in_a_line_with_its_value(flag, capfd):
    assert run(f"train {flag} compression.density=0.5 megatron.seed=7") == 0
    text = capfd.readouterr().out
    for group in GROUPS:
        assert f"{group}: {', '.join(group_options(group))}" in text
    assert re.search(r"^  density: 0\.5 +# the fraction of each pruned range", text, re.MULTILINE)
    assert re.search(r"^megatron: \{seed: 7\} +# any flag of Megatron-LM", text, re.MULTILINE)
    for name, section in SECTIONS.items():
        part = text if not name else text.partition(f"\n{name}:\n")[2]
        for key in described.keys(section):
            assert re.search(rf"^ *{key.name}: .*(\n +)?# .", part, re.MULTILINE), key.name
    _, _, shown = text.partition("== Every key")
    assert max(map(len, shown.splitlines())) <= 100


def test_flags_of_megatron_may_have_dashes():
    run = RunConfig(megatron={"context-parallel-size": 2}, cluster=ClusterConfig(ranks_per_node=8))
    assert run.megatron == {"context_parallel_size": 2}
    assert run.batch_ranks == 4
