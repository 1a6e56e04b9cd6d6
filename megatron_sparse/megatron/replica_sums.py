"""Repeats Megatron's sums over ranks that hold copies (replicas) of the same parameter.

Each of these ranks computes a part of the parameter's gradient. After the sum over the
data-parallel ranks, Megatron's `finalize_model_grads` adds these parts up, so that the copies of
the parameter stay the same:

| parameter | ranks |
|---|---|
| the shared embedding | the first and the last pipeline stage |
| `sequence_parallel`, e.g. norms; norms of queries and keys | tensor-parallel |
| `average_gradients_across_tp_domain` | tensor-parallel, averaged |

What the plugin adds to a gradient after that must be summed in the same way.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class ReplicaSum(NamedTuple):
    """A sum or an average of one parameter's gradient over a group of ranks."""

    parameter: Any
    group: Any
    op: Any


@contextlib.contextmanager
def summed_over_replicas(chunks: Sequence[Any]) -> Iterator[None]:
    """Sums what the `with` block adds to gradients over the ranks that hold copies of a parameter.

    What the gradients held before is summed already. It is set aside, so the block finds zeros,
    and must only add. Collective over the ranks that hold copies.
    """
    sums = replica_sums(chunks)
    # By parameter, because a gradient may be summed twice, over different ranks.
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
    """Lists the sums of `finalize_model_grads`, in its order: the same on all ranks of a group."""
    over_tensor, over_stages = [], []  # tensor-parallel ranks; first and last pipeline stage
    # Any: on ranks outside a group torch has a number in its place, with the world size -1.
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
    """Returns the operation that combines a gradient over tensor-parallel ranks; None if none."""
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return dist.ReduceOp.AVG
    is_norm_of_heads = "q_layernorm" in name or "k_layernorm" in name
    if (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
        config.qk_layernorm and is_norm_of_heads
    ):
        return dist.ReduceOp.SUM
    return None
