"""The optimizer's fp32 parameters (*masters*) with `parameters.method=lossy`: where they are, when
they change, and which of them a rank saves and restores.

A lossy gather leaves on all ranks the same rounded copy of the parameters, the *replica*. Only the
rank that owns a shard has the shard's master.

Megatron chains optimizers, for experts and others. Each changes its own parameters in
`step_with_ready_grads`, and without overlap it then gathers all buckets, also those that a later
one of the chain is about to change. So the method of each of them is wrapped.

Between steps Megatron's parameter buffer holds the replica, so Megatron's checkpoint does too. The
masters go into the plugin's part of it, by parameter name and position, so they survive a change of
buckets or ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket, ParameterSlice
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.optimizer_step import UPDATE, WrappedMethod, parts_of
from megatron_sparse.parameters.lossy import LossyGather
from megatron_sparse.reduction.level_parts import slices_of

MASTERS_ELSEWHERE = "the optimizer keeps parameters outside of the gathered buffer"
Parts = Mapping[tuple[str, int], torch.Tensor]
"""Parameter and first element -> its values from there on: fp32, 1-D."""


@dataclass(frozen=True)
class LossyBucket:
    """A bucket that is gathered lossily.

    Attributes:
        group: the bucket's group.
        bucket: the plugin's bucket.
        gather: the gather of its parameters.
    """

    group: GroupBuckets
    bucket: Bucket
    gather: LossyGather

    @property
    def pieces(self) -> list[ParameterSlice]:
        """The parts of parameters that this rank's shard holds, by their places in it."""
        return slices_of(self.bucket, [slice(*self.gather.shard)])

    @property
    def instance(self) -> int:
        """Of the distributed optimizer; all instances have the same masters."""
        others = self.group.instances_group
        return 0 if others is None else dist.get_rank(others)


def saved_parts(
    buckets: Sequence[LossyBucket],
) -> list[tuple[LossyBucket, ParameterSlice, torch.Tensor]]:
    """Returns the masters of this rank's shards, as (bucket, slice of the shard, fp32 view).

    Empty before the first gather, and between a step and its gather: then the ranks' replicas of a
    bucket may differ, and a run that resumes from such a checkpoint begins with a raw gather.
    """
    parts = []
    for bucket in buckets:
        master_M = bucket.gather.settled_master()
        if master_M is None:
            return []
        parts += [(bucket, piece, master_M[piece.start : piece.stop]) for piece in bucket.pieces]
    return parts


def masters_from(buckets: Sequence[LossyBucket], parts: Parts) -> list[torch.Tensor] | None:
    """Assembles the master of each bucket's shard from a checkpoint; None if an element is missing.

    Padding between parameters is taken from the parameter buffer.

    Args:
        buckets: the lossy ones.
        parts: (name, offset) of a slice in `LossyBucket.pieces` -> its master; NaN where the
            checkpoint had nothing.
    """
    masters = []
    for bucket in buckets:
        master_M = bucket.gather.own_shard.clone()
        for piece in bucket.pieces:
            values = parts.get((piece.name, piece.offset))
            if values is None or bool(values.isnan().any()):
                return None
            master_M[piece.start : piece.stop] = values
        masters.append(master_M)
    return masters


def watch_updates(buckets: Sequence[LossyBucket], optimizer: Any) -> list[WrappedMethod]:
    """Wraps the optimizer's updates: lossy gathers are notified before and after each of them.

    Args:
        buckets: the lossy ones.
        optimizer: Megatron's, chained or not.
    """
    wrapped = []
    for link in chain_of(optimizer) if buckets else ():
        spans = optimizer_spans(link)
        # Only the gathers of buckets that this optimizer of the chain changes.
        gathers = [each.gather for each in buckets if _elements_in(each.gather.own_shard, spans)]
        if gathers:
            wrapped.append(WrappedMethod(link, UPDATE, _watched(gathers)))
    return wrapped


def _watched(gathers: Sequence[LossyGather]) -> Callable[..., bool]:
    """Returns a wrapper for an optimizer's update that notifies `gathers` before and after it."""

    def watched_update(update: Callable[[], bool]) -> bool:
        for gather in gathers:
            gather.begin_step()
        accepted = update()
        for gather in gathers:
            gather.end_step(accepted=bool(accepted))
        return accepted

    return watched_update


def chain_of(optimizer: Any) -> list[Any]:
    """The parts of an optimizer that have Megatron's method that changes parameters."""
    return [part for part in parts_of(optimizer) if hasattr(part, UPDATE)]


def optimizer_spans(optimizer: Any) -> dict[int, int]:
    """Returns the fp32 parameters that an optimizer changes: memory address -> number of elements.

    Leaves precision-aware optimizers out: their masters may be in another precision, elsewhere.
    """
    spans = {}
    for link in chain_of(optimizer):
        if getattr(getattr(link, "config", None), "use_precision_aware_optimizer", False):
            continue
        for group in getattr(link, "param_groups", ()):
            for parameter in group["params"]:
                if parameter.dtype == torch.float32:
                    spans[parameter.data_ptr()] = parameter.numel()
    return spans


def _elements_in(shard_M: torch.Tensor, spans: Mapping[int, int]) -> int:
    """How many elements of an optimizer's parameters lie in a shard."""
    begin = shard_M.data_ptr()
    end = begin + shard_M.nbytes
    return sum(numel for address, numel in spans.items() if begin <= address < end)


def masters_elsewhere(group: GroupBuckets, spans: Mapping[int, int]) -> str | None:
    """Returns why a group's fp32 buckets cannot be gathered lossily; None if they can.

    They can if every parameter in this rank's shard is itself the optimizer's master. Buckets of
    another dtype are gathered exactly, and are not looked at.

    Args:
        group: a bucket group that can be gathered exactly.
        spans: see `optimizer_spans`.
    """
    rank = dist.get_rank(group.process_group)
    for bucket, host_bucket in zip(group.buckets, group.host.buckets, strict=True):
        values_N = host_bucket.param_data.view(-1)  # the whole bucket of Megatron's
        if values_N.dtype != torch.float32:
            continue
        shard = bucket.shard(rank)
        numel_without_padding = sum(piece.numel for piece in slices_of(bucket, [shard]))
        if _elements_in(values_N[shard], spans) != numel_without_padding:
            return MASTERS_ELSEWHERE
    return None
