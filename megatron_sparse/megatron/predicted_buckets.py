"""Predicts the gradient buckets that Megatron will make for a run, before it builds the model.

For a rank of the first pipeline stage, which has the embeddings. The parameters follow from the
configuration's section `model` and from `megatron.hybrid_layer_pattern`; other `megatron` flags
are ignored. Their order is that of Megatron's modules, and the cut into buckets follows its rule
(`ParamAndGradBuffer` and, with padding, `DistributedOptimizer`): from the last parameter to the
first one, a bucket ends when it has `bucket_size` elements. Imports no megatron and allocates
nothing.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.config.model import ModelConfig
from megatron_sparse.config.run import RunConfig
from megatron_sparse.megatron.arguments import VOCABULARY_MULTIPLE
from megatron_sparse.megatron.pieces import PIECE_NUMEL, PIECE_NUMEL_PER_RANK

PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements, with the distributed optimizer; buckets can be cut for all ranks, too."""


class PredictedParameter(NamedTuple):
    """A parameter on one rank.

    Attributes:
        name: as in Megatron's model.
        shape: of this rank's shard.
        replicated: whether tensor-parallel ranks hold copies of it.
    """

    name: str
    shape: tuple[int, ...]
    replicated: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def predicted_parameters(config: RunConfig, vocab_size: int) -> list[PredictedParameter]:
    """Lists the parameters of a first-stage rank, in the order of Megatron's modules.

    `vocab_size` is the model's, without padding.
    """
    model, tensor_ranks = config.model, config.training.tensor_parallel
    stages, hidden = config.training.pipeline_parallel, model.hidden_size
    # Rows of the embedding on a tensor-parallel rank: its equal part of the padded vocabulary.
    vocabulary = _up(vocab_size, VOCABULARY_MULTIPLE * tensor_ranks) // tensor_ranks
    copied = tensor_ranks > 1  # `replicated`, for parameters that are not sharded
    found = [PredictedParameter("embedding.word_embeddings.weight", (vocabulary, hidden))]
    if model.position_embedding_type == "learned_absolute":
        name = "embedding.position_embeddings.weight"
        found.append(PredictedParameter(name, (model.positions, hidden), copied))
    for index, kinds in enumerate(_layers(config, stages)):
        found += _layer(f"decoder.layers.{index}", kinds, model, tensor_ranks)
    if stages == 1:  # the first stage is the last one, too
        found += _norm("decoder.final_layernorm", hidden, copied=copied)
        if not model.tied_embeddings:
            found.append(PredictedParameter("output_layer.weight", (vocabulary, hidden)))
    return found


