"""A small GPT trained with megatron.core alone: for tests and for measuring the plugin's overhead.

It is built without `megatron.training`, so one process can hold several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SmallGPTConfig:
    """Sizes and the Megatron settings that matter to gradient synchronisation."""

    layers: int = 2
    hidden: int = 64
    sequence: int = 32
    vocabulary: int = 128
    micro_batch: int = 4
    overlap: bool = False
    distributed_optimizer: bool = False
    bf16: bool = False
    fp16: bool = False
    average_in_collective: bool = False
    bucket_size: int | None = 40_000
    check_for_nan: bool = False
    loss_per_token: bool = False
    loss_scale_window: int = 1000
    loss_scale: float | None = None


class SmallGPT:
    """Model, DDP wrap, optimizer and data; the same weights on every rank and in every run.

    Needs an initialised process group and, where there is no GPU, the CPU mode.
    """

    def __init__(self, setting: SmallGPTConfig, seed: int = 7) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(1, 1)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        dtype = torch.float32
        if setting.bf16 or setting.fp16:
            dtype = torch.bfloat16 if setting.bf16 else torch.float16
        config = TransformerConfig(
            num_layers=setting.layers,
            hidden_size=setting.hidden,
            num_attention_heads=4,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=setting.bf16,
            fp16=setting.fp16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            calculate_per_token_loss=setting.loss_per_token,
        )
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=setting.vocabulary,
            max_sequence_length=setting.sequence,
        )
        if dtype != torch.float32:
            model = Float16Module(config, model)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=setting.bf16 or setting.fp16,
                overlap_grad_reduce=setting.overlap,
                use_distributed_optimizer=setting.distributed_optimizer,
                bucket_size=setting.bucket_size,
                average_in_collective=setting.average_in_collective,
                check_for_nan_in_grad=setting.check_for_nan,
            ),
            model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-2,
                bf16=setting.bf16,
                fp16=setting.fp16,
                params_dtype=dtype,
                use_distributed_optimizer=setting.distributed_optimizer,
                loss_scale=setting.loss_scale,
                initial_loss_scale=2.0**10,
                min_loss_scale=1.0,
                hysteresis=1,
                loss_scale_window=setting.loss_scale_window,
            ),
            [self.ddp],
        )
        self.setting = setting
        data_rank = parallel_state.get_data_parallel_rank()
        # Each data-parallel rank has data of its own.
        self.generator = torch.Generator().manual_seed(100 + data_rank)

    def batch(self) -> torch.Tensor:
        """Tokens whose odd positions follow from the even ones, so that there is a loss to gain."""
        shape = (self.setting.micro_batch, self.setting.sequence)
        tokens = torch.randint(0, self.setting.vocabulary, shape, generator=self.generator) % 17
        # Any rule does that a small model can learn, and few different tokens (% 17) help.
        tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % self.setting.vocabulary
        return tokens

    def gradients(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward, backward and gradient synchronisation; returns the local loss."""
        from megatron.core.distributed import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        # True hides a later position.
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        loss = self.ddp(tokens, positions, mask, labels=tokens).float().mean()
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.ddp])
        return loss.detach()

    def step(self, tokens: torch.Tensor | None = None) -> tuple[float, bool]:
        """One training step: the loss averaged over ranks, and whether the step was taken."""
        loss = self.gradients(self.batch() if tokens is None else tokens)
        result: Any = self.optimizer.step()  # (success, grad_norm, num_zeros)
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size(), bool(result[0])

    def weights(self) -> torch.Tensor:
        """All weights, as one fp32 vector."""
        return torch.cat([p.detach().float().view(-1) for p in self.ddp.parameters()])
