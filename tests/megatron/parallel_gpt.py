"""A small GPT in any of Megatron's layouts: chunks, DDP wrap, schedule, optimizer and data.

It trains as `megatron.training` does: `get_forward_backward_func` runs the microbatches, and its
schedule calls `finalize_model_grads`. Built without Megatron's command line, so that many layouts
fit into one launch of processes, and one process can hold several models.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

HIDDEN, HEADS, SEQUENCE, VOCABULARY, MICRO_BATCH = 32, 4, 16, 64, 2
PRUNED_FROM = 512
"""Parameters with at least so many elements are pruned: `keep_below_numel` of these tests."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2.0**18
"""Of fp16 at the start, unless `Layout.optimizing` has another one: the first steps overflow and
are skipped."""
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
GATHERED = SHARDED | OVERLAP | {"overlap_param_gather": True}
AVERAGE = {"average_in_collective": True}
IN_FP32 = {"grad_reduce_in_fp32": True}
"""Settings for `Layout.ddp`."""


@dataclass(frozen=True)
class Layout:
    """Megatron's settings that affect gradient synchronisation.

    Attributes:
        tensor, pipeline, context, expert: ranks of each kind of parallelism.
        expert_tensor: tensor parallelism inside the experts; null takes `tensor`.
        experts: of each layer; 0 builds dense layers.
        dispatcher: how tokens reach the experts of other ranks: `allgather` or `alltoall`.
        sequence_parallel: with torch's norm wrapped, because Megatron's refuses it.
        tied: one matrix for the embedding and the output.
        attention: without it a layer is its MLP; Megatron's own attention refuses context
            parallelism.
        instances: of the distributed optimizer.
        ddp: fields of `DistributedDataParallelConfig`.
        optimizing: fields of `OptimizerConfig`.
        hybrid: a `HybridModel` of one attention and one MLP layer for each of `layers`, instead of
            a `GPTModel`; an untied one.
        layer_wise: each matrix belongs to one rank's Muon, the rest to the distributed optimizer;
            as --optimizer muon with --use-distributed-optimizer.
        per_token: the loss is a sum over tokens, as with --calculate-per-token-loss.
        aligned: gradients of a chunk are synchronised when the schedule says so
            (`grad_sync_func`), as with --overlap-grad-reduce in an interleaved pipeline.
        trained: part of the names of trained parameters; the others are frozen before the DDP wrap,
            as LoRA of Megatron-Bridge freezes them.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual: int = 1
    experts: int = 0
    dispatcher: str = "allgather"
    sequence_parallel: bool = False
    tied: bool = False
    attention: bool = True
    microbatches: int = 1
    precision: str = "fp32"
    instances: int = 1
    layers: int = 2
    hidden: int = HIDDEN
    vocabulary: int = VOCABULARY
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizing: dict[str, Any] = field(default_factory=dict)
    aligned: bool = False
    hybrid: bool = False
    optimizer: str = "adam"
    layer_wise: bool = False
    per_token: bool = False
    trained: str = ""


@contextmanager
def parallel_state_of(layout: Layout) -> Iterator[None]:
    """Megatron's process groups for a layout, while in the block.

    Megatron forgets its groups but does not end them; each gloo group has three threads, and twenty
    layouts would leave a thousand threads that wake up often. A group ends with the last object
    that holds it. megatron-core 0.19.2 keeps the kind
    of reduce-scatter in a global, which `reduce_scatter_with_fp32_accumulation` sets for all later
    models; this block restores it.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    groups = dist.distributed_c10d._world.pg_map
    before = list(groups)
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        for group in [each for each in groups if each not in before]:
            dist.destroy_process_group(group)
        gc.collect()
        param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter


@contextmanager
def uneven_all_gather() -> Iterator[None]:
    """Lets gloo gather tensors of unequal sizes, as NCCL does, while in the block.

    The layer-wise optimizer without a layout of its own gathers the parameters that each rank has
    updated.
    """
    original = dist.all_gather

    def all_gather(outputs: Any, tensor: torch.Tensor, group: Any = None, **_: Any) -> None:
        for source, output in enumerate(outputs):
            if source == dist.get_rank(group):
                output.copy_(tensor)
            dist.broadcast(output, group=group, group_src=source)

    dist.all_gather = all_gather
    try:
        yield
    finally:
        dist.all_gather = original


