"""The layout of the plugin's state in a checkpoint: places, rows, and each rank's part.

Ranks that differ only in their data-parallel coordinate hold the same parameters and each a
residual of its own: a *row*. Expert parameters have rows of their own, one for each rank of the
expert data-parallel group. Bucket layouts change with overlap, bucket size and data-parallel size,
so everything here goes by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.parameter_masters import Parts

VERSION = 2
Stores = dict[str, dict[str, torch.Tensor]]
"""Store -> parameter -> 1-D tensor."""


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. The expert ones differ from the others only in models with experts."""

    data: int
    data_size: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    expert: int
    expert_size: int
    expert_data: int = 0
    expert_data_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1

    @classmethod
    def here(cls) -> Place:
        """The coordinates that Megatron's parallel state gives this rank."""
        return cls(
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
            # None only where Megatron's groups were not made.
            parallel_state.get_expert_tensor_parallel_rank() or 0,
            parallel_state.get_expert_tensor_parallel_world_size() or 1,
        )

    def model_sizes(self) -> tuple[int, int, int]:
        """Tensor, pipeline and expert sizes, which must not change between save and load."""
        return self.tensor_size, self.pipeline_size, self.expert_size

    def shard(self, expert: bool) -> str:
        """Names the part of the model that the rank holds; part of keys in a checkpoint."""
        if expert:
            return f"expert.tp{self.expert_tensor}.ep{self.expert}.pp{self.pipeline}"
        return f"tp{self.tensor}.pp{self.pipeline}"

    def row(self, expert: bool) -> tuple[int, int]:
        """This rank's row among those of its parameters, and the number of rows."""
        if expert:
            return self.expert_data, self.expert_data_size
        return self.data, self.data_size


@dataclass
class Saved:
    """One rank's part of a checkpoint.

    `data_size` and `kept` are of the run that wrote it: its data-parallel size and its stores.
    `masters` are the parts of `parameters.method=lossy` that overlap with this rank's shards.
    """

    step: int
    enabled: bool
    loss_scale: float | None
    gradient_factor: float | None
    data_size: int
    mode: str
    kept: list[str]
    planner: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    buckets: dict[str, int] | None = None
    stores: Stores = field(default_factory=dict)
    masters: Parts = field(default_factory=dict)


def check_structure(*, constant: bool, mode: str) -> None:
    """Rejects Megatron's assumption that every checkpoint of a run has the same tensors.

    A bucket has a residual only after its first selection.

    Args:
        constant: Megatron's --ckpt-assume-constant-structure.
        mode: `compression.residual_checkpoint`.

    Raises:
        ConfigError: the assumption, with a mode that saves residuals.
    """
    if constant and mode != "none":
        raise ConfigError(
            "--ckpt-assume-constant-structure does not hold: residuals appear while training",
            expected="checkpoints whose structure may change",
            got=f"the flag, with compression.residual_checkpoint={mode}",
            remedy="leave the flag out, or set compression.residual_checkpoint=none",
        )


def common_state(attachment: Attachment) -> dict[str, Any]:
    """The state that is the same on every rank. Reads the gradient factor on the host."""
    factor = attachment.unit.gradient_factor
    return {
        "version": VERSION,
        "step": attachment.step,
        "enabled": attachment.enabled,
        "loss_scale": attachment.unit.loss_scale,
        "gradient_factor": None if factor is None else float(factor),
        "mode": attachment.config.compression.residual_checkpoint,
        "kept": list(attachment.stores()),
    }


def rank_state(attachment: Attachment) -> dict[str, Any]:
    """This rank's own state without the stores: plain containers and small tensors."""
    return {
        "planner": attachment.planner.state_dict(),
        "method": attachment.method_state(),
        "buckets": bucket_sizes(attachment),
    }


def bucket_sizes(attachment: Attachment) -> dict[str, int]:
    """Elements of every bucket, by name."""
    return {bucket.name: bucket.numel for bucket in attachment.buckets}


def expert_parameters(attachment: Attachment) -> set[str]:
    """Names of the parameters whose rows are those of the expert data-parallel group."""
    return {
        piece.name
        for group in attachment.groups
        if group.expert
        for bucket in group.buckets
        for piece in bucket.parameters
    }


def store_contents(attachment: Attachment) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The tensors that this rank saves: name of the store, name of the parameter, and 1-D values.

    With `residual_checkpoint=full`: views of its own row. With `sum`: for the parameters assigned
    to this rank, the sums over all rows, in fp32 on the host; this is collective over all ranks,
    with one all-reduce and one copy to the host for each bucket. With `none`: nothing.
    """
    mode = attachment.config.compression.residual_checkpoint
    if mode == "none":
        return
    here = Place.here()
    for name, store in attachment.stores().items():
        turn = 0
        for group in attachment.groups:
            rank, size = here.row(group.expert)
            for bucket in group.buckets:
                values_N = store.settled(bucket)
                if values_N is None:
                    continue
                if mode == "sum":
                    values_N = values_N.to(torch.float32, copy=True)
                    dist.all_reduce(values_N, group=_rows_group(group.expert))
                for piece in bucket.parameters:
                    piece_N = values_N[piece.start : piece.stop]
                    if mode == "full":
                        yield name, piece.name, piece_N
                    elif turn % size == rank:
                        yield name, piece.name, piece_N.cpu().clone()
                    turn += 1


def _rows_group(expert: bool) -> dist.ProcessGroup:
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of its own"
    return group


def rows_for(row: int, size: int, saved_size: int) -> range:
    """The saved rows that row `row` of `size` takes over.

    Example:
        >>> list(rows_for(1, 2, 5))
        [1, 3]
    """
    return range(row, saved_size, size)


def add_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """The sum of rows, in fp32; a single row unchanged, in its own dtype."""
    if len(rows) == 1:
        return rows[0]
    return torch.stack([row.float() for row in rows]).sum(0)


def part_of_sum(total_N: torch.Tensor, row: int, size: int) -> torch.Tensor:
    """Row `row`'s part of a sum: every `size`-th element, whole, and zero elsewhere.

    So the parts add up to the sum exactly; equal parts would do so only if `size` is a power of
    two. Also, only one rank sends each element, instead of all ranks.

    Example:
        >>> part_of_sum(torch.tensor([1.0, 2.0, 3.0]), 0, 2).tolist()
        [1.0, 0.0, 3.0]
    """
    part_N = torch.zeros_like(total_N)
    part_N[row::size] = total_N[row::size]
    return part_N
