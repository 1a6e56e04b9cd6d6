"""Compares a checkpoint with the run that shall go on from it, before ranks start.

Megatron saves its arguments in each checkpoint. It refuses some differences with an assertion in
every rank after the start, and fails over others with shapes or keys that do not match. Here each
is one error that names the keys and the ways out. Only the format torch_dist is compared.
"""

from __future__ import annotations

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
"""The same for the learning rate's schedule, which Megatron counts in samples."""
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
OPTIMIZER = ("optimizer", "use_distributed_optimizer")
_KEYS = arguments.OWNED_FLAGS | {
    "add_bias_linear": "megatron.disable_bias_linear",
    "lr_decay_iters": "training.iterations",
}
"""The keys that set them; of all others `megatron.NAME`."""
_NEGATED = ("untie_embeddings_and_output_weights", "add_bias_linear")
"""Arguments whose key says the opposite."""
_RESIDUAL = "megatron_sparse.residual."
_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")


def check(config: RunConfig, vocab_size: int, checkpoint: Path) -> None:
    """Refuses a checkpoint that this run cannot go on from. Imports megatron.

    Args:
        config: the run; `cluster.device` must be decided.
        vocab_size: of the data.
        checkpoint: the folder of one checkpoint, complete.

    Raises:
        CheckpointError: they do not fit; names the keys.
        ConfigError: a key of the `megatron:` section is wrong.
    """
    state = common_state(checkpoint)
    saved = state.get("args")
    if saved is None:
        logger.warning("%s is not compared: only those of --ckpt-format torch_dist are", checkpoint)
        return
    wanted = wanted_arguments(config, vocab_size)
    _check_shape(saved, wanted, checkpoint)
    starts_anew = getattr(wanted, "finetune", False)
    if starts_anew:
        return
    _check_parallel(config, saved, wanted, checkpoint)
    loads_optimizer = not getattr(wanted, "no_load_optim", False)
    if loads_optimizer and not getattr(saved, "no_save_optim", False):
        _check_optimizer(saved, wanted, checkpoint, state)
        _check_schedule(config, saved, wanted, checkpoint)


def common_state(checkpoint: Path) -> Mapping[str, Any]:
    """What all ranks of a checkpoint share; empty if it is not of the format torch_dist."""
    from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    if not check_is_distributed_checkpoint(str(checkpoint)):
        return {}
    return load_common_state_dict(str(checkpoint))


def wanted_arguments(config: RunConfig, vocab_size: int) -> argparse.Namespace:
    """Megatron's arguments of the run, as parsed and not yet completed; without old spellings."""
    derived = arguments.derived_flags(config, Path(), vocab_size=vocab_size, data_prefix=None)
    parser = arguments.megatron_parser()
    wanted = parser.parse_args(arguments.command_line(derived, config.megatron, parser))
    if not wanted.group_query_attention:
        wanted.num_query_groups = wanted.num_attention_heads
    return wanted


def _differences(
    names: Sequence[str], saved: argparse.Namespace, wanted: argparse.Namespace
) -> dict[str, tuple[object, object]]:
    """Returns key -> (checkpoint's value, run's value) for those that both have and that differ.

    `names` are Megatron's arguments; keys are those of the configuration that set them.
    """
    found = {}
    for name in names:
        before, now = getattr(saved, name, None), getattr(wanted, name, None)
        is_known = before is not None and now is not None
        if not is_known or before == now:
            continue
        if name in _NEGATED:
            before, now = not before, not now
        found[_KEYS.get(name, f"megatron.{name}")] = (before, now)
    return found


def _error(
    what: str, found: Mapping[str, tuple[object, object]], remedy: str, checkpoint: Path
) -> CheckpointError:
    """The error for keys whose values differ: `what` is wrong, `found` is from `_differences`."""
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
        # Only learned positions have a table of that many rows.
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
    """Refuses other model-parallel sizes if the checkpoint has residuals, which need its own."""
    found = _differences(PARALLEL, saved, wanted)
    keeps = config.plugin and config.compression.residual_checkpoint != "none"
    if found and keeps and _has_residuals(checkpoint):
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
    """Refuses an optimizer whose saved state this run's optimizer cannot take over."""
    if wanted.optimizer not in ("adam", "sgd"):
        return  # Megatron's validation gives Muon's arguments other names before it saves them
    found = _differences(OPTIMIZER, saved, wanted)
    if not wanted.use_distributed_optimizer:
        # Its state has main weights in fp32 beside weights in half precision, and none otherwise.
        before, now = _precision(saved), _precision(wanted)
        if (before == "fp32") != (now == "fp32"):
            found["training.precision"] = (before, now)
    # Sharded otherwise, the distributed optimizer's state fits only the layout that saved it.
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
    """Refuses another learning-rate schedule, unless a flag says which of the two counts."""
    if wanted.override_opt_param_scheduler or wanted.use_checkpoint_opt_param_scheduler:
        return
    if getattr(saved, "train_samples", None) or wanted.train_samples:
        return  # counted in samples from the start: the batch size does not matter
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
