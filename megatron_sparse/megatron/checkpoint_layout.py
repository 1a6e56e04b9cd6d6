"""The plugin's state in a checkpoint apart from residuals, and the places of ranks.

Bucket layouts change with overlap, bucket size and data-parallel size, so everything here goes by
parameter name. Residuals: `residual_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_sparse.compression.residual import SliceKey
from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.parameter_masters import Parts

VERSION = 4
Residuals = dict[SliceKey, torch.Tensor]
"""Parameter and first element -> 1-D tensor."""
RowLayouts = dict[str, tuple[str, int]]
"""`dense` and `expert` -> the level of compression, and the rows of residuals; see `Row`."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates. The expert ones differ from the others only in models with experts."""

    data: int
    data_size: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    expert: int
    expert_size: int
    expert_data: int
    expert_data_size: int
    expert_tensor: int

    @classmethod
    def here(cls) -> Coordinates:
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
        """This rank's number among those that hold its parameters, and their number."""
        if expert:
            return self.expert_data, self.expert_data_size
        return self.data, self.data_size


@dataclass
class Saved:
    """One rank's part of a checkpoint.

    `data_size` and `rows` are of the run that wrote it: its data-parallel size, and how the rows of
    residuals lie; `buckets` and `rows` are None for a model with another layout, whose residuals
    are not read. `unknown` names parameters that this run does not have. `masters` are the parts
    of `parameters.method=lossy` that overlap with this rank's shards.
    """

    step: int
    enabled: bool
    loss_scale: float | None = None
    gradient_factor: float | None = None
    norms: list[float] = field(default_factory=list)
    data_size: int = 0
    mode: str = "none"
    trials: dict[str, Any] = field(default_factory=dict)
    planner: dict[str, Any] = field(default_factory=dict)
    buckets: dict[str, int] | None = None
    rows: RowLayouts | None = None
    residuals: Residuals = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    masters: Parts = field(default_factory=dict)


def check_version(checkpoint: Path, version: object, *, wanted: bool) -> None:
    """Refuses residuals that another version of the plugin has written.

    Args:
        checkpoint: the folder.
        version: of the state in it.
        wanted: whether this run takes over residuals; without them it starts at zero all the same.

    Raises:
        CheckpointError: they are wanted, and of another version.
    """
    if wanted and version != VERSION:
        raise CheckpointError(
            f"the plugin's state in {checkpoint} was written by another version",
            expected=f"version {VERSION}, in Megatron's own checkpoint",
            got=version,
            remedy="resume with that version of megatron_sparse, or start with zero residuals: "
            "compression.residual_checkpoint=none",
        )


def check_sizes(saved: tuple[int, ...], here: Coordinates) -> None:
    """Refuses residuals of a model with another layout.

    Raises:
        CheckpointError: a tensor-, pipeline- or expert-parallel size differs.
    """
    if saved != here.model_sizes():
        raise CheckpointError(
            "the checkpoint's residuals belong to another model-parallel layout",
            expected=f"(tensor, pipeline, expert) sizes {here.model_sizes()}",
            got=saved,
            remedy="resume with the same sizes, or start with zero residuals: "
            "compression.residual_checkpoint=none",
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
        "norms": list(attachment.usual_norm.norms),
        "mode": attachment.config.compression.residual_checkpoint,
        "trials": {} if attachment.trials is None else attachment.trials.state_dict(),
    }


def bucket_sizes(attachment: Attachment) -> dict[str, int]:
    """Elements of every bucket, by name."""
    return {bucket.name: bucket.numel for bucket in attachment.buckets}


def model_parameters(attachment: Attachment) -> set[tuple[bool, str]]:
    """Every parameter of the buckets: whether its rows are an expert's, and its name."""
    return {
        (group.expert, piece.name)
        for group in attachment.groups
        for bucket in group.buckets
        for piece in bucket.parameters
    }
