"""The typed configuration of a run's model: the `model` section of `RunConfig`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_sparse.config.checks import divides, in_range, is_flag, one_of
from megatron_sparse.errors import ConfigError


@dataclass
class ModelConfig:
    """A GPT-like model: LayerNorm with bias, GELU MLP, biases in every linear layer.

    The names are those of Megatron-LM's flags. Other features of Megatron (RMSNorm, SwiGLU,
    experts) are set through `RunConfig.megatron`. The defaults are those of
    `configs/model/gpt_tiny`.

    Attributes:
        num_layers: transformer layers; of a `HybridModel`, the layers of its pattern.
        hybrid_layer_pattern: null builds Megatron's `GPTModel`; a pattern builds its `HybridModel`
            of these layers: `*` attention, `-` MLP, and `|` between pipeline stages. A GPT of n
            layers is `*-` n times.
        hidden_size: width; a multiple of `num_attention_heads`.
        num_attention_heads: query heads.
        num_query_groups: key-value heads of grouped-query attention; null gives each query head
            its own.
        ffn_hidden_size: width of the MLP; null takes four times `hidden_size`.
        seq_length: tokens in a sample.
        max_position_embeddings: rows of the learned position table; null takes `seq_length`.
        position_embedding_type: `learned_absolute` or `rope`.
        vocab_size: number of token ids; null takes the data's. Megatron pads it to a multiple of
            128 times the tensor-parallel size.
        tied_embeddings: input embedding and output layer share one matrix.
        dropout: dropout probability of hidden states and of attention.
    """

    num_layers: int = 4
    hybrid_layer_pattern: str | None = None
    hidden_size: int = 160
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    seq_length: int = 128
    max_position_embeddings: int | None = None
    position_embedding_type: str = "learned_absolute"
    vocab_size: int | None = None
    tied_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            in_range(f"model.{name}", getattr(self, name), 1, integer=True)
        for name in ("num_query_groups", "ffn_hidden_size", "vocab_size"):
            in_range(f"model.{name}", getattr(self, name), 1, integer=True, or_null=True)
        positions, least = self.max_position_embeddings, self.seq_length
        in_range("model.max_position_embeddings", positions, least, integer=True, or_null=True)
        kinds = ("learned_absolute", "rope")
        one_of("model.position_embedding_type", self.position_embedding_type, kinds)
        is_flag("model.tied_embeddings", self.tied_embeddings)
        in_range("model.dropout", self.dropout, 0, 1)
        heads = "model.num_attention_heads"
        divides(heads, self.num_attention_heads, "model.hidden_size", self.hidden_size)
        divides("model.num_query_groups", self.query_groups, heads, self.num_attention_heads)
        if self.hybrid_layer_pattern is not None:
            self._check_pattern(self.hybrid_layer_pattern)

    def _check_pattern(self, pattern: str) -> None:
        if re.fullmatch(r"\*[*-]*(\|[*-]+)*", pattern) is None:
            raise ConfigError(
                "model.hybrid_layer_pattern is not a pattern of these layers",
                expected="* (attention) first, then * and - (MLP), | between pipeline stages",
                got=repr(pattern),
                remedy="for other layers call megatron_sparse.install in Megatron's own "
                "pretrain_hybrid.py",
            )
        layers = len(pattern.replace("|", ""))
        if layers != self.num_layers:
            raise ConfigError(
                "model.num_layers is not the number of layers in model.hybrid_layer_pattern",
                expected=layers,
                got=self.num_layers,
                remedy=f"set model.num_layers={layers}",
            )

    @property
    def query_groups(self) -> int:
        """Key-value heads, whether grouped or one for each query head."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """The longest sequence that the model takes."""
        return self.max_position_embeddings or self.seq_length
