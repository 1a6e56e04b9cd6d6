"""The typed configuration of a run's model: the `model` section of `RunConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.config.checks import Checked, choice, divides, in_range, number, whole


@dataclass
class ModelConfig(Checked):
    """A GPT-like model: LayerNorm with bias, GELU MLP, biases in every linear layer.

    The names are those of Megatron-LM's flags. Other features of Megatron (RMSNorm, SwiGLU,
    experts) are set through `RunConfig.megatron`. The defaults are those of
    `configs/model/gpt_tiny`.

    Attributes:
        num_layers: transformer layers; with `megatron.hybrid_layer_pattern`, that pattern's layers.
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

    SECTION = "model"

    num_layers: int = whole(4, 1)
    hidden_size: int = whole(160, 1)
    num_attention_heads: int = whole(4, 1)
    num_query_groups: int | None = whole(None, 1)
    ffn_hidden_size: int | None = whole(None, 1)
    seq_length: int = whole(128, 1)
    max_position_embeddings: int | None = whole(None, 1)
    position_embedding_type: str = choice("learned_absolute", ("learned_absolute", "rope"))
    vocab_size: int | None = whole(None, 1)
    tied_embeddings: bool = True
    dropout: float = number(0.0, 0, 1)

    def __post_init__(self) -> None:
        """Checks each key, that positions cover `seq_length`, and that heads divide evenly."""
        super().__post_init__()
        in_range("model.max_position_embeddings", self.positions, self.seq_length)
        heads = "model.num_attention_heads"
        divides(heads, self.num_attention_heads, "model.hidden_size", self.hidden_size)
        divides("model.num_query_groups", self.query_groups, heads, self.num_attention_heads)

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
