"""A `ModelConfig` as Megatron's flags. Imports no megatron."""

from __future__ import annotations

from megatron_sparse.config.model import ModelConfig

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""


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
    if model.hybrid_layer_pattern is not None:
        flags["hybrid_layer_pattern"] = model.hybrid_layer_pattern
    if not model.tied_embeddings:
        flags["untie_embeddings_and_output_weights"] = True
    return flags
