"""From a `RunConfig` to the command line of Megatron-LM.

*Derived* flags follow from keys of our own sections, *passed* flags from the `megatron:` section.
Both are dicts from Megatron's name with `_` and without dashes to the value (`num_layers: 4`); true
is a flag without a value. A key of ours *owns* the flags in `OWNED_FLAGS`: `owned_errors` refuses
to pass them. A passed flag may replace any other derived one, such as those for missing kernels.
Megatron's own parser defines the flags' names and values.
"""

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
"""Keys of `ModelConfig` and `TrainingConfig` whose flags have other names than the keys."""
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
"""Megatron's flag -> the key of our own sections that owns it.

Passed in the `megatron:` section, such a flag would contradict its key. Deprecated spellings are
here too, and flags that ask for the same in another way.
"""
VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""
PRECISION_FLAGS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, inside the run's folder."""


def model_flags(model: ModelConfig) -> dict[str, object]:
    """Derives the model's flags, except for the vocabulary's size, which the data decide."""
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
    """Derives all flags of a run from our own sections.

    Args:
        config: the run; `cluster.device` is `cpu` or `cuda`, no longer `auto`.
        run_dir: folder for checkpoints and the files of TensorBoard and W&B.
        vocab_size: number of token ids in the data.
        data_prefix: path of the indexed dataset without suffix; None takes Megatron's mock data.
    """
    training = config.training
    flags = model_flags(config.model)
    flags |= PRECISION_FLAGS[training.precision] | _kernel_flags(config.cluster.device)
    hybrid = config.megatron.get("hybrid_layer_pattern") is not None
    # Megatron builds hybrid models from layers of Transformer Engine; without it we bring our own.
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
        "log_interval": 10,  # iterations; Megatron's default of 100 is long for a first look
        # Megatron would look for NVIDIA's package one_logger, which is not public, at every start.
        "no_one_logger": True,
        # Validation is off with 0 iterations. The interval may not be 0: Megatron divides by it.
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
    """Sets the communication backend, and turns off features whose kernels are not installed."""
    if device == "cpu":
        return {
            "distributed_backend": "gloo",
            "transformer_impl": "local",
            **dict.fromkeys(_WITHOUT_APEX_AND_TE, True),
            "no_bias_gelu_fusion": True,
            "no_bias_dropout_fusion": True,
        }
    flags: dict[str, object] = {"distributed_backend": "nccl"}
    if find_spec("transformer_engine") is None:
        flags["transformer_impl"] = "local"
        if find_spec("apex") is None:  # Apex would have the kernels of these features too
            flags |= dict.fromkeys(_WITHOUT_APEX_AND_TE, True)
    return flags


_WITHOUT_APEX_AND_TE = (
    "no_persist_layer_norm",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_rope_fusion",
)


