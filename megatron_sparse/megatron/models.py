"""A `ModelConfig` as Megatron's flags, and its number of parameters. Imports no megatron."""

from __future__ import annotations

from megatron_sparse.config.model import ModelConfig
from megatron_sparse.errors import ConfigError

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""


def parameter_count(
    model: ModelConfig, vocab_size: int | None = None, tensor_parallel: int = 1
) -> int:
    """Counts the parameters that Megatron's model has, all tensor-parallel ranks together.

    With h = hidden size, k = width of all key (or value) heads, f = MLP width: attention has 2h in
    its LayerNorm, h(h + 2k) + (h + 2k) in the projection to queries, keys and values and h^2 + h in
    the one back; an MLP has 2h in its LayerNorm and 2hf + f + h. A layer of a `GPTModel` has both.

    Args:
        model: the model.
        vocab_size: the data's, where `model.vocab_size` is null.
        tensor_parallel: parts of each matrix; the vocabulary's padding depends on it.

    Raises:
        ConfigError: neither the model nor the caller gives a vocabulary.

    Example:
        >>> parameter_count(ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=1,
        ...                             seq_length=8), vocab_size=100)
        796
    """
    vocab_size = model.vocab_size or vocab_size
    if vocab_size is None:
        raise ConfigError(
            "the vocabulary's size is not known",
            expected="model.vocab_size, or that of a corpus",
            got="null",
            remedy="set model.vocab_size",
        )
    multiple = VOCABULARY_MULTIPLE * tensor_parallel
    padded_vocab = -(-vocab_size // multiple) * multiple
    hidden, ffn = model.hidden_size, model.ffn_width
    heads = hidden + 2 * model.query_groups * (hidden // model.num_attention_heads)
    attention = 2 * hidden + hidden * heads + heads + hidden * hidden + hidden
    mlp = 2 * hidden + 2 * hidden * ffn + ffn + hidden
    embeddings = padded_vocab * hidden * (1 if model.tied_embeddings else 2)
    if model.position_embedding_type == "learned_absolute":
        embeddings += model.positions * hidden
    layers = model.attention_layers * attention + model.mlp_layers * mlp
    return embeddings + layers + 2 * hidden


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
