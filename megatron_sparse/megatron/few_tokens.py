"""Takes residuals out of the sums of a step that has far fewer tokens than the one before.

With a loss per token the sums are multiplied by one over the step's tokens, and a residual is in
the unit of the step that left it. Added to the gradients of a step with a hundredth of the tokens,
it would count a hundred times. The number of tokens is known only after the sums. Then a second,
dense sum over the ranks, of what each one's selection lacks, leaves the gradients alone in the
result, and residuals stay as they were (`ResidualStore.take_apart`).

Cost: in such a step one all-reduce of every bucket in fp32, and a buffer of a bucket's size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.reduction.level_parts import in_place
from megatron_sparse.reduction.reducer import GradientReducer


def take_residuals_out(
    groups: Sequence[GroupBuckets],
    reducer: Callable[[GroupBuckets], GradientReducer],
    residuals: ResidualStore,
    leak: float,
) -> None:
    """Turns the sums of all buckets into those of the step's gradients alone.

    Collective over the ranks of each group. The sums must have been waited for, and must not have
    been multiplied yet.

    Args:
        groups: whose gradients are mutated.
        reducer: the one of a group.
        residuals: have no part in this step from here on.
        leak: `compression.leak`.
    """
    lacking = residuals.take_apart(leak)
    with _shared_embedding_added_up(groups):
        for group in groups:
            for bucket in group.buckets:
                part = reducer(group).part(bucket)
                lacking_M = lacking.pop(part.name, None)
                if lacking_M is None:
                    lacking_N = torch.zeros_like(bucket.grad_N, dtype=torch.float32)
                else:
                    lacking_N = in_place(lacking_M, part, bucket)
                dist.all_reduce(lacking_N, group=group.process_group)
                if group.instances_group is not None:
                    dist.all_reduce(lacking_N, group=group.instances_group)
                bucket.grad_N.add_(lacking_N)


@contextlib.contextmanager
def _shared_embedding_added_up(groups: Sequence[GroupBuckets]) -> Iterator[None]:
    """Adds up what is added to a weight that the first and the last pipeline stage share.

    Megatron has added up their gradients already.
    """
    # Torch has a number in place of a group for ranks that are not in it.
    embedding: Any = parallel_state.get_embedding_group(check_initialized=False)
    gradients = [
        parameter.main_grad
        for group in groups
        for bucket in group.host.buckets
        for parameter in bucket.params_list
        if getattr(parameter, "shared_embedding", False)
    ]
    if not gradients or embedding is None or dist.get_world_size(embedding) == 1:
        yield
        return
    before = [gradient.clone() for gradient in gradients]
    for gradient in gradients:
        gradient.zero_()
    yield
    for gradient, summed in zip(gradients, before, strict=True):
        dist.all_reduce(gradient, group=embedding)
        gradient.add_(summed)
