"""Sums over ranks that hold copies of a parameter, but compute parts of its gradient each.

After the sum over the data-parallel ranks, Megatron's `finalize_model_grads` adds up some gradients
once more, so that all copies of the parameter stay the same:

| parameter | ranks |
|---|---|
| the shared embedding | the first and the last pipeline stage |
| `sequence_parallel`, e.g. norms; norms of queries and keys | tensor-parallel |
| `average_gradients_across_tp_domain` | tensor-parallel, averaged |

A change that is made to the gradients later must be added up in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class ReplicaSum(NamedTuple):
    """A sum or an average of Megatron's: of which gradient, over which ranks."""

    parameter: Any
    group: Any
    op: Any


@contextlib.contextmanager
def summed_over_replicas(chunks: Sequence[Any]) -> Iterator[None]:
    """Sums what its block adds to the chunks' gradients as Megatron has summed the gradients.

    Values from before the block are not summed again. Collective over the ranks that hold copies.
    Copies those gradients while in the block, which must only add to them.
    """
    sums = replica_sums(chunks)
    # By parameter, because more than one sum may be of the same gradient.
    gradients = {each.parameter: each.parameter.main_grad for each in sums}
    before = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
    for gradient in gradients.values():
        gradient.zero_()  # the block then leaves here only what it adds
    yield
    for parameter, group, op in sums:
        dist.all_reduce(gradients[parameter], op=op, group=group)
    for parameter, already_summed in before.items():
        gradients[parameter].add_(already_summed)


def replica_sums(chunks: Sequence[Any]) -> list[ReplicaSum]:
    """What Megatron adds up, in its order: the same on all ranks of a group."""
    over_tensor, over_stages = [], []
    # Torch has a number in place of a group for ranks that are not in it.
    embedding: Any = parallel_state.get_embedding_group(check_initialized=False)
    is_in_stages = embedding is not None and dist.get_world_size(embedding) > 1
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            if not parameter.requires_grad:
                continue
            op = _tensor_parallel_op(name, parameter, chunk.config)
            if op is not None and chunk.tp_group.size() > 1:
                over_tensor.append(ReplicaSum(parameter, chunk.tp_group, op))
            if is_in_stages and getattr(parameter, "shared_embedding", False):
                over_stages.append(ReplicaSum(parameter, embedding, dist.ReduceOp.SUM))
    return over_tensor + over_stages


def _tensor_parallel_op(name: str, parameter: torch.nn.Parameter, config: Any) -> Any:
    """How a gradient is combined over the tensor-parallel ranks; None if it is not."""
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return dist.ReduceOp.AVG
    is_norm_of_heads = "q_layernorm" in name or "k_layernorm" in name
    if (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
        config.qk_layernorm and is_norm_of_heads
    ):
        return dist.ReduceOp.SUM
    return None
