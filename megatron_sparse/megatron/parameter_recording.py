"""Records parameters before and after the optimizer's steps that the configuration names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.sparsity.parameter_pairs import ParameterPairWriter


class Recorded(Protocol):
    """What is recorded: the plugin's attachment."""

    config: SparseConfig
    groups: list[GroupBuckets]
    run_dir: Path | None
    step: int


def recording_parameters(recorded: Recorded, begin: Callable[[], None]) -> Callable[[], None]:
    """What to call before each optimizer step: `begin`, and the recording if one is asked for.

    Raises:
        ConfigError: parameters are to be recorded, but there is no folder.
    """
    writer = ParameterPairWriter.of(recorded.config.tracking, recorded.run_dir)
    if writer is None:
        return begin

    def recording_begin() -> None:
        begin()
        writer.step_begins(recorded.step + 1, replicated_parameters(recorded.groups))

    return recording_begin


def replicated_parameters(
    groups: Sequence[GroupBuckets],
) -> dict[tuple[str, str], list[tuple[str, torch.Tensor]]]:
    """The named parameters of the buckets of which this rank is the group's first.

    Returns:
        For the folder name of a group of ranks, and a bucket: parameters in the bucket's order.
    """
    found = {}
    for group in groups:
        ranks = dist.get_process_group_ranks(group.process_group)
        if dist.get_rank() != min(ranks):
            continue
        ordered = itertools.chain.from_iterable(
            sorted(host.params_list, key=lambda p, at=host.param_to_index: at[p][0])
            for host in group.host.buckets
        )
        # A bucket may be a piece of Megatron's; the order of parameters is the same.
        for bucket in group.buckets:
            named = [(piece.name, next(ordered)) for piece in bucket.parameters]
            found[f"group-{min(ranks)}-{len(ranks)}", bucket.name] = named
    return found
