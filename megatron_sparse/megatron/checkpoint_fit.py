"""Compares a checkpoint with the run that is to resume from it, before ranks start.

Megatron saves its parsed arguments in each checkpoint: here `saved`; the run's are `wanted`. It
refuses some differences with an assertion in every rank, and fails over others with shapes or keys
that do not match. Here each is one error that names the keys to change. Only the format torch_dist
is compared.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron import arguments

logger = logging.getLogger("megatron_sparse")

SHAPE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"),
    *("position_embedding_type", "max_position_embeddings"),
    *("untie_embeddings_and_output_weights", "vocab_size", "kv_channels", "add_bias_linear"),
    *("normalization", "swiglu", "num_experts"),
)
"""Megatron's arguments that decide the shapes of parameters."""
SCHEDULE = (
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters"),
    *("global_batch_size", "weight_decay"),
)
"""Megatron's arguments that decide the learning-rate schedule, which it counts in samples."""
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
OPTIMIZER = ("optimizer", "use_distributed_optimizer")
_KEYS = arguments.OWNED_FLAGS | {
    "add_bias_linear": "megatron.disable_bias_linear",
    "lr_decay_iters": "training.iterations",
}
"""Megatron's argument -> the key of our configuration that sets it; else `megatron.NAME` does."""
_NEGATED = ("untie_embeddings_and_output_weights", "add_bias_linear")
"""Arguments that are true where their key is false."""
_RESIDUAL = "megatron_sparse.residual."
_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")


def check(config: RunConfig, vocab_size: int, checkpoint: Path) -> None:
    """Refuses a checkpoint that this run cannot resume from. Imports megatron.

    `cluster.device` must be `cpu` or `cuda`, no longer `auto`. `checkpoint` is the folder of one
    complete checkpoint.

    Raises:
        CheckpointError: run and checkpoint do not fit together; names the keys.
        ConfigError: a key of the `megatron:` section is wrong.
    """
    state = common_state(checkpoint)
    saved = state.get("args")
    if saved is None:
        logger.warning("%s is not compared: its --ckpt-format is not torch_dist", checkpoint)
        return
    wanted = wanted_arguments(config, vocab_size)
    _check_shape(saved, wanted, checkpoint)
    if getattr(wanted, "finetune", False):
        return  # Megatron then loads only the parameters
    _check_parallel(config, saved, wanted, checkpoint)
    loads_optimizer = not getattr(wanted, "no_load_optim", False)
    if loads_optimizer and not getattr(saved, "no_save_optim", False):
        _check_optimizer(saved, wanted, checkpoint, state)
        _check_schedule(config, saved, wanted, checkpoint)


def common_state(checkpoint: Path) -> Mapping[str, Any]:
    """The checkpoint's state that is the same on all ranks; empty if its format is not torch_dist.

    Here: Megatron's arguments (`args`) and the optimizer's sharding (`content_metadata`).
    """
    from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    if not check_is_distributed_checkpoint(str(checkpoint)):
        return {}
    return load_common_state_dict(str(checkpoint))


def wanted_arguments(config: RunConfig, vocab_size: int) -> argparse.Namespace:
    """The run's arguments as Megatron's parser returns them, before Megatron validates them."""
    derived = arguments.derived_flags(config, Path(), vocab_size=vocab_size, data_prefix=None)
    parser = arguments.megatron_parser()
    wanted = parser.parse_args(arguments.command_line(derived, config.megatron, parser))
    if not wanted.group_query_attention:  # each head is a group, which the parser does not set
        wanted.num_query_groups = wanted.num_attention_heads
    return wanted


def _differences(
    names: Sequence[str], saved: argparse.Namespace, wanted: argparse.Namespace
) -> dict[str, tuple[object, object]]:
    """Compares arguments; returns key -> (checkpoint's value, run's value) where they differ.

    `names` are Megatron's arguments to compare; those that are None on one side are left out.
    """
    found = {}
    for name in names:
        before, now = getattr(saved, name, None), getattr(wanted, name, None)
        is_known = before is not None and now is not None
        if not is_known or before == now:
            continue
        if name in _NEGATED:  # show the key's value, which is the opposite
            before, now = not before, not now
        found[_KEYS.get(name, f"megatron.{name}")] = (before, now)
    return found


