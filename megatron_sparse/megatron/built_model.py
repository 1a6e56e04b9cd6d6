"""The model that Megatron has built: its parameters, counted over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def count_parameters(chunks: Iterable[torch.nn.Module]) -> int:
    """Counts the parameters of a model, each element once whatever the parallelism.

    Replicas are left out: of data-parallel ranks, of tensor-parallel ranks (norms, biases), and the
    last pipeline stage's copy of tied embeddings.

    A collective of all ranks with one host synchronisation.

    Args:
        chunks: the parts of the model on this rank.
    """
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_expert_replica = parallel_state.get_expert_data_parallel_rank() == 0
    expert_tp = parallel_state.get_expert_tensor_parallel_group()
    count = 0
    for chunk in chunks:
        for parameter in chunk.parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            if (
                (first_expert_replica if is_expert else first_replica)
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter, expert_tp_group=expert_tp)
            ):
                count += parameter.numel()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)


def announce(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Prints the number of parameters on the last rank, on which Megatron prints too.

    For `GPTModelConfig.post_wrap_hooks`. A collective of all ranks, see `count_parameters`.

    Returns:
        The chunks, unchanged.
    """
    total = count_parameters(chunks)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"Megatron has built a model of {total:,} parameters", flush=True)
    return chunks
