"""From a `RunConfig` to the command line of Megatron-LM.

Flags are a dict in the spelling of the `megatron:` section (`num_layers: 4`), where true is a bare
flag. Keys of the `megatron:` section may change flags that this module derives from no key of ours,
such as those for missing kernels; `owned_errors` refuses the others. Megatron's own parser defines
the flags' names and values.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from megatron_sparse.config.model import ModelConfig
from megatron_sparse.config.run import RunConfig, TrainingConfig
from megatron_sparse.errors import CheckpointError, ConfigError
from megatron_sparse.megatron.checkpoint_folder import TRACKER, with_temporary

_OF_OTHER_NAMES = (
    *("tied_embeddings", "dropout", "iterations", "precision", "tensor_parallel"),
    *("pipeline_parallel", "save_signal"),
)
"""Keys of the two sections that Megatron's flags call otherwise."""
OWNED_FLAGS = {
    **{
        field.name: f"{section}.{field.name}"
        for section, kind in (("model", ModelConfig), ("training", TrainingConfig))
        for field in dataclasses.fields(kind)
        if field.name not in _OF_OTHER_NAMES
    },
    "encoder_num_layers": "model.num_layers",
    "encoder_seq_length": "model.seq_length",
    "group_query_attention": "model.num_query_groups",
    "untie_embeddings_and_output_weights": "model.tied_embeddings",
    "hidden_dropout": "model.dropout",
    "batch_size": "training.micro_batch_size",
    "train_iters": "training.iterations",
    "train_samples": "training.iterations",
    "warmup": "training.lr_warmup_iters",
    "lr_warmup_fraction": "training.lr_warmup_iters",
    "lr_warmup_samples": "training.lr_warmup_iters",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "tensor_model_parallel_size": "training.tensor_parallel",
    "model_parallel_size": "training.tensor_parallel",
    "pipeline_model_parallel_size": "training.pipeline_parallel",
    "persistent_save_interval": "training.save_interval",
    "exit_signal": "training.save_signal",
    "exit_signal_handler": "training.save_signal",
    "save": "training.save_interval",
    "data_path": "data.prefix",
    "mock_data": "data.mock",
    "split": "data.split",
    "distributed_backend": "cluster.device",
    "tensorboard_dir": "tracking.tensorboard",
    "wandb_project": "tracking.wandb_project",
    "wandb_exp_name": "name",
    "wandb_save_dir": "runs_dir",
}
"""Megatron's flags that keys of our own sections set, with these keys; with `_`, without dashes.

Such a flag in the `megatron:` section would train another model, or train it otherwise, than the
run's own keys say. Deprecated spellings and flags that ask for the same in another way are here
too.
"""
VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""
PRECISION_FLAGS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
CHECKPOINTS = "checkpoints"
"""Where a run keeps its checkpoints, in its folder."""


def model_flags(model: ModelConfig) -> dict[str, object]:
    """The model as Megatron's flags, keyed as in the `megatron:` section; without vocabulary."""
    flags: dict[str, object] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.num_attention_heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions,
        "position_embedding_type": model.position_embedding_type,
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
    }
    if model.query_groups != model.num_attention_heads:
        flags["group_query_attention"] = True
        flags["num_query_groups"] = model.query_groups
    if not model.tied_embeddings:
        flags["untie_embeddings_and_output_weights"] = True
    return flags


def derived_flags(
    config: RunConfig, run_dir: Path, *, vocab_size: int, data_prefix: Path | None
) -> dict[str, object]:
    """The Megatron flags that our own sections imply.

    Args:
        config: the run; `cluster.device` must be decided.
        run_dir: where TensorBoard's, W&B's files and checkpoints go.
        vocab_size: of the data.
        data_prefix: of the indexed dataset; None takes Megatron's mock data.
    """
    training = config.training
    flags = model_flags(config.model)
    flags |= PRECISION_FLAGS[training.precision] | _kernel_flags(config.cluster.device)
    hybrid = config.megatron.get("hybrid_layer_pattern") is not None
    # Megatron's own layers for a hybrid model need Transformer Engine.
    if hybrid and flags.get("transformer_impl") == "local":
        flags["spec"] = ["megatron_sparse.megatron.local_hybrid", "local_stack_spec"]
    flags |= {
        "tensor_model_parallel_size": training.tensor_parallel,
        "pipeline_model_parallel_size": training.pipeline_parallel,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": config.global_batch_size,
        "train_iters": training.iterations,
        "lr": training.lr,
        "min_lr": training.min_lr,
        "lr_decay_style": "cosine",
        "lr_decay_iters": training.iterations,
        "lr_warmup_iters": training.lr_warmup,
        "weight_decay": 0.1,  # of the GPT and StarCoder papers; Megatron's default is 0.01
        "seed": training.seed,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": vocab_size,
        "split": config.data.split,
        "log_interval": 10,  # Megatron's own 100 is too long for a first look
        # A package of NVIDIA's that is not public; Megatron asks for it at every start.
        "no_one_logger": True,
        # Megatron has no switch for validation: its interval may not be 0, its iterations may.
        "eval_interval": training.eval_interval or training.iterations,
        "eval_iters": training.eval_iters if training.eval_interval else 0,
    }
    if data_prefix is None:
        flags["mock_data"] = True
    else:
        flags["data_path"] = str(data_prefix)
    for name in ("overlap_grad_reduce", "use_distributed_optimizer"):
        if getattr(training, name):
            flags[name] = True
    return flags | _checkpoint_flags(config, run_dir) | _tracking_flags(config, run_dir)