class ShardedSequenceNorm(torch.nn.Module):
    """torch's LayerNorm with its parameters flagged as Apex's and Transformer Engine's are."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden_size, eps)
        for parameter in self.norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class ParallelGPT:
    """See the module's docstring. The same weights and data in every run of a layout and seed.

    Needs an initialised process group and the CPU mode. Makes Megatron's groups of a layout without
    model parallelism, if there are none. `counted`: tokens of each sequence that enter the loss.
    """

    counted = SEQUENCE

    def __init__(self, layout: Layout, seed: int = 7) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.layout = layout
        self.config = self._transformer_config()
        self.chunks = self._wrapped([self._model(stage) for stage in range(layout.virtual)])
        ddp_config = self.chunks[0].ddp_config
        optimizing: dict[str, Any] = {
            "optimizer": layout.optimizer,
            "lr": 1e-2,
            "clip_grad": 1.0,
            "bf16": layout.precision == "bf16",
            "fp16": layout.precision == "fp16",
            "initial_loss_scale": LOSS_SCALE,
            "hysteresis": 1,
            "params_dtype": DTYPES[layout.precision],
            "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
            "overlap_param_gather": ddp_config.overlap_param_gather,
        }
        if layout.layer_wise:  # in megatron-core 0.19
            optimizing["use_distributed_optimizer"] = False
            optimizing["use_layer_wise_distributed_optimizer"] = True
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**optimizing | layout.optimizing), self.chunks
        )
        self._set_schedule(ddp_config)
        rank = parallel_state.get_data_parallel_rank()
        self.generator = torch.Generator().manual_seed(100 + rank)

    def __del__(self) -> None:
        # Megatron's hooks hold each chunk through autograd's nodes, where no collector of cycles
        # looks; emptied, a chunk no longer holds the process groups to the end of the process.
        for chunk in self.chunks:
            vars(chunk).clear()

    def _transformer_config(self) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        layout, dtype = self.layout, DTYPES[self.layout.precision]
        moe = {}
        if layout.experts:
            moe = {
                "num_moe_experts": layout.experts,
                "moe_router_topk": 2,
                "add_bias_linear": False,
                "moe_token_dispatcher_type": layout.dispatcher,
                "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
            }
        return TransformerConfig(
            num_layers=layout.layers * (2 if layout.hybrid else 1),
            hidden_size=layout.hidden,
            num_attention_heads=HEADS,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=layout.precision == "bf16",
            fp16=layout.precision == "fp16",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            sequence_parallel=layout.sequence_parallel,
            calculate_per_token_loss=layout.per_token,
            **moe,
        )

    def _model(self, stage: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.module import Float16Module

        layout = self.layout
        virtual_stage = stage if layout.virtual > 1 else None
        model: Any
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
        if layout.hybrid:
            model = self._hybrid(first, last)
        else:
            model = GPTModel(
                config=self.config,
                transformer_layer_spec=self._layer_spec(virtual_stage),
                vocab_size=layout.vocabulary,
                max_sequence_length=SEQUENCE,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=layout.tied,
                vp_stage=virtual_stage,
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad = layout.trained in name
        if layout.precision != "fp32":
            model = Float16Module(self.config, model)
        return model

    def _wrapped(self, models: list[Any]) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        layout, others = self.layout, len(models) - 1
        settings = {"bucket_size": 8_000, "num_distributed_optimizer_instances": layout.instances}
        ddp_config = DistributedDataParallelConfig(**settings | layout.ddp)
        if find_spec("megatron.training") is None:  # in the oldest version
            return [DistributedDataParallel(self.config, ddp_config, model) for model in models]
        from megatron.training.training import wrap_model_chunks_with_ddp

        # Megatron cuts buckets on the first stage only, and of it the first chunk.
        is_cut = ddp_config.overlap_grad_reduce and parallel_state.is_pipeline_first_stage()
        return wrap_model_chunks_with_ddp(
            models,
            self.config,
            ddp_config,
            use_layer_wise_distributed_optimizer=layout.layer_wise,
            use_layer_wise_param_layout=ddp_config.use_distributed_optimizer,
            bucket_sizes=[ddp_config.bucket_size if is_cut else None, *[None] * others],
            disable_bucketing_per_chunk=[False, *[True] * others],
        )

    def _hybrid(self, first: bool, last: bool) -> Any:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.core.process_groups_config import ProcessGroupCollection

        from megatron_sparse.megatron.local_hybrid import local_stack_spec

        stages = self.layout.pipeline
        return HybridModel(
            self.config,
            local_stack_spec,
            vocab_size=self.layout.vocabulary,
            max_sequence_length=SEQUENCE,
            hybrid_layer_pattern="|".join(["*-" * (self.layout.layers // stages)] * stages),
            pre_process=first,
            post_process=last,
            position_embedding_type="learned_absolute",
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def _layer_spec(self, virtual_stage: int | None) -> Any:
        """Megatron's own layers, changed for layouts that these refuse."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
        from megatron.core.transformer.transformer_block import (
            TransformerBlockSubmodules,
            get_num_layers_to_build,
        )

        layer = get_gpt_layer_local_spec(num_experts=self.layout.experts or None)
        parts = layer.submodules
        if not self.layout.attention:
            parts.input_layernorm = parts.self_attention = IdentityOp
            parts.self_attn_bda = IdentityFuncOp
        if not self.layout.sequence_parallel:
            return layer
        parts.input_layernorm = parts.pre_mlp_layernorm = ShardedSequenceNorm
        count = get_num_layers_to_build(self.config, vp_stage=virtual_stage)
        return TransformerBlockSubmodules([layer] * count, ShardedSequenceNorm)

    def _set_schedule(self, ddp_config: Any) -> None:
        """As `megatron.training.training.train` does."""
        from megatron.core.distributed import finalize_model_grads

        config = self.config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

        def each(functions: list[Any]) -> Any:
            return functions if len(functions) > 1 else functions[0]

        if ddp_config.overlap_grad_reduce:
            config.no_sync_func = each([chunk.no_sync for chunk in self.chunks])
            if self.layout.aligned:
                config.grad_sync_func = each([chunk.start_grad_sync for chunk in self.chunks])

    def batches(self) -> list[torch.Tensor]:
        """The microbatches of the next step.

        Tokens whose odd positions follow from the even ones, so that the loss can fall.
        """
        found = []
        for _ in range(self.layout.microbatches):
            tokens = torch.randint(0, 17, (MICRO_BATCH, SEQUENCE), generator=self.generator)
            tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % self.layout.vocabulary
            found.append(tokens)
        return found

    def _forward(self, batches: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Any]:
        from megatron.core import parallel_state

        tokens = next(batches)
        positions = torch.arange(SEQUENCE).expand_as(tokens)
        parts, part = self.layout.context, parallel_state.get_context_parallel_rank()
        tokens = tokens.chunk(parts, 1)[part].contiguous()
        positions = positions.chunk(parts, 1)[part].contiguous()
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

        def loss_of(losses: torch.Tensor) -> tuple[Any, ...]:
            if self.layout.per_token:
                some = losses[:, : self.counted].float()
                return some.sum(), torch.tensor(some.numel()), {"loss": some.detach().sum()}
            # Not the result itself: the schedule divides that in place.
            loss = losses.float().mean()
            return loss / parts, {"loss": loss.detach().clone()}

        return chunk(tokens, positions, mask, labels=tokens), loss_of

    def gradients(
        self, batches: list[torch.Tensor] | None = None, *, force_all_reduce: bool = False
    ) -> float:
        """One step's forward and backward passes; returns this rank's loss, 0 if it has none.

        Args:
            batches: of `batches`; None takes the next ones.
            force_all_reduce: as with --save-wgrads-interval.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = force_all_reduce
        self.optimizer.zero_grad()
        batches = self.batches() if batches is None else batches
        run: Any = get_forward_backward_func()
        losses = run(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
            force_all_reduce=force_all_reduce,
        )
        return float(sum(loss["loss"] for loss in losses)) if losses else 0.0

    def step(self, batches: list[torch.Tensor] | None = None) -> tuple[float, bool]:
        """One training step: the loss summed over ranks and microbatches, and if it was taken."""
        loss = torch.tensor(self.gradients(batches))
        with uneven_all_gather() if self.layout.layer_wise else nullcontext():
            result: Any = self.optimizer.step()  # (success, grad_norm, num_zeros)
        dist.all_reduce(loss)
        return loss.item(), bool(result[0])

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, as `held` does, after a pending all-gather."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return self.held()

    def held(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by chunk and name, copied, without a gather."""
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
        }
