"""The `megatron:` section is checked as a whole before a rank starts; what passes really trains.

`SCRIPTS` has the flags of public training scripts, at small sizes: as a user carries them over
word by word, and as the refusal asks for.
"""

import contextlib
import io
import json
import math
import os

import pytest

from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.run.composition import compose
from tests.megatron.train_ranks import train_ranks
from tests.ranks import run_ranks

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
OPTIMIZER = {"adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0, "weight_decay": 0.1}
LLAMA = {
    **OPTIMIZER,
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_base": 500000,
    "disable_bias_linear": True,
    "init_method_std": 0.0134,
}
FP8 = {"fp8_format": "hybrid", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
SCRIPTS = {
    "gpt3 175b": {
        **SIZES,
        **OPTIMIZER,
        "max_position_embeddings": 64,
        "attention_backend": "auto",
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "rampup_batch_size": [16, 16, 5859375],
        "train_iters": 5,
        "init_method_std": 0.006,
        "fp16": True,
        "lr": 6e-5,
        "lr_decay_style": "cosine",
        "min_lr": 6e-6,
        "lr_warmup_fraction": 0.001,
        "lr_decay_iters": 430000,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "data_path": "corpus_text_document",
        "vocab_file": "vocab.json",
        "merge_file": "merges.txt",
        "split": "949,50,1",
        "log_interval": 100,
        "save_interval": 10000,
        "eval_interval": 1000,
        "save": "checkpoints",
        "load": "checkpoints",
        "eval_iters": 10,
        "tensorboard_dir": "logs",
    },
    "mixtral": {
        **SIZES,
        "ffn_hidden_size": 224,
        "num_query_groups": 2,
        "group_query_attention": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "num_experts": 2,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 2,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "sequence_parallel": True,
        "no_load_optim": True,
    },
    "llama3 8b": {
        **SIZES,
        **LLAMA,
        "train_samples": 1953125000,
        "lr_decay_samples": 1949218748,
        "lr_warmup_samples": 3906252,
        "decoupled_lr": 5e-4,
        "bf16": True,
        "grad_reduce_in_bf16": True,
        "calculate_per_token_loss": True,
    },
    "llama3 8b fp8": {**SIZES, **LLAMA, **FP8, "fp8_param_gather": True, "train_samples": 1000},
    "tp2 pp2 of Megatron's tests": {
        **SIZES,
        "train_iters": 2000,
        "transformer_impl": "transformer_engine",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "deterministic_mode": True,
        "attention_softmax_in_fp32": True,
        "dist_ckpt_strictness": "log_all",
    },
}
MODEL = [f"model.{name}={value}" for name, value in SIZES.items()]
ROPE = ["model.position_embedding_type=rope", "model.tied_embeddings=false"]
FOUR = ["training.tensor_parallel=2", "training.pipeline_parallel=2", "cluster.ranks_per_node=4"]
CONTEXT = [
    "cluster.ranks_per_node=2",
    "training.micro_batch_size=1",
    "training.global_batch_size=1",  # fits only with the next one
    "megatron.context_parallel_size=2",
]
SHARDED = ["training.overlap_grad_reduce=true", "training.use_distributed_optimizer=true"]
OVERRIDES = {
    "gpt3 175b": [*MODEL, *FOUR, "training.save_interval=10000"],
    "mixtral": [*MODEL, *ROPE, *SHARDED, "model.num_query_groups=2"],
    "llama3 8b": [*MODEL, *ROPE, "training.precision=bf16"],
    "llama3 8b fp8": [*MODEL, *ROPE, "training.precision=bf16"],
    "tp2 pp2 of Megatron's tests": [*MODEL, *FOUR],
}
"""What each script says in keys of our own."""
NOT_HERE = {
    "llama3 8b fp8": ("fp8_format=hybrid needs Transformer Engine",),
    "tp2 pp2 of Megatron's tests": (
        "transformer_impl=transformer_engine needs Transformer Engine",
        "sequence_parallel=True: sequence parallel not supported by torch LayerNorm",
    ),
}
"""What of a script a machine without a GPU cannot do."""
LEFT_OUT = ("lr_decay_samples", "fp8_param_gather", "rampup_batch_size", "vocab_file", "merge_file")
"""Beginnings of what the first refusal asks to leave out."""


TRAINED = {
    "gpt3 175b, tp2 pp2": (
        OVERRIDES["gpt3 175b"],
        SCRIPTS["gpt3 175b"]
        | SCRIPTS["tp2 pp2 of Megatron's tests"]
        | {"transformer_impl": "local", "sequence_parallel": None},
    ),
    **{name: (OVERRIDES[name], SCRIPTS[name]) for name in ("mixtral", "llama3 8b")},
}
"""Overrides and section of what trains without Transformer Engine."""
SMALL = ["data.vocab_size=512", "training.micro_batch_size=1", "training.global_batch_size=2"]
SMALL += ["compression.warmup_iters=0", "compression.ramp_iters=0", "tracking=off"]
SMALL += ["compression.keep_below_numel=256", "training.iterations=2", "training.save_interval=0"]
SMALL += ["scheme=agsparse"]


def _composed(overrides, section):
    from megatron_sparse.run import preparation

    config = compose(["data=mock", "cluster.device=cpu", "training.iterations=5", *overrides])
    config.megatron.clear()
    config.megatron.update(section)
    return preparation.decide(config)


def _message(overrides, section):
    """The refusal of a run with this section, or None."""
    from megatron_sparse.megatron import section as checks
    from megatron_sparse.run import preparation

    try:
        config = _composed(overrides, section)
        checks.check(config, 512, None, preparation.rank_environment(config))
    except MegatronSparseError as error:
        return str(error)
    return None


def _without_refused(section):
    from megatron_sparse.megatron.arguments import OWNED_FLAGS

    return {
        name: value
        for name, value in section.items()
        if name not in OWNED_FLAGS and not name.startswith(LEFT_OUT)
    }


def _all(rank, world_size, folder):
    blend, yaml = f"{folder}/blend", f"{folder}/model.yaml"
    with open(blend, "w") as file:
        file.write("1.0 corpus")
    with open(yaml, "w") as file:
        file.write("num_layers: 3")
    alone = {
        "rope": {"use_rotary_position_embeddings": True, "swiglu": True},
        "data": {"data_args_path": blend},
        "yaml": {"yaml_cfg": yaml},
        "checkpoint": {"use_checkpoint_args": True},
        "samples": {"lr_decay_samples": 1000},
        "layers": {"apply_layernorm_1p": True, "context_parallel_size": 2, "rope_type": "yarn"},
        "fine": {"swiglu": True, "adam_beta2": 0.95, "no_one_logger": False},
    }
    return {
        "whole": {name: _message([], section) for name, section in SCRIPTS.items()},
        "carried over": {
            name: _message(OVERRIDES[name], _without_refused(section))
            for name, section in SCRIPTS.items()
        },
        "alone": {name: _message([], section) for name, section in alone.items()}
        | {
            "experts": _message(FOUR, {"num_experts": 2, "disable_bias_linear": True}),
            "context": _message(CONTEXT, {"context_parallel_size": 2}),
        },
    }


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    return run_ranks(_all, 1, str(tmp_path_factory.mktemp("section")), timeout_s=500.0)[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_message_names_every_flag_of_a_public_script_that_is_refused(messages, name):
    from megatron_sparse.megatron.arguments import OWNED_FLAGS

    message = messages["whole"][name]
    for flag in SCRIPTS[name]:
        if flag in OWNED_FLAGS:
            assert f"set {OWNED_FLAGS[flag]}" in message
        elif flag in ("fp8_param_gather", "rampup_batch_size"):
            assert f"megatron.{flag} " in message
        elif flag == "overlap_param_gather":  # fits to an owned flag of the script
            assert flag not in message
        elif flag == "sequence_parallel":
            tensor_parallel = "tensor_model_parallel_size" in SCRIPTS[name]
            assert (f"{flag}=True: sequence parallel not supp" in message) == tensor_parallel


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_them_the_script_starts_or_its_machine_is_wrong(messages, name):
    message = messages["carried over"][name]
    if name in NOT_HERE:
        assert all(words in message for words in NOT_HERE[name])
    else:
        assert message is None


def _train(rank, folder, overrides, section):
    """What the launcher and a rank do, in the group that is there already."""
    from megatron_sparse.megatron import training
    from megatron_sparse.run import preparation

    config = _composed([*overrides, *SMALL], {"num_workers": 0, **_without_refused(section)})
    os.environ |= preparation.rank_environment(config)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.cluster.world_size)}
    training._leave = lambda: None
    with contextlib.redirect_stdout(io.StringIO()):
        training.train(config, folder)


@pytest.mark.parametrize("name", TRAINED)
def test_a_public_script_trains(tmp_path, name):
    overrides, section = TRAINED[name]
    train_ranks(_train, 4 if FOUR[-1] in overrides else 2, tmp_path, overrides, section)
    lines = [json.loads(line) for line in (tmp_path / "breakdown.jsonl").open()]
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert line["loss"] == pytest.approx(math.log(512), rel=0.1)
        assert line["wire_bytes"] <= line["dense_bytes"] / 2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("rope", "changes what model.position_embedding_type has set"),
        ("data", "changes what data.prefix has set"),
        ("yaml", "Megatron refuses megatron.yaml_cfg"),
        ("checkpoint", "--use-checkpoint-args requires --load"),
        ("samples", "iteration-based learning rate decay"),
        ("layers", "apply_layernorm_1p=True: zero_centered_gamma not supported by torch LayerNorm"),
        ("layers", "context_parallel_size=2: context parallelism needs Transformer Engine"),
        ("experts", "num_experts=2: experts with tensor parallelism need sequence_parallel"),
        ("context", "context_parallel_size=2: context parallelism needs Transformer Engine"),
        ("layers", 'rope_type=yarn: Common attention only support rope_type="rope"'),
    ],
)
def test_a_flag_that_changes_a_key_of_ours_is_found_by_what_megatron_makes_of_it(
    messages, case, said
):
    assert said in messages["alone"][case]
    assert "swiglu" not in messages["alone"][case]


def test_other_flags_pass(messages):
    assert messages["alone"]["fine"] is None


@pytest.mark.parametrize("flag", ["fim_data", "sft", "check_for_spiky_loss"])
def test_a_flag_that_only_megatrons_own_script_follows_is_refused(flag):
    from megatron_sparse.megatron.section import quick_errors

    (error,) = quick_errors(compose(["data=mock", f"megatron.{flag}=true"]))
    assert f"megatron.{flag} does not work" in str(error)
    assert quick_errors(compose(["data=mock", f"megatron.{flag}=null"])) == []