def _kernel_flags(device: str) -> dict[str, object]:
    """The backend's flag, and those that turn off features this machine has no kernels for."""
    if device == "cpu":
        return {
            "distributed_backend": "gloo",
            "transformer_impl": "local",
            **dict.fromkeys(_OF_APEX_OR_TE, True),  # turn off what needs those packages
            "no_bias_gelu_fusion": True,
            "no_bias_dropout_fusion": True,
        }
    flags: dict[str, object] = {"distributed_backend": "nccl"}
    if find_spec("transformer_engine") is None:
        flags["transformer_impl"] = "local"
        if find_spec("apex") is None:
            flags |= dict.fromkeys(_OF_APEX_OR_TE, True)
    return flags


_OF_APEX_OR_TE = (
    "no_persist_layer_norm",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_rope_fusion",
)


def _checkpoint_flags(config: RunConfig, run_dir: Path) -> dict[str, object]:
    """Where and when Megatron saves, and what it loads: the run's own checkpoint comes first."""
    own_folder = run_dir / CHECKPOINTS
    flags: dict[str, object] = {}
    save_signal = config.training.save_signal
    if config.training.save_interval or save_signal:
        # With `save` Megatron saves at the end, too, and asks for the interval there.
        interval = config.training.save_interval or config.training.iterations
        flags |= {"save": str(own_folder), "save_interval": interval}
    if save_signal:
        flags |= {"exit_signal_handler": True, "exit_signal": save_signal}
    if has_checkpoint(config, own_folder):
        flags["load"] = str(own_folder)
    elif config.training.load is not None:
        flags["load"] = config.training.load
    return flags


def passed_flags(config: RunConfig, *, own: bool) -> dict[str, Any]:
    """The `megatron:` section, for `command_line`.

    Args:
        config: the run.
        own: whether the run goes on from its own checkpoint. What is about the one of
            `training.load` is then left out: with `finetune` Megatron would begin at iteration 0
            again, with `no_load_optim` without the run's own optimizer and schedule.
    """
    left_out: tuple[str, ...] = ("finetune",) if own else ()
    if own and config.training.load is not None:  # without one they are about the own checkpoint
        left_out += ("no_load_optim", "no_load_rng")
    return {key: value for key, value in config.megatron.items() if key not in left_out}


def check_load(config: RunConfig) -> None:
    """Checks that `training.load` has a checkpoint; else Megatron would start from scratch.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = config.training.load
    if folder is not None and not has_checkpoint(config, Path(folder)):
        raise CheckpointError(
            "there is no checkpoint to load",
            expected=f"{TRACKER} in {folder}",
            got="no such file",
            remedy="set training.load to a folder that Megatron saved to, or to null",
        )


def has_checkpoint(config: RunConfig, folder: Path) -> bool:
    """Whether Megatron finished saving a checkpoint here, or a temporary one in its own folder."""
    return any((each / TRACKER).is_file() for each in with_temporary(folder, config.megatron))


def _tracking_flags(config: RunConfig, run_dir: Path) -> dict[str, object]:
    """Where Megatron writes TensorBoard's files, and its names for W&B, for those that are on."""
    flags: dict[str, object] = {}
    if config.tracking.tensorboard:
        flags |= {"tensorboard_dir": str(run_dir / "tensorboard"), "tensorboard_log_interval": 1}
    if config.tracking.wandb != "disabled":
        flags |= {
            "wandb_project": config.tracking.wandb_project,
            "wandb_exp_name": config.name,
            # wandb makes a folder `wandb` in it.
            "wandb_save_dir": str(run_dir),
        }
    return flags


class _Parser(argparse.ArgumentParser):
    """Megatron's parser, with a typed error in place of 1,500 lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"Megatron refuses a flag: {message}",
            remedy="correct the key of this name, most likely in the megatron: section",
        )


def megatron_parser() -> argparse.ArgumentParser:
    """The parser that `megatron.training` reads its command line with. Imports megatron."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(_Parser(prog="megatron", allow_abbrev=False, add_help=False))