def _layers(config: RunConfig, stages: int) -> list[str]:
    """Returns what each layer of the first stage consists of: attention (*), MLP (-), or both."""
    pattern = config.megatron.get("hybrid_layer_pattern")
    if pattern is not None:
        return list(pattern.split("|")[0])  # | separates pipeline stages
    return ["*-"] * (config.model.num_layers // stages)


def _layer(
    prefix: str, kinds: str, model: ModelConfig, tensor: int
) -> Iterator[PredictedParameter]:
    """Yields the parameters of one layer on a tensor-parallel rank.

    `prefix` begins the parameters' names. `kinds` says what the layer consists of: attention (*),
    MLP (-), or both. `tensor` ranks share it.
    """
    # Tensor-parallel ranks shard most weights, and hold copies of all norms and of some biases.
    hidden, ffn, copied = model.hidden_size, model.ffn_width // tensor, tensor > 1
    head_width = hidden // model.num_attention_heads
    # Each head has its queries; keys and values are shared by the heads of a query group.
    qkv_rows = hidden + 2 * model.query_groups * head_width
    if "*" in kinds:
        yield from _norm(f"{prefix}.input_layernorm", hidden, copied=copied)
        name = f"{prefix}.self_attention"
        yield from _linear(f"{name}.linear_proj", (hidden, hidden // tensor), copied=copied)
        yield from _linear(f"{name}.linear_qkv", (qkv_rows // tensor, hidden))
    if "-" in kinds:
        yield from _norm(f"{prefix}.pre_mlp_layernorm", hidden, copied=copied)
        yield from _linear(f"{prefix}.mlp.linear_fc1", (ffn, hidden))
        yield from _linear(f"{prefix}.mlp.linear_fc2", (hidden, ffn), copied=copied)


def _norm(name: str, hidden: int, *, copied: bool) -> list[PredictedParameter]:
    kinds = ("weight", "bias")
    return [PredictedParameter(f"{name}.{kind}", (hidden,), copied) for kind in kinds]


def _linear(name: str, shape: tuple[int, int], *, copied: bool = False) -> list[PredictedParameter]:
    """A weight, and a bias of which tensor-parallel ranks may hold copies."""
    bias = PredictedParameter(f"{name}.bias", shape[:1], copied)
    return [PredictedParameter(f"{name}.weight", shape), bias]


def predicted_buckets(config: RunConfig, vocab_size: int) -> list[Bucket]:
    """Predicts the buckets of a rank of the first pipeline stage; their gradients have no memory.

    `cluster.device` and `training.precision` must be decided. `vocab_size` is without padding.
    """
    sharded = config.training.use_distributed_optimizer
    instances = int(config.megatron.get("num_distributed_optimizer_instances") or 1)
    ranks = config.data_parallel // instances
    parameters = predicted_parameters(config, vocab_size)
    # Megatron puts tied embeddings alone into a bucket if the last stage has the other copy.
    apart = sharded and config.model.tied_embeddings and config.training.pipeline_parallel > 1
    parameter_filter, dtype = ParameterFilter(config.compression), _gradient_dtype(config)
    buckets: list[Bucket] = []
    for placed in _cut(parameters, _bucket_numel(config), aligned=sharded, first_apart=apart):
        pieces = tuple(
            parameter_filter.slice_of(p.name, start, start + p.numel, p.shape, p.replicated)
            for p, start in placed
        )
        numel = pieces[-1].stop
        size = _up(numel, math.lcm(ranks, BUCKET_ALIGNMENT)) if sharded else numel
        with FakeTensorMode():  # a tensor without memory
            grad_N = torch.empty(size, dtype=dtype, device=config.cluster.device)
        op = CollectiveOp.REDUCE_SCATTER if sharded else CollectiveOp.ALL_REDUCE
        name = f"dense.{len(buckets)}"
        buckets.append(Bucket(name, grad_N, pieces, op, ranks, instances=instances))
    return buckets


type _Placed = list[tuple[PredictedParameter, int]]
"""The parameters of a bucket, each with its first element there."""


def _cut(
    parameters: list[PredictedParameter], enough: float, *, aligned: bool, first_apart: bool
) -> list[_Placed]:
    """Cuts the parameters into buckets, from the last parameter to the first.

    They are in the order of Megatron's modules. A bucket ends when it has `enough` elements.
    `aligned`: parameters begin at multiples of `PARAMETER_ALIGNMENT`. `first_apart`: the first one
    is alone in a bucket.
    """
    buckets: list[_Placed] = [[]]
    stop = 0  # elements in the last bucket so far
    for index, parameter in reversed(list(enumerate(parameters))):
        is_apart = first_apart and index == 0
        if buckets[-1] and (stop >= enough or is_apart):
            buckets.append([])
            stop = 0
        start = _up(stop, PARAMETER_ALIGNMENT) if aligned else stop
        stop = start + parameter.numel
        buckets[-1].append((parameter, start))
    return buckets


def may_undo(config: RunConfig) -> bool:
    """Whether residuals need undo copies: steps may be skipped or repeated, or tokens vary."""
    flags = config.megatron
    reruns = flags.get("rerun_mode") != "disabled"  # Megatron's default is another mode
    per_token = bool(flags.get("calculate_per_token_loss"))
    precision, sharded = config.training.precision, config.training.use_distributed_optimizer
    # Megatron's unsharded fp32 optimizer has no loss scale.
    has_scale = bool(flags.get("loss_scale")) and (precision == "bf16" or sharded)
    return reruns or per_token or precision == "fp16" or has_scale


def _bucket_numel(config: RunConfig) -> float:
    """Returns how many elements end a bucket, as Megatron's `resolve_ddp_bucket_size`."""
    if not config.training.overlap_grad_reduce:
        return math.inf  # one bucket for all gradients
    given = config.megatron.get("ddp_bucket_size")
    return int(given or max(PIECE_NUMEL, PIECE_NUMEL_PER_RANK * config.data_parallel))


def _gradient_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of Megatron's gradient buffers: without flags, fp16 in fp16 training, else fp32."""
    precision, flags = config.training.precision, config.megatron
    in_fp32 = flags.get("accumulate_allreduce_grads_in_fp32")
    narrow = flags.get("main_grads_dtype", "fp32") != "fp32" and not in_fp32
    if precision == "bf16" and (narrow or flags.get("grad_reduce_in_bf16")):
        return torch.bfloat16
    if precision == "fp16" and not in_fp32:
        return torch.float16
    return torch.float32


def _up(numel: int, multiple: int) -> int:
    """The least multiple that is not smaller than `numel`."""
    return -(-numel // multiple) * multiple
