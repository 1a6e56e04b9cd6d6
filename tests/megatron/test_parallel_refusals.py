"""The layouts that docs/parallelism.md calls refused, and its table. Starts no process."""

import re
from contextlib import closing
from types import SimpleNamespace

import pytest

from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.megatron import attach, install, refusals
from megatron_sparse.megatron.arguments import megatron_parser
from megatron_sparse.megatron.buckets import check_supported
from megatron_sparse.megatron.refusals import REFUSALS
from megatron_sparse.run import composition, preparation
from tests.doc_tables import rows_with_tests
from tests.megatron.test_parallel import LAYOUTS

PAGE = "docs/parallelism.md"
MUST_HAVE = (
    "tensor parallel",
    "pipeline parallel",
    "virtual pipeline",
    "context parallel",
    "expert parallel",
    "sequence parallel",
    "tied embeddings",
    "microbatches",
    "all-reduce",
    "reduce-scatter",
    "num-distributed-optimizer-instances",
    "reduce-scatter-with-fp32-accumulation",
    "ddp-average-in-collective",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "bf16",
    "fp32",
    "params_with_extra_main_grads",
    "save-wgrads-interval",
    "one rank",
    "hybrid-layer-pattern",
    "optimizer muon",
    *(refusal.flag.removeprefix("--") for refusal in REFUSALS),
)


def test_every_row_of_the_table_works_or_is_refused():
    rows = rows_with_tests(PAGE)
    assert len(rows) > 20
    for row, _ in rows:
        outcome = row.strip("|").split(" | ")[2].strip()
        assert outcome.startswith(("works", "refused: `ConfigError`", "refused: `HostError`")), row


def test_the_table_has_a_row_for_everything():
    table = "\n".join(" ".join(row.split(" | ")[:2]) for row, _ in rows_with_tests(PAGE)).lower()
    assert [name for name in MUST_HAVE if name not in table] == []


def test_the_table_and_the_tests_have_the_same_layouts():
    table = "\n".join(row for row, _ in rows_with_tests(PAGE))
    assert set(re.findall(r"test_dense_is_megatron\[(\w+)\]", table)) == set(LAYOUTS)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.key)
def test_a_setting_is_refused_before_a_rank_starts(refusal):
    value = refusal.only or 2
    for key in (refusal.key, refusal.key.replace("_", "-")):
        overrides = ["model=gpt_tiny", "data=mock", f"megatron.{key}={value}"]
        with pytest.raises(ConfigError, match=rf"megatron\.{refusal.key}={value}") as caught:
            preparation.preflight(composition.compose(overrides))
        assert "plugin=false" in str(caught.value)
        preparation.preflight(composition.compose([*overrides, "plugin=false"]))


def test_every_setting_is_a_flag_of_this_megatron():
    actions = megatron_parser()._option_string_actions
    for refusal in REFUSALS:
        assert actions[refusal.flag].dest in (refusal.attribute, refusal.key)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.key)
def test_install_refuses_a_setting_that_megatron_has_parsed(monkeypatch, refusal):
    """Also before Megatron builds a model, for scripts that install before it parses."""
    from megatron.training import global_vars, training

    parsed = SimpleNamespace(**{refusal.attribute: refusal.only or refusal.allowed + 1})
    with monkeypatch.context() as patch:
        patch.setattr(global_vars, "_GLOBAL_ARGS", parsed)
        with pytest.raises(ConfigError, match=refusal.flag):
            install()
    with closing(install()):
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", parsed)
        with pytest.raises(ConfigError, match=refusal.flag):
            training.setup_model_and_optimizer(None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ckpt_format": "torch"}, "checkpoints of this format cannot hold residuals"),
        ({"ckpt_assume_constant_structure": True}, "residuals appear while training"),
    ],
)
def test_checkpoints_that_would_lose_residuals_are_refused(monkeypatch, flags, words):
    """Before a rank starts, by `install`, and before Megatron builds a model; not with `none`."""
    from megatron.training import global_vars

    def fails(action, *arguments, **options):
        with pytest.raises(ConfigError, match=words) as caught:
            action(*arguments, **options)
        assert "compression.residual_checkpoint=none" in str(caught.value)

    section = [f"megatron.{name}={value}" for name, value in flags.items()]
    overrides = ["model=gpt_tiny", "data=mock", "training.save_interval=2", *section]
    fails(preparation.preflight, composition.compose(overrides))
    unwanted = [*overrides, "compression.residual_checkpoint=none"]
    preparation.preflight(composition.compose(unwanted))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(save="x", **flags))
    for mode in ("full", "sum"):
        fails(install, residual_checkpoint=mode)
    install(residual_checkpoint="none").close()
    # A run that saves nothing may have any format.
    refusals.check_checkpoints({"ckpt_format": "torch"}, "full", saves=False)
    refusals.check_checkpoints({"ckpt_format": "torch_dist"}, "full", saves=True)


