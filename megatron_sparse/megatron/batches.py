"""Datasets, batches and the loss: what `train` hands to Megatron's `pretrain`.

Imports megatron: on a CPU, `cpu_mode.enable` comes first.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers
from megatron.training.utils import get_blend_and_blend_per_split

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def datasets(samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Makes the training, validation and test datasets.

    Only the first rank of each tensor-parallel group reads data; `get_batch` broadcasts it.
    `samples` has the number of each dataset's samples. Megatron passes the virtual pipeline stage
    `vp_stage`, but all stages have the same datasets.
    """
    args: Any = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0,  # whether this rank reads data
        config,
    ).build()


# Megatron then calls it on every rank, not only on the first of each tensor-parallel group.
datasets.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None) -> dict[str, Any]:
    """Reads the next micro-batch to the device; all ranks of a tensor-parallel group get the same.

    With context parallelism each rank gets its part of the sequence.

    Returns:
        A tensor for each of `BATCH_KEYS`, of shape (micro-batch, sequence); `attention_mask` is
        (micro-batch, 1, sequence, sequence). None for tensors that this pipeline stage does not
        need: a middle stage gets activations from the stage before, and needs no tensor at all.
    """
    args: Any = get_args()
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    if not first and not last:
        return dict.fromkeys(BATCH_KEYS)
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    tensor_group: Any = mpu.get_tensor_model_parallel_group()
    # Without gradients Megatron validates, with another micro-batch size.
    micro_batch = args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size
    batch: dict[str, Any] = {}
    if tensor_rank == 0:
        assert data_iterator is not None, "this rank has no data"
        sample = next(data_iterator)
        batch = {
            key: sample[key].cuda(non_blocking=True) if sample.get(key) is not None else None
            for key in BATCH_KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=tensor_group,
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=micro_batch,
        seq_length=args.seq_length,
        # Layers that predict several tokens are on the last stage, and embed the tokens again.
        mtp_on_this_rank=last and bool(args.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    if args.context_parallel_size > 1:
        context_group: Any = mpu.get_context_parallel_group()
        batch |= {"cu_seqlens": None}  # a key that Megatron requires: no packed sequences
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=context_group)
    return batch


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the losses of the tokens that count; Megatron divides by their number.

    Args:
        loss_mask: (micro-batch, sequence), 1 where a token counts.
        losses: per-token losses of the same shape, any float dtype; added up in fp32.

    Returns:
        The sum, the number of tokens (int), and both as `lm loss` for the log.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    n_tokens = mask.sum().detach().to(torch.int)
    logged = torch.cat([loss.detach().view(1), n_tokens.view(1)])
    return loss, n_tokens, {"lm loss": logged}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: Any) -> Any:
    """One forward pass: the model's output, and the function that makes a loss of it."""
    timers: Any = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # for the losses of layers that predict several tokens
    )
    return output, functools.partial(loss_function, batch["loss_mask"])