def _checkpoint_flags(config: RunConfig, run_dir: Path) -> dict[str, object]:
    """Derives where Megatron saves, when, and what it loads: the run's own checkpoint if any."""
    own_folder = run_dir / CHECKPOINTS
    flags: dict[str, object] = {}
    save_signal = config.training.save_signal
    if config.training.save_interval or save_signal:
        # `save` requires an interval. Megatron also saves at the end: `iterations` adds no save.
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
    """The passed flags: the `megatron:` section, without flags for a checkpoint that is not loaded.

    Args:
        config: the run.
        own: whether the run resumes from its own checkpoint in place of `training.load`. Flags for
            loading the latter are then left out: `finetune` would make Megatron begin at iteration
            0 again, `no_load_optim` would drop the run's own optimizer and schedule.
    """
    left_out: tuple[str, ...] = ("finetune",) if own else ()
    if own and config.training.load is not None:  # else the user means the run's own checkpoint
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
    """Derives the flags of TensorBoard and Weights & Biases, if `tracking` switches them on."""
    flags: dict[str, object] = {}
    if config.tracking.tensorboard:
        flags |= {"tensorboard_dir": str(run_dir / "tensorboard"), "tensorboard_log_interval": 1}
    if config.tracking.wandb != "disabled":
        flags |= {
            "wandb_project": config.tracking.wandb_project,
            "wandb_exp_name": config.name,
            # The library writes into a subfolder `wandb`.
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
    """Attribute of Megatron's parsed arguments -> the key of ours that owns its flag."""
    actions = _actions(parser)
    owned = {_flag(name): key for name, key in OWNED_FLAGS.items()}
    return {actions[flag].dest: key for flag, key in owned.items() if flag in actions}


def owner(flag: str, value: object) -> str | None:
    """The key of ours that owns a flag of the `megatron:` section; None if no key does."""
    if flag == "data_path" and isinstance(value, list) and len(value) > 1:
        return None  # a blend of datasets: the key `data.prefix` names only one
    return OWNED_FLAGS.get(flag)


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
    """Converts an exception of Megatron's parser or validation to a `ConfigError`."""
    if isinstance(error, ConfigError):
        return error
    message = str(error)
    if not message:  # an assertion without a message: show its source line
        message = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    return ConfigError(
        "Megatron refuses these settings",
        expected="settings that fit together",
        got=message,
        remedy="change the setting that the message names, or its key in the megatron: section",
    )


def command_line(
    derived: Mapping[str, object], passed: Mapping[str, Any], parser: argparse.ArgumentParser
) -> list[str]:
    """Merges derived and passed flags into the words of a command line that `parser` accepts.

    Args:
        derived: the derived flags.
        passed: the `megatron:` section. Null removes a derived flag, and so does the opposite flag
            (`rope_fusion: true`, `no_one_logger: false`).
        parser: from `megatron_parser`.

    Raises:
        ConfigError: a key is not a Megatron flag (names the closest), or its value is refused.
    """
    actions = _actions(parser)
    # Attribute of the parsed arguments -> the words that set it. Passed flags replace derived ones.
    chosen: dict[str, list[str]] = {}
    for key, value in (*derived.items(), *passed.items()):
        if not _cancels(key, value, actions, chosen):
            flag, action = _look_up(key, value, actions)
            chosen[action.dest] = [flag, *_value_words(key, value, action)]
    arguments = list(itertools.chain.from_iterable(chosen.values()))
    try:
        parser.parse_args(arguments)
    except (AssertionError, ValueError, KeyError) as error:  # from Megatron's argument types
        parser.error(f"{type(error).__name__}: {error}")  # `_Parser` raises a ConfigError
    return arguments


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's long options with their dashes (`--lr`), each with its argparse action."""
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
    """Removes from `chosen` (`dest` -> words to pass) the flag that `key: value` cancels.

    Returns True if this settles the key; False if the key needs a flag of its own.
    """
    action, opposite = actions.get(_flag(key)), actions.get(_flag(key, "--no-"))
    if action is not None and value is None:  # `key: null` removes `--key`
        chosen.pop(action.dest, None)
        return True
    if action is not None and opposite is None and value is False:
        # Megatron has no `--no-key`: false removes a chosen `--key`; else `_look_up` raises.
        return chosen.pop(action.dest, None) is not None
    if action is None and opposite is not None and value is True:
        chosen.pop(opposite.dest, None)  # Megatron has only `--no-key`: true removes it
        return True
    return False


def _look_up(
    key: str, value: object, actions: Mapping[str, argparse.Action]
) -> tuple[str, argparse.Action]:
    """Returns the flag for `key: value` (`--key` or `--no-key`), and the parser's action for it.

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
    close = dict.fromkeys(  # without repetition: one key may own several of the close flags
        OWNED_FLAGS.get(name, f"megatron.{name}")
        for name in difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    )
    raise ConfigError(
        f"megatron.{key} is no flag of Megatron-LM",
        expected="the name of a flag without its dashes, with _ for -",
        got=key,
        remedy=f"close to it: {', '.join(close)}" if close else "leave it out",
    )


def _value_words(key: str, value: object, action: argparse.Action) -> list[str]:
    """The words that follow the flag: none for a flag without value, else its value or values.

    Raises:
        ConfigError: the flag does not take such a value.
    """
    is_bare = action.nargs == 0  # a flag that takes no value
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
