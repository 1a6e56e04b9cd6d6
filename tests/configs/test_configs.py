"""Every YAML composes, is valid, and starts with its command; a mistake gives one error."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megatron_sparse.collectives import SCHEMES, check, skips_straggler
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.presets import preset_names
from megatron_sparse.config.run import RunConfig, TrainingConfig
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.predicted_buckets import predicted_parameters
from megatron_sparse.pricing.records import record_bytes
from megatron_sparse.run import application, composition, preparation
from megatron_sparse.run.composition import GROUPS, compose, group_options, load, save
from megatron_sparse.telemetry.console import BITS
from tests.commands import refusal

CONFIGS = Path(composition.__file__).parents[2] / "configs"
# Model clusters are not a group of Hydra: tests/pricing/test_cluster.py has them. The launcher is
# in Hydra's own group, which is composed only in a multirun.
FILES = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name not in ("cluster_models", "launcher")
)
COMMAND = re.compile(r"# (?:srun )?megatron-sparse train (.+)")


def test_files_are_those_that_hydra_lists():
    with_files = [group for group in GROUPS if group != "scheme"]
    assert {path.parent.name for path in FILES} == {*with_files, "configs"}
    for group in with_files:
        assert group_options(group) == sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
class TestEachFile:
    """What holds for every one."""

    def test_first_line_is_a_command_that_composes_with_it(self, path):
        with path.open() as file:
            found = COMMAND.fullmatch(file.readline().rstrip("\n"))
        assert found, "the first line must be a comment with the command that runs the file"
        overrides = shlex.split(found[1])
        if path.parent != CONFIGS:
            assert f"{path.parent.name}={path.stem}" in overrides
        assert isinstance(compose(overrides), RunConfig)

    def test_composes_alone(self, path):
        overrides = [] if path.parent == CONFIGS else [f"{path.parent.name}={path.stem}"]
        compose(overrides)


def test_the_documented_command():
    config = compose(["model=gpt2_xl", "compression=topk99", "scheme=auto", "cluster=perlmutter"])
    assert (config.model.num_layers, config.model.hidden_size) == (48, 1600)
    assert config.model.seq_length == 512
    assert config.training.micro_batch_size == 2
    assert config.compression.density == 0.01
    assert config.scheme.name == "auto"
    assert config.cluster.env["NCCL_NET"] == "AWS Libfabric"
    assert config.cluster.device == "cuda"


def test_every_registered_scheme_composes():
    assert group_options("scheme") == sorted(["auto", *SCHEMES])
    for name in group_options("scheme"):
        pinned = ["straggler.mode=pinned", "straggler.rank=0"] if skips_straggler(name) else []
        assert compose([f"scheme={name}", *pinned]).scheme.name == name


def test_the_papers_settings_prune_what_their_names_say_and_send_values_in_full():
    for name, pruned in (("topk95", 0.95), ("topk99", 0.99), ("topk999", 0.999)):
        config = compose([f"compression={name}"]).sparse
        # 1 - 0.999 is not 0.001 in binary.
        assert config.compression.density == pytest.approx(1 - pruned, rel=1e-9)
        assert (config.compression.value_bits, config.scheme.sum_bits) == (None, None)
    assert compose(["compression=dense"]).compression.enabled is False


PRESETS = {
    "auto": (True, "auto", 4),
    "lossless": (False, 0.22, None),
    "quantised": (True, 1, 4),
    "safe": (True, 0.22, 4),
    "balanced": (True, 0.07, 3),
    "extreme": (True, 0.015, 3),
}
"""compression.enabled, density and value_bits."""


def test_presets_are_the_same_on_the_command_line_and_in_python():
    assert preset_names() == sorted(PRESETS)
    for name, values in PRESETS.items():
        composed, made = compose([f"preset={name}"]).sparse, SparseConfig.preset(name)
        assert made == SparseConfig.given("install", name, {})
        # On the command line the run's length decides the schedule that a preset leaves open.
        made.compression = made.compression.in_run_of(TrainingConfig.iterations)
        for section in ("compression", "scheme", "parameters"):
            assert getattr(composed, section) == getattr(made, section)
        chosen = made.compression
        assert (chosen.enabled, chosen.density, chosen.value_bits) == values
        # Never lossy unless asked for, and never refused where parameters are not gathered.
        assert made.parameters.method == "auto"
        check(made)


def test_the_documented_bits_of_presets_are_those_of_the_cost_model():
    page = (CONFIGS.parent / "docs" / "choosing-density.md").read_text()
    for name, (enabled, density, bits) in PRESETS.items():
        if name == "auto":  # has those of its choice
            continue
        stated = re.search(rf"^\| `{name}` \|.*\| ([\d.]+) (?:\(fp32\) )?\|", page, re.MULTILINE)
        assert stated, name
        form = "dense" if density == 1 else "auto"
        expected = 8 * record_bytes(density, 4, form, bits) if enabled else 32
        assert float(stated[1]) == pytest.approx(expected, abs=0.005)
        assert float(stated[1]) == BITS.get(name, 32)


def test_what_is_named_wins_over_a_preset():
    compression = compose(["preset=extreme", "compression.warmup_iters=7"]).compression
    assert (compression.density, compression.value_bits, compression.warmup_iters) == (0.015, 3, 7)
    # The paper's settings have values in full, so a preset's sums of few bits are to be given up.
    papers = ["compression=topk999", "preset=extreme", "compression.ramp_iters=7"]
    with pytest.raises(ConfigError, match=r"scheme\.sum_bits=null"):
        compose(papers)
    compression = compose([*papers, "scheme.sum_bits=null"]).compression
    assert (compression.density, compression.value_bits, compression.ramp_iters) == (0.001, None, 7)
    full = ["preset=safe", "compression.value_bits=null", "scheme.sum_bits=null"]
    assert compose(full).compression.value_bits is None
    assert compose(["preset=safe", "experiment=quickstart"]).compression.density == 0.22
    raw = ParametersConfig("raw")
    config = SparseConfig.preset("safe", value_bits=8, scheme="direct", parameters=raw)
    assert (config.compression.density, config.compression.value_bits) == (0.22, 8)
    assert (config.scheme.name, config.parameters) == ("direct", raw)


def test_an_unknown_preset_is_an_error_that_lists_them():
    said = refusal(SparseConfig.preset, "saef")
    assert "balanced | extreme | lossless | quantised | safe" in said


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2_xl", 1.5), ("starcoder2_3b_28l", 3.3), ("starcoder2_3b_28l_gqa", 2.8)],
)
def test_big_models_state_their_parameters(name, billions):
    config = compose([f"model={name}"])
    text = (CONFIGS / "model" / f"{name}.yaml").read_text()
    stated = re.search(r"Parameters: (\d+)", text)
    assert stated
    count = sum(each.numel for each in predicted_parameters(config, config.model.vocab_size))
    assert count == int(stated[1])
    # GPT-2 XL's 1.558 B is known as 1.5 B: truncated, not rounded.
    assert int(count / 1e8) / 10 == billions


def test_the_two_starcoders_differ_in_key_value_heads_only():
    whole, grouped = (compose([f"model=starcoder2_3b_28l{end}"]).model for end in ("", "_gqa"))
    assert dataclasses.replace(whole, num_query_groups=2) == grouped


def test_a_default_run_is_mostly_at_its_target():
    text = preparation.describe(compose(), Path("runs/run"))
    assert "  1000 iterations of 4 x " in text
    assert text.count("density 0.22 in 4 bits from iteration 151 on\n") == 1


def test_quickstart_is_mostly_at_its_target():
    config = compose(["experiment=quickstart"])
    compression, training = config.compression, config.training
    at_target = training.iterations - compression.warmup_iters - compression.ramp_iters
    assert at_target >= training.iterations / 2
    assert config.scheme.name == "agsparse"
    assert training.overlap_grad_reduce
    # Several buckets, or nothing could overlap.
    bucket = config.megatron["ddp_bucket_size"]
    assert sum(each.numel for each in predicted_parameters(config, 8192)) > 3 * bucket


def test_command_line_wins_over_an_experiment():
    config = compose(["experiment=quickstart", "model=gpt_tiny", "data=prose", "name=mine"])
    assert config.model.position_embedding_type == "learned_absolute"
    assert config.data.dir == "data/prose"
    assert config.name == "mine"
    assert config.training.iterations == 120


def test_nodes_come_from_slurm(monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    for name in ("perlmutter", "infiniband", "aws_efa"):
        cluster = compose([f"cluster={name}"]).cluster
        assert (cluster.nodes, cluster.ranks_per_node) == (3, 2)


def test_free_keys_need_no_plus():
    config = compose(["megatron.recompute_granularity=full", "cluster.env.NCCL_DEBUG=INFO"])
    assert config.megatron == {"recompute_granularity": "full"}
    assert config.cluster.env["NCCL_DEBUG"] == "INFO"
    config = compose(["megatron={recompute_activations: true}", "cluster.env={NCCL_DEBUG: INFO}"])
    assert config.megatron == {"recompute_activations": True}
    assert config.cluster.env["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scheme=direct,zen", ["scheme.name=direct,zen"]),
        ("compresion=topk99", ["'compresion'", "did you mean compression?"]),
        ("+training.foo=1", ["'training.foo'"]),
        ("training.iterations=null", ["training.iterations"]),
        ("training=3", ["training"]),
        (
            "compression=null",
            ["compression has no option 'null'", "topk99", "leave compression out"],
        ),
        ("preset=1", ["preset has no option '1'"]),
        ("cluster=1e5", ["cluster has no option '1e5'", "leave cluster out"]),
        ("model=-1.5", ["model has no option '-1.5'"]),
        ("name='${nothing}'", ["nothing"]),
        ("a b", ["'a b'"]),
        ("tracking.record_gradients_iters=[a]", ["iters[0] has the wrong type", "list[int]"]),
        ("cluster.env.A=null", ["cluster.env.A has the wrong type", "dict[str, str]"]),
    ],
)
def test_mistakes_are_one_typed_error(override, words):
    """Besides those of `tests.integration.test_mistakes`, which are made on the command line."""
    text = refusal(compose, [override])
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", ["own.yaml", "line 1"]),
        ("modle: {num_layers: 2}", ["model/own", "modle"]),
        ("model: {num_layers: x}", ["model/own", "'x'", "model.num_layers"]),
    ],
)
def test_mistakes_in_a_file_of_the_users_own_name_file_and_key(tmp_path, text, words):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/own.yaml").write_text(text)
    error = refusal(application.train, [f"--config-dir={tmp_path}", "model=own"])
    for word in words:
        assert word in error


class TestFile:
    """`config.yaml` in a run's folder."""

    def test_saved_configuration_is_the_same_when_loaded(self, tmp_path):
        config = compose(["experiment=quickstart", "megatron.rope_fusion=false"])
        path = tmp_path / "config.yaml"
        save(config, path, "megatron-sparse train experiment=quickstart")
        assert load(path) == config
        assert path.read_text().startswith("# megatron-sparse train experiment=quickstart\n")

    @pytest.mark.parametrize(
        "text",
        [None, "", "[1]", "a: b: c", "modle: {}", "model: 3", "training: {lrr: 1}"],
    )
    def test_broken_files_are_one_typed_error(self, tmp_path, text):
        path = tmp_path / "config.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"config\.yaml cannot be read|modle|wrong type|'training\.lrr'"
        ):
            load(path)


def test_the_launcher_names_the_signal_that_submitit_sends():
    slurm = pytest.importorskip("submitit.slurm.slurm")
    text = (CONFIGS / "hydra" / "launcher" / "submitit_slurm.yaml").read_text()
    assert f"training.save_signal=SIG{slurm.SlurmJobEnvironment.USR_SIG} " in text
