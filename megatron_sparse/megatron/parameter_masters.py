"""The optimizer's own parameters (masters) under `parameters.method=lossy`: where they are, and the
parts of them that a rank saves and restores.

Between steps Megatron's parameter buffer holds the replica, so Megatron's checkpoint does too. The
masters go into the plugin's part of it, by parameter name and position, so they survive a change of
buckets or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.parameters.lossy import LossyGather

MASTERS_ELSEWHERE = "the optimizer keeps parameters outside of the gathered buffer"
Parts = Mapping[tuple[str, int], torch.Tensor]
"""Parameter and first element -> its values from there on: fp32, 1-D."""


@dataclass(frozen=True)
class LossyBucket:
    """A bucket that is gathered lossily.

    Attributes:
        group: its bucket group.
        bucket: it.
        gather: its gather.
    """

    group: GroupBuckets
    bucket: Bucket
    gather: LossyGather

    def spans(self) -> Iterator[Span]:
        """The parts of parameters that this rank's shard holds."""
        first, last = self.gather.shard
        for piece in self.bucket.parameters:
            start, stop = max(piece.start, first), min(piece.stop, last)
            if start < stop:
                yield Span(piece.name, start - piece.start, start - first, stop - start)


@dataclass(frozen=True)
class Span:
    """A part of a parameter.

    Attributes:
        name: of the parameter.
        start: its first element in the parameter.
        at: the same in the rank's shard.
        numel: how many.
    """

    name: str
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class MasterPart:
    """A part of a parameter's master that a rank saves.

    Attributes:
        name: of the parameter.
        start: first element in the parameter.
        values_M: fp32; a view.
        expert: whether the parameter is an expert's.
        instance: of the distributed optimizer; all instances have the same values.
    """

    name: str
    start: int
    values_M: torch.Tensor
    expert: bool
    instance: int


def saved_parts(buckets: Sequence[LossyBucket]) -> list[MasterPart]:
    """All parts of this rank; none if a bucket's replicas are not the same on all ranks now.

    That is so before the first gather, and between a step and its gather. A run that goes on from
    there begins with a raw gather.
    """
    parts = []
    for each in buckets:
        master_M = each.gather.settled_master()
        if master_M is None:
            return []
        others = each.group.instances_group
        instance = 0 if others is None else dist.get_rank(others)
        parts += [
            MasterPart(
                span.name,
                span.start,
                master_M[span.at : span.at + span.numel],
                each.group.expert,
                instance,
            )
            for span in each.spans()
        ]
    return parts


def overlapping(
    buckets: Sequence[LossyBucket], expert: bool, stored: Iterable[tuple[str, int, int]]
) -> list[tuple[str, int, int]]:
    """Those of the stored parts (parameter, first element, numel) that this rank needs."""
    wanted: dict[str, list[Span]] = {}
    for each in buckets:
        if each.group.expert == expert:
            for span in each.spans():
                wanted.setdefault(span.name, []).append(span)
    return [
        (name, start, numel)
        for name, start, numel in stored
        if any(
            start < span.start + span.numel and span.start < start + numel
            for span in wanted.get(name, ())
        )
    ]


def masters_from(buckets: Sequence[LossyBucket], parts: Parts) -> list[torch.Tensor] | None:
    """The master of each bucket's shard, put together; None if an element is missing.

    Padding between parameters stays as it is in the parameter buffer.
    """
    by_name: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for (name, start), values in parts.items():
        by_name.setdefault(name, []).append((start, values))
    masters = []
    for each in buckets:
        master_M = each.gather.own_shard.clone()
        for span in each.spans():
            missing = span.numel
            for start, values in by_name.get(span.name, ()):
                first = max(start, span.start)
                last = min(start + values.numel(), span.start + span.numel)
                if first < last:
                    at = span.at + first - span.start
                    master_M[at : at + last - first] = values[first - start : last - start]
                    missing -= last - first
            if missing:
                return None
        masters.append(master_M)
    return masters


def optimizer_spans(optimizer: Any) -> dict[int, int]:
    """Address -> elements of the fp32 parameters that an optimizer changes.

    Without those of precision-aware optimizers, which keep parameters in another precision beside.
    """
    spans = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(getattr(each, "config", None), "use_precision_aware_optimizer", False):
            continue
        for group in getattr(each, "param_groups", ()):
            for parameter in group["params"]:
                if parameter.dtype == torch.float32:
                    spans[parameter.data_ptr()] = parameter.numel()
    return spans


def masters_elsewhere(group: GroupBuckets, spans: Mapping[int, int]) -> str | None:
    """Why fp32 buckets cannot be gathered lossily: the own shard is not the optimizer's master.

    Args:
        group: a bucket group that can be gathered exactly.
        spans: see `optimizer_spans`.
    """
    n, rank = group.process_group.size(), dist.get_rank(group.process_group)
    for bucket, host in zip(group.buckets, group.host.buckets, strict=True):
        values_N = host.param_data.view(-1)
        if values_N.dtype != torch.float32:
            continue
        numel = values_N.numel() // n
        first, last = rank * numel, (rank + 1) * numel
        begin = values_N.data_ptr() + first * values_N.itemsize
        end = begin + numel * values_N.itemsize
        held = sum(count for address, count in spans.items() if begin <= address < end)
        own = sum(
            max(0, min(piece.stop, last) - max(piece.start, first)) for piece in bucket.parameters
        )
        if held != own:
            return MASTERS_ELSEWHERE
    return None