def test_install_and_attach_take_the_names_of_presets():
    plugin = install("extreme", density=0.02)
    plugin.close()
    assert (plugin.config.compression.density, plugin.config.compression.value_bits) == (0.02, 3)
    with pytest.raises(ConfigError, match=r"balanced \| extreme"):
        install("fastest")
    with pytest.raises(ConfigError, match=r"balanced \| extreme"):
        attach([], config="fastest")


def test_the_launcher_takes_sharded_muon():
    """Megatron's validation gives the flag of `use_distributed_optimizer` another name."""
    settings = ["training.precision=bf16", "training.use_distributed_optimizer=true"]
    muon = ["model=gpt_tiny", "data=mock", "cluster.device=cuda", "megatron.optimizer=muon"]
    preparation.preflight(composition.compose([*muon, *settings]), in_launcher=True)


def test_a_setting_that_is_off_is_not_refused():
    off = SimpleNamespace(**{each.attribute: each.allowed for each in REFUSALS})
    refusals.check_arguments(off, "full")
    refusals.check_chunk(SimpleNamespace(ddp_config=off, config=off))
    values = {"tensor_parallel_num_weight_shards": 1, "cuda_graph_impl": "local"}
    assert refusals.section_errors({each.key: False for each in REFUSALS} | values) == []
    for modules, count in ((["attn"], 0), (["attn", "full_iteration"], 1)):
        assert len(refusals.section_errors({"cuda_graph_modules": modules})) == count


OF_THE_PROCESS = (
    *("use_torch_fsdp2", "inprocess_restart", "dist_ckpt_optim_fully_reshardable"),
    "optimizer_cuda_graph",
)
"""Settings that no configuration of a model holds; the class shows the first."""


@pytest.mark.parametrize(
    "refusal", [each for each in REFUSALS if each.key not in OF_THE_PROCESS], ids=lambda r: r.key
)
def test_attach_refuses_a_model_with_a_setting(refusal):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    ddp_config = DistributedDataParallelConfig()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    chunk = SimpleNamespace(ddp_config=ddp_config, config=config, bucket_groups=[], buffers=[])
    check_supported(chunk)
    owner = ddp_config if hasattr(ddp_config, refusal.attribute) else config
    assert hasattr(owner, refusal.attribute)
    setattr(owner, refusal.attribute, refusal.only or refusal.allowed + 1)
    with pytest.raises(HostError, match=refusal.flag):
        check_supported(chunk)


@pytest.mark.parametrize("name", ["TorchFullyShardedDataParallel", "FullyShardedDataParallel"])
def test_attach_refuses_a_model_in_fsdp(name):
    """The class is Megatron's own; an instance of it would need a GPU."""
    from megatron.core import distributed

    kind = getattr(distributed, name)
    with pytest.raises(HostError) as caught:
        check_supported(kind.__new__(kind))
    for word in (kind.__qualname__, "--use-megatron-fsdp", "--use-torch-fsdp2"):
        assert word in str(caught.value)