def _error(
    what: str, found: Mapping[str, tuple[object, object]], remedy: str, checkpoint: Path
) -> CheckpointError:
    """Makes the error for the differences `found`; `what` begins its message."""
    return CheckpointError(
        f"{what}: {checkpoint}",
        expected=", ".join(f"{key}={_text(before)}" for key, (before, _) in found.items()),
        got=", ".join(f"{key}={_text(now)}" for key, (_, now) in found.items()),
        remedy=remedy,
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_shape(saved: Any, wanted: Any, checkpoint: Path) -> None:
    """Refuses a checkpoint of a model with other shapes of parameters."""
    found = _differences(SHAPE, saved, wanted)
    if wanted.position_embedding_type != "learned_absolute":
        # Only learned position embeddings have a table whose size depends on this key.
        found.pop("model.max_position_embeddings", None)
    if found:
        raise _error(
            "the checkpoint holds another model",
            found,
            "set the keys as the checkpoint has them; to train this model from scratch set "
            "resume=never (or another name) and training.load=null",
            checkpoint,
        )


def _check_parallel(config: RunConfig, saved: Any, wanted: Any, checkpoint: Path) -> None:
    """Refuses other model-parallel sizes if residuals are loaded: they fit only the saved sizes."""
    found = _differences(PARALLEL, saved, wanted)
    takes_residuals = config.plugin and config.compression.residual_checkpoint != "none"
    if found and takes_residuals and _has_residuals(checkpoint):
        raise _error(
            "the checkpoint's residuals belong to another model-parallel layout",
            found,
            "set the keys as the checkpoint has them, or start with empty residuals: "
            "compression.residual_checkpoint=none",
            checkpoint,
        )


def _has_residuals(checkpoint: Path) -> bool:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return any(name.startswith(_RESIDUAL) for name in names)


def _check_optimizer(saved: Any, wanted: Any, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose optimizer state this run's optimizer cannot load.

    `state` is the result of `common_state`.
    """
    if wanted.optimizer not in ("adam", "sgd"):
        return  # Muon and others: Megatron changes their arguments before it saves them
    found = _differences(OPTIMIZER, saved, wanted)
    if not wanted.use_distributed_optimizer:
        # An unsharded optimizer has fp32 main weights only if the model's are fp16 or bf16.
        before, now = _precision(saved), _precision(wanted)
        if (before == "fp32") != (now == "fp32"):
            found["training.precision"] = (before, now)
    # The distributed optimizer's state fits other parallel sizes only in some formats.
    sharding = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if wanted.use_distributed_optimizer and sharding and sharding not in _RESHARDABLE:
        found |= _differences(PARALLEL, saved, wanted)
    if found:
        raise _error(
            "the checkpoint's optimizer state does not fit this run",
            found,
            "set the keys as the checkpoint has them, or start with a fresh optimizer: "
            "megatron.no_load_optim=true megatron.no_load_rng=true",
            checkpoint,
        )


def _precision(megatron_arguments: Any) -> str:
    if megatron_arguments.fp16:
        return "fp16"
    return "bf16" if megatron_arguments.bf16 else "fp32"


def _check_schedule(config: RunConfig, saved: Any, wanted: Any, checkpoint: Path) -> None:
    """Refuses another learning-rate schedule, unless a flag chooses the new or the saved one."""
    if wanted.override_opt_param_scheduler or wanted.use_checkpoint_opt_param_scheduler:
        return
    if getattr(saved, "train_samples", None) or wanted.train_samples:
        return  # left to Megatron: the batch size does not matter to a schedule in samples
    found = _differences(SCHEDULE, saved, wanted)
    if not found:
        return
    batch_key = _KEYS["global_batch_size"]
    remedy = (
        "set the keys as the checkpoint has them; or go on with the new schedule: "
        "megatron.override_opt_param_scheduler=true; or with the checkpoint's: "
        "megatron.use_checkpoint_opt_param_scheduler=true"
    )
    if batch_key in found and config.training.global_batch_size is None:
        saved_batch, _ = found[batch_key]
        remedy = (
            f"set {batch_key}={saved_batch}: null means one micro-batch of "
            f"{config.training.micro_batch_size} on each of {config.batch_ranks} data-parallel "
            f"ranks, so it follows the number of ranks. Or {remedy}"
        )
    raise _error(
        "the checkpoint was trained with another learning-rate schedule", found, remedy, checkpoint
    )
