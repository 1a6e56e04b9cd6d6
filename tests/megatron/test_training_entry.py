"""From a configuration to Megatron's `pretrain`: flags, models, launcher, failing ranks."""

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_sparse.errors import CheckpointError, ConfigError, DatasetError
from megatron_sparse.megatron import arguments, cpu_mode, training
from megatron_sparse.megatron.arguments import OWNED_FLAGS, model_flags, owned_errors
from megatron_sparse.megatron.predicted_buckets import predicted_parameters
from megatron_sparse.run import launch, preparation
from megatron_sparse.run.composition import compose, group_options
from tests.megatron.train_ranks import on_ranks
from tests.programs import ROOT, SMALL_RUN, Done, ended

TRAIN = str(ROOT / "scripts/train.py")
VOCABULARY = 8192
SMALL = (*SMALL_RUN, "training.iterations=3", "cluster.device=cpu")


@pytest.fixture(scope="module")
def parser():
    training.silence_known_noise()
    return arguments.megatron_parser()


def pairs(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


class TestFlags:
    """The `megatron:` section against Megatron's own parser."""

    def line(self, parser, passed, **derived):
        return pairs(arguments.command_line(derived, passed, parser))

    def test_keys_become_flags(self, parser):
        passed = {
            "num_layers": 3,
            "lr": 1e-4,
            "swiglu": True,
            "data_path": ["0.5", "a", "0.5", "b"],
        }
        assert self.line(parser, passed) == {
            "--num-layers": ["3"],
            "--lr": ["0.0001"],
            "--swiglu": [],
            "--data-path": ["0.5", "a", "0.5", "b"],
        }

    def test_false_takes_the_no_form_where_there_is_one(self, parser):
        assert self.line(parser, {"bias_gelu_fusion": False}) == {"--no-bias-gelu-fusion": []}
        with pytest.raises(ConfigError, match="--no-swiglu"):
            self.line(parser, {"swiglu": False})

    def test_given_flags_override_derived_ones(self, parser):
        assert self.line(parser, {"lr": 2}, lr=1, seed=3) == {"--lr": ["2"], "--seed": ["3"]}

    def test_a_derived_flag_is_taken_back(self, parser):
        assert self.line(parser, {"lr": None}, lr=1) == {}
        assert self.line(parser, {"overlap_grad_reduce": False}, overlap_grad_reduce=True) == {}
        assert self.line(parser, {"rope_fusion": True}, no_rope_fusion=True) == {}

    @pytest.mark.parametrize(
        ("passed", "words"),
        [
            ({"num_layer": 3}, "num_layers"),
            ({"no_such_thing_at_all": 1}, "no flag of Megatron-LM"),
            ({"num_layers": "many"}, "--num-layers: invalid int"),
            ({"num_layers": True}, "megatron.num_layers does not take"),
            ({"swiglu": 3}, "true or false"),
            ({"num_layers": [1, 2]}, "Megatron refuses a flag"),
            ({"num_layers": {"a": 1}}, "megatron.num_layers"),
            ({"position_embedding_type": "alibi"}, "invalid choice"),
        ],
    )
    def test_mistakes_are_typed(self, parser, passed, words):
        with pytest.raises(ConfigError, match=re.escape(words)):
            self.line(parser, passed)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("model", group_options("model"))
    def test_megatron_accepts_the_flags_of_every_model(self, parser, model, device, tmp_path):
        config = compose(
            [
                f"model={model}",
                "training.eval_interval=5",
                f"cluster.device={device}",
                "training.precision=bf16",
                "training.use_distributed_optimizer=true",
                "training.save_interval=10",
            ]
        )
        derived = arguments.derived_flags(
            config, tmp_path, vocab_size=VOCABULARY, data_prefix=Path("data/code/text")
        )
        parsed = parser.parse_args(arguments.command_line(derived, {}, parser))
        model_config = config.model
        assert parsed.num_layers == model_config.num_layers
        assert parsed.seq_length == model_config.seq_length
        assert parsed.group_query_attention is (
            model_config.query_groups < model_config.num_attention_heads
        )
        assert parsed.distributed_backend == {"cpu": "gloo", "cuda": "nccl"}[device]
        assert parsed.bf16
        assert parsed.overlap_grad_reduce
        assert parsed.use_distributed_optimizer
        assert parsed.data_path == ["data/code/text"]
        assert parsed.save == str(tmp_path / "checkpoints")
        assert parsed.load is None
        assert parsed.tensorboard_dir == str(tmp_path / "tensorboard")
        assert parsed.wandb_save_dir == str(tmp_path)
        assert (parsed.eval_interval, parsed.eval_iters) == (5, 10)

    def test_checkpoints_and_dashboards_are_asked_for_only_when_wanted(self, tmp_path):
        config = compose(
            [
                "tracking=off",
                "data=mock",
                "cluster.device=cpu",
                "training.precision=fp32",
                "training.load=elsewhere",
            ]
        )
        flags = arguments.derived_flags(config, tmp_path, vocab_size=512, data_prefix=None)
        assert not {"save", "tensorboard_dir", "wandb_project", "data_path"} & set(flags)
        assert flags["mock_data"] is True
        assert flags["eval_iters"] == 0
        assert flags["load"] == "elsewhere"
        own = tmp_path / arguments.CHECKPOINTS
        own.mkdir()
        (own / arguments.TRACKER).write_text("10")
        flags = arguments.derived_flags(config, tmp_path, vocab_size=512, data_prefix=None)
        assert flags["load"] == str(own), "a resumed run goes on from its own"

    def test_a_temporary_checkpoint_is_one_where_megatron_looks_for_it(self, tmp_path):
        (tmp_path / "non_persistent").mkdir()
        (tmp_path / "non_persistent" / arguments.TRACKER).write_text("10")
        load = f"training.load={tmp_path}"
        arguments.check_load(compose([load, "megatron.non_persistent_ckpt_type=global"]))
        with pytest.raises(CheckpointError, match="no checkpoint to load"):
            arguments.check_load(compose([load]))


class TestData:
    """Where the vocabulary and the dataset come from."""

    def test_mock_and_prefix(self, tmp_path):
        assert training.find_data(compose(["data=mock"])) == (8192, None)
        prefix = tmp_path / "text.v1"
        overrides = ["data.dir=null", f"data.prefix={prefix}", "data.vocab_size=1000"]
        with pytest.raises(DatasetError, match=r"text\.v1\.idx"):
            training.find_data(compose(overrides))
        (tmp_path / "text.v1.idx").touch()
        assert training.find_data(compose(overrides)) == (1000, prefix)
        assert training.find_data(compose([*overrides, "model.vocab_size=2000"]))[0] == 2000
        with pytest.raises(ConfigError, match="smaller than the data's"):
            training.find_data(compose([*overrides, "model.vocab_size=999"]))


FREE = {
    # No key of ours says these.
    "attention_dropout",
    "log_interval",
    "weight_decay",
    "lr_decay_style",
    "lr_decay_iters",
    "make_vocab_size_divisible_by",
    "no_one_logger",
    "tensorboard_log_interval",
    "tokenizer_type",
    "transformer_impl",
    *(f"no_{name}_fusion" for name in ("bias_dropout", "bias_gelu", "gradient_accumulation")),
    *(f"no_{name}" for name in ("masked_softmax_fusion", "persist_layer_norm", "rope_fusion")),
}
"""Derived flags that the `megatron:` section may change."""


class TestOwnedFlags:
    """Each of Megatron's flags is said in one place only."""

    def test_every_derived_flag_has_its_key_or_is_free(self, tmp_path, parser):
        overrides = (
            ["data.dir=null", "data.prefix=x", "data.mock=false", "data.vocab_size=512"],
            ["model=starcoder2_3b_28l_gqa", "model.tied_embeddings=false"],
            ["training.save_interval=2", "training.save_signal=SIGUSR1", "training.load=x"],
            ["training.use_distributed_optimizer=true", "training.precision=fp16"],
            ["tracking=wandb"],
        )
        derived = set()
        for more in overrides:
            said = ["data=mock", "cluster.device=cpu", "training.precision=bf16", *more]
            prefix = Path("x") if "data.prefix=x" in more else None
            derived |= set(
                arguments.derived_flags(compose(said), tmp_path, vocab_size=512, data_prefix=prefix)
            )
        assert derived - OWNED_FLAGS.keys() == FREE

        flags = {flag for action in parser._actions for flag in action.option_strings}
        spelt = {"--" + name.replace("_", "-") for name in OWNED_FLAGS}
        assert spelt <= flags, "no flag that Megatron does not have"
        for action in parser._actions:
            assert len(spelt & set(action.option_strings)) in (0, len(action.option_strings))

    def test_every_key_is_there(self):
        config = compose([])
        for key in OWNED_FLAGS.values():
            at = config
            for part in key.split("."):
                at = getattr(at, part)

    @pytest.mark.parametrize(
        ("said", "key"),
        [
            ("megatron.num_layers=3", "model.num_layers"),
            ("megatron.num-layers=3", "model.num_layers"),
            ("megatron.train_iters=3", "training.iterations"),
            ("megatron.bf16=true", "training.precision"),
            ("megatron.lr_warmup_fraction=0.1", "training.lr_warmup_iters"),
            ("megatron.overlap_grad_reduce=false", "training.overlap_grad_reduce"),
            ("megatron.data_path=[x]", "data.prefix"),
            ("megatron.wandb_project=null", "tracking.wandb_project"),
        ],
    )
    @pytest.mark.parametrize("plugin", ["true", "false"])
    def test_a_flag_that_a_key_owns_is_refused(self, said, key, plugin):
        with pytest.raises(ConfigError, match=f"remedy: .* set {key}"):
            preparation.preflight(compose(["data=mock", f"plugin={plugin}", said]))

    def test_a_blend_of_data_has_no_key(self):
        assert owned_errors({"data_path": ["0.5", "a", "0.5", "b"], "swiglu": True}) == []


def test_what_the_plugin_logs_is_shown_once(tmp_path, monkeypatch, capfd):
    """Megatron gives the root logger a handler, unless it has one; its level is WARNING."""

    def find_data(config):
        for logger in ("megatron_sparse", "megatron_sparse.telemetry.run", "another"):
            logging.getLogger(logger).info("%s says so", logger)
        raise DatasetError("no data", expected="some", got="none")

    monkeypatch.setattr(training, "find_data", find_data)
    logger = logging.getLogger("megatron_sparse")
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(DatasetError):
        training.train(compose(["data=mock"]), tmp_path)
    assert capfd.readouterr().err.splitlines() == [
        "megatron_sparse says so",
        "megatron_sparse.telemetry.run says so",
    ]
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_dropout_is_that_of_attention_too():
    flags = model_flags(compose(["model.dropout=0.1"]).model)
    assert (flags["hidden_dropout"], flags["attention_dropout"]) == (0.1, 0.1)


def test_loss_is_the_sum_over_tokens_that_count():
    from megatron_sparse.megatron.batches import loss_function

    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    losses = torch.tensor([[1.0, 100.0], [2.0, 4.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, n_tokens, logged = loss_function(mask, losses)
    assert loss.dtype == torch.float32
    assert (loss.item(), n_tokens.item()) == (7.0, 3)
    assert n_tokens.dtype == torch.int32
    assert logged["lm loss"].tolist() == [7.0, 3.0]
    loss.backward()
    assert losses.grad.tolist() == mask.tolist()


@on_ranks(1)
def test_predicted_parameters_are_those_of_megatrons_models(rank):
    """Every model of `configs/model`, the big ones too, which are made on the meta device."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_args, validate_args

    from megatron_sparse.megatron.training import model_config_of

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # Parameters that Megatron makes on the GPU go to the meta device: 3.3 B take no memory.
    cpu_mode._CPU = torch.device("meta")
    for name in group_options("model"):
        decided = ["cluster.device=cpu", "cluster.ranks_per_node=1", "training.precision=fp32"]
        config = compose([f"model={name}", *decided, "tracking=off"])
        vocab_size = config.model.vocab_size or VOCABULARY
        derived = arguments.derived_flags(
            config, Path("unused"), vocab_size=vocab_size, data_prefix=None
        )
        parser = arguments.megatron_parser()
        sys.argv[1:] = arguments.command_line(derived, config.megatron, parser)
        parsed = parse_args()
        validate_args(parsed)
        model_config = model_config_of(parsed)
        builder = model_config.get_builder_cls()(model_config)
        model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
        predicted = predicted_parameters(config, vocab_size)
        made = sum(parameter.numel() for parameter in model.parameters())
        assert made == sum(each.numel for each in predicted), name
        hybrid = "hybrid_layer_pattern" in config.megatron
        assert type(model).__name__ == ("HybridModel" if hybrid else "GPTModel")


def run(*command: str) -> Done:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "SLURM_", "WANDB_"))}
    return ended([sys.executable, *command], 240, env=clean | {"OMP_NUM_THREADS": "1"})


@pytest.mark.usefixtures("parser")  # the first import of Megatron sets variables of torch
class TestLauncher:
    """A failing rank gives one error, with the right exit code, and soon."""

    def launch(self, monkeypatch, tmp_path, failure: str) -> int:
        monkeypatch.setattr(launch, "RANK", "tests.megatron.failing_worker")
        monkeypatch.setenv("FAILURE", failure)
        monkeypatch.chdir(ROOT)
        for name in ("RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        before = dict(os.environ)
        config = compose([*SMALL, "name=failing", f"runs_dir={tmp_path}"])
        code = launch.run(config, "command")
        assert dict(os.environ) == before, "a multirun's next run starts clean"
        return code

    def test_a_typed_error_is_its_message_and_code(self, monkeypatch, tmp_path, capfd):
        assert self.launch(monkeypatch, tmp_path, "typed") == 3
        captured = capfd.readouterr()
        assert captured.err.strip() == (
            "error: rank 1 is silent\n  expected: an answer\n  got:      none"
        )
        assert "2 ranks on cpu (gloo)" in captured.out

    def test_a_crash_shows_the_end_of_its_log(self, monkeypatch, tmp_path, capfd):
        assert self.launch(monkeypatch, tmp_path, "crash") == 1
        err = capfd.readouterr().err
        assert err.startswith("error: rank 0 failed: ZeroDivisionError: in the middle of it")
        assert "failing_worker.py" in err, "the traceback of the rank"
        assert "ChildFailedError" not in err

    def test_a_killed_rank(self, monkeypatch, tmp_path, capfd):
        assert self.launch(monkeypatch, tmp_path, "kill") == 128 + 9
        assert "error: rank 0 failed: Signal 9 (SIGKILL)" in capfd.readouterr().err


class TestRuns:
    """As a user starts them; test_pretrain and test_resume have the runs themselves."""

    def test_a_mistake_that_only_megatron_finds_is_one_error(self, tmp_path):
        said = ("tracking=off", f"runs_dir={tmp_path}", "megatron.overlap_param_gather=true")
        done = run(TRAIN, *SMALL, *said)
        assert done.returncode == 2
        assert done.stderr.count("error:") == 1
        assert "--overlap-param-gather only supported with" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    def test_torchrun_starts_it_too(self, tmp_path):
        """Rank 0 makes the folder, the others wait for it; a mistake is reported once."""
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN)
        common = (*SMALL, "tracking=off", "plugin=false", f"runs_dir={tmp_path}", "name=it")
        done = run(*torchrun, *common)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "iteration        3/       3" in done.stdout
        assert (tmp_path / "it" / preparation.CONFIG_FILE).is_file()

        done = run(*torchrun, *common, "data.mock=false", "data.vocab_size=null", "data.dir=none")
        assert done.returncode != 0
        assert done.stderr.count("error: there is no corpus in none") == 1
        assert not (tmp_path / "it.1").exists()


@pytest.mark.parametrize(("trains", "size"), [(True, 2), (False, 4)])
@pytest.mark.parametrize("mtp", [None, 1])
def test_what_a_last_stage_asks_of_a_batch(monkeypatch, trains, size, mtp):
    from megatron_sparse.megatron import batches

    args = SimpleNamespace(
        micro_batch_size=2,
        eval_micro_batch_size=4,
        seq_length=8,
        context_parallel_size=1,
        pipeline_model_parallel_size=2,
        create_attention_mask_in_dataloader=False,
        mtp_num_layers=mtp,
    )
    monkeypatch.setattr(batches, "get_args", lambda: args)
    place = {
        "is_pipeline_first_stage": False,
        "is_pipeline_last_stage": True,
        "get_tensor_model_parallel_rank": 1,
        "get_tensor_model_parallel_group": None,
        "get_tensor_model_parallel_src_rank": 0,
    }
    for name, value in place.items():
        monkeypatch.setattr(batches.mpu, name, lambda value=value: value)
    asked = {}
    monkeypatch.setattr(
        batches, "get_batch_on_this_tp_rank", lambda batch, **how: asked.update(how) or batch
    )
    with torch.set_grad_enabled(trains):
        batches.get_batch(None)
    assert (asked["micro_batch_size"], asked["mtp_on_this_rank"]) == (size, bool(mtp))


def test_a_model_gets_the_loss_mask(monkeypatch):
    from megatron_sparse.megatron import batches

    batch, model = {key: object() for key in batches.BATCH_KEYS}, MagicMock()
    monkeypatch.setattr(batches, "get_timers", MagicMock())
    monkeypatch.setattr(batches, "get_batch", lambda _: batch)
    batches.forward_step(None, model)
    assert model.call_args.kwargs["loss_mask"] is batch["loss_mask"]
