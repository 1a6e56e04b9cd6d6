"""Megatron's flags that a key of our own sections sets, each with that key.

Such a flag in the `megatron:` section would train another model, or train it otherwise, than the
run's own keys say. Deprecated spellings and flags that ask for the same in another way are here
too. Imports no megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_sparse.errors import ConfigError

_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "vocab_size",
    "hybrid_layer_pattern",
)
_TRAINING = (
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "min_lr",
    "lr_warmup_iters",
    "seed",
    "eval_interval",
    "eval_iters",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "save_interval",
    "load",
)

OWNED_FLAGS: Mapping[str, str] = {
    **{name: f"model.{name}" for name in _MODEL},
    "encoder_num_layers": "model.num_layers",
    "encoder_seq_length": "model.seq_length",
    "group_query_attention": "model.num_query_groups",
    "untie_embeddings_and_output_weights": "model.tied_embeddings",
    "hidden_dropout": "model.dropout",
    **{name: f"training.{name}" for name in _TRAINING},
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
"""The key for each flag, both with `_` and without leading dashes."""


def errors(megatron: Mapping[str, Any]) -> list[ConfigError]:
    """One for each flag in the `megatron:` section that a key of ours owns; it names the key.

    Args:
        megatron: the section.
    """
    found = []
    for flag, value in megatron.items():
        name = flag.replace("-", "_")
        key = OWNED_FLAGS.get(name)
        if name == "data_path" and isinstance(value, list) and len(value) > 1:
            continue  # a blend, which no key of ours can say
        if key is not None:
            found.append(
                ConfigError(
                    f"megatron.{flag} is set by {key}",
                    expected=f"the value in {key}",
                    got=f"megatron.{flag}={value}",
                    remedy=f"leave megatron.{flag} out and set {key}",
                )
            )
    return found