def owned_dests(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Names in Megatron's arguments of what a key of ours owns, each with that key."""
    actions = _actions(parser)
    owned = {_flag(name): key for name, key in OWNED_FLAGS.items()}
    return {actions[flag].dest: key for flag, key in owned.items() if flag in actions}


def owner(flag: str, value: object) -> str | None:
    """The key of our own sections that sets this flag of the `megatron:` section; None if none."""
    name = flag.replace("-", "_")
    if name == "data_path" and isinstance(value, list) and len(value) > 1:
        return None  # a blend, which no key of ours can say
    return OWNED_FLAGS.get(name)


def owned_errors(megatron: Mapping[str, Any]) -> list[ConfigError]:
    """An error for each flag in the `megatron:` section that a key of ours owns; names the key."""
    return [
        ConfigError(
            f"megatron.{flag} is set by {key}",
            expected=f"the value in {key}",
            got=f"megatron.{flag}={value}",
            remedy=f"leave megatron.{flag} out and set {key}",
        )
        for flag, value in megatron.items()
        if (key := owner(flag, value)) is not None
    ]


def refusal_of(error: Exception) -> ConfigError:
    """What Megatron's parser or validation has raised, as a typed error."""
    if isinstance(error, ConfigError):
        return error
    said = str(error)
    if not said:  # An assertion without a message: its source line.
        said = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    return ConfigError(
        "Megatron refuses these settings",
        expected="settings that fit together",
        got=said,
        remedy="change the setting that the message names, or its key in the megatron: section",
    )


def command_line(
    derived: Mapping[str, object], passed: Mapping[str, Any], parser: argparse.ArgumentParser
) -> list[str]:
    """Merges derived and passed flags; returns them as a command line that `parser` takes.

    Args:
        derived: from our sections.
        passed: the `megatron:` section. Null removes a derived flag, and so does the opposite flag
            (`rope_fusion: true`, `no_one_logger: false`).
        parser: from `megatron_parser`.

    Raises:
        ConfigError: a key is not a Megatron flag (names the closest), or its value is refused.
    """
    actions = _actions(parser)
    # Destination in the parsed arguments -> words; of two keys for one the later, `passed`, wins.
    chosen: dict[str, list[str]] = {}
    for key, value in (*derived.items(), *passed.items()):
        if not _cancels(key, value, actions, chosen):
            flag, action = _look_up(key, value, actions)
            chosen[action.dest] = [flag, *_texts(key, value, action)]
    arguments = list(itertools.chain.from_iterable(chosen.values()))
    try:
        parser.parse_args(arguments)
    except (AssertionError, ValueError, KeyError) as error:  # of Megatron's own argument types
        parser.error(f"{type(error).__name__}: {error}")
    return arguments


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's long options, with their dashes, and what each does."""
    return {
        option: action
        for action in parser._actions  # argparse has no public list of its options
        for option in action.option_strings
        if option.startswith("--")
    }


def _flag(key: str, prefix: str = "--") -> str:
    return prefix + key.replace("_", "-")


def _cancels(
    key: str, value: object, actions: Mapping[str, argparse.Action], chosen: dict[str, list[str]]
) -> bool:
    """Removes from `chosen` the flag that `key: value` cancels.

    Returns whether that is all: the command line then needs no flag for the key.
    """
    action, opposite = actions.get(_flag(key)), actions.get(_flag(key, "--no-"))
    if action is not None and value is None:  # null leaves the flag out
        chosen.pop(action.dest, None)
        return True
    if action is not None and opposite is None and value is False:
        # Megatron has `--key` alone: without one to cancel, `_look_up` refuses false.
        return chosen.pop(action.dest, None) is not None
    if action is None and opposite is not None and value is True:
        chosen.pop(opposite.dest, None)  # Megatron has `--no-key` alone: true is the default
        return True
    return False


def _look_up(
    key: str, value: object, actions: Mapping[str, argparse.Action]
) -> tuple[str, argparse.Action]:
    """Returns the flag for `key: value`, and the parser's action for it.

    Raises:
        ConfigError: Megatron has no such flag; names the closest ones.
    """
    flag = _flag(key, "--no-" if value is False else "--")
    if flag in actions:
        return flag, actions[flag]
    if value is False and _flag(key) in actions:
        raise ConfigError(
            f"megatron.{key} cannot be false",
            expected=f"a flag {flag}, which Megatron does not have",
            got="false",
            remedy="leave the key out: without the flag it is off",
        )
    names = [option.removeprefix("--").replace("-", "_") for option in actions]
    close = dict.fromkeys(  # each key once: several flags may have the same
        OWNED_FLAGS.get(name, f"megatron.{name}")
        for name in difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    )
    raise ConfigError(
        f"megatron.{key} is no flag of Megatron-LM",
        expected="the name of a flag without its dashes, with _ for -",
        got=key,
        remedy=f"close to it: {', '.join(close)}" if close else "leave it out",
    )


def _texts(key: str, value: object, action: argparse.Action) -> list[str]:
    """The words that follow the flag: none for a bare one, else its value or values.

    Raises:
        ConfigError: the flag does not take such a value.
    """
    is_bare = action.nargs == 0
    if is_bare and isinstance(value, bool):
        return []
    if not is_bare and not isinstance(value, bool | Mapping | None):
        items = value if isinstance(value, list | tuple) else [value]
        return [str(item) for item in items]
    raise ConfigError(
        f"megatron.{key} does not take this value",
        expected="true or false" if is_bare else "a value, or a list of values",
        got=repr(value),
        remedy=f"see the help of {action.option_strings[0]}: {action.help or 'none'}",
    )
