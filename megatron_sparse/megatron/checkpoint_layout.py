"""How a checkpoint holds the plugin's state: places of ranks, rows of residuals, common state.

Bucket layouts change with overlap, bucket size and data-parallel size, so everything here goes by
parameter name.

A *row* is one whole residual of a parameter. Where every rank selects from its own gradient
(`compression.level=rank`) each data-parallel rank has a row. Where a node or an optimizer instance
selects from its sum, the node or the instance has the row, and each of its ranks holds slices of
it. Expert parameters have rows of their own, over the ranks of the expert data-parallel group.

A checkpoint has each parameter as a table: rows x elements. After a change of ranks, nodes or level
new row r takes the sum of the old rows j with j mod count = r, so the total over rows, which error
feedback still has to send, is preserved.

Shape suffixes: N elements of a bucket, P of a parameter, M of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse.bucket import Bucket, ParameterSlice
from megatron_sparse.compression.residual import SliceKey
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.parameter_masters import Parts
from megatron_sparse.reduction.level_parts import in_whole_bucket

VERSION = 4
Residuals = dict[SliceKey, torch.Tensor]
"""Parameter and first element -> 1-D tensor."""
RowLayouts = dict[str, tuple[str, int]]
"""`dense` and `expert` -> the level of compression, and the number of rows; see `ResidualRow`."""


def data_place(expert: bool) -> tuple[int, int]:
    """Returns this rank's number among the ranks that hold its parameters, and their number.

    The places of experts differ from the others only in models with experts.
    """
    group = data_parallel_group(expert)
    return dist.get_rank(group), dist.get_world_size(group)


def model_shard(expert: bool) -> str:
    """Names the part of the model that the rank holds; part of keys in a checkpoint."""
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    if expert:
        # None only where Megatron's groups were not made.
        tensor = parallel_state.get_expert_tensor_parallel_rank() or 0
        experts = parallel_state.get_expert_model_parallel_rank()
        return f"expert.tp{tensor}.ep{experts}.pp{pipeline}"
    return f"tp{parallel_state.get_tensor_model_parallel_rank()}.pp{pipeline}"


def model_sizes() -> tuple[int, int, int]:
    """Tensor, pipeline and expert sizes, which must not change between save and load."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


@dataclass
class Saved:
    """One rank's part of a checkpoint.

    `data_size` and `rows` are of the run that wrote it: its data-parallel size, and how the rows of
    residuals lie; `rows` is None for a model with another layout, whose residuals are not read.
    `unknown` names parameters that this run does not have. `masters` are the parts of
    `parameters.method=lossy` that overlap with this rank's shards.
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


def check_sizes(saved: tuple[int, ...]) -> None:
    """Refuses residuals of a model with another layout.

    Raises:
        CheckpointError: a tensor-, pipeline- or expert-parallel size differs.
    """
    if saved != model_sizes():
        raise CheckpointError(
            "the checkpoint's residuals belong to another model-parallel layout",
            expected=f"(tensor, pipeline, expert) sizes {model_sizes()}",
            got=saved,
            remedy="resume with the same sizes, or start with zero residuals: "
            "compression.residual_checkpoint=none",
        )


def model_layers(attachment: Attachment) -> dict[str, int]:
    """The layers of this rank's chunks, and what lies in them: name to the layer's global number.

    Names, by which residuals go too, count a chunk's layers from 0, however many lie before them.
    """
    return {
        f"chunk{index}.{name}": module.layer_number
        for index, chunk in enumerate(attachment.chunks)
        for name, module in chunk.module.named_modules()
        if isinstance(getattr(module, "layer_number", None), int)
    }


def check_layers(saved: dict[str, int], attachment: Attachment) -> None:
    """Refuses residuals of other layers of the same names, as of another virtual pipeline size.

    Args:
        saved: by `model_layers`; empty in older checkpoints, which are accepted.
        attachment: whose layers are compared.

    Raises:
        CheckpointError: a layer has another number.
    """
    for name, now in model_layers(attachment).items():
        before = saved.get(name, now)
        if before != now:
            raise CheckpointError(
                "the checkpoint's residuals belong to another split of layers over the pipeline",
                expected=f"{name} in layer {now}",
                got=f"in layer {before}",
                remedy="resume with the same split, or start with zero residuals: "
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


def model_parameters(attachment: Attachment) -> set[tuple[bool, str]]:
    """Every parameter of the buckets: whether its rows are an expert's, and its name."""
    return {
        (group.expert, piece.name)
        for group in attachment.groups
        for bucket in group.buckets
        for piece in bucket.parameters
    }


@dataclass(frozen=True)
class ResidualRow:
    """A rank's row of the parameters of one bucket group.

    Attributes:
        level: of compression: which ranks share a row.
        index: of the row.
        count: rows in all.
    """

    level: str
    index: int
    count: int

    def takes(self, saved_count: int) -> range:
        """The saved rows that this row takes over.

        Example:
            >>> list(ResidualRow("rank", 1, 2).takes(5))
            [1, 3]
        """
        return range(self.index, saved_count, self.count)


@dataclass(frozen=True)
class HeldSlice:
    """A slice of a parameter whose residual this rank holds.

    Attributes:
        bucket: what the rank selects from.
        piece: the slice's place in it.
        whole_numel: elements of the parameter.
        expert: whether the parameter is an expert's.
        row: of which the slice is a part.
    """

    bucket: Bucket
    piece: ParameterSlice
    whole_numel: int
    expert: bool
    row: ResidualRow

    @property
    def key(self) -> SliceKey:
        """Parameter and first element."""
        return self.piece.name, self.piece.offset


def row_of(attachment: Attachment, group: GroupBuckets) -> ResidualRow:
    """This rank's row of a group's parameters."""
    level = attachment.reducer(group).level_groups
    # On one node nothing is compressed: each rank has whole residuals, as at level `rank`.
    if level is None or level.across.world_size == 1:
        return ResidualRow(RANK, *data_place(group.expert))
    # `across` has one rank of each node, or of each instance.
    index, count = level.across.rank, level.across.world_size
    others = group.instances_group
    if level.level == NODE and others is not None:
        # Nodes are counted inside one instance: the rows of each instance follow the last one's.
        index += count * dist.get_rank(others)
        count *= dist.get_world_size(others)
    return ResidualRow(level.level, index, count)


def row_layouts(attachment: Attachment) -> RowLayouts:
    """Level and number of rows, by kind of parameter."""
    rows = {
        "expert" if group.expert else "dense": row_of(attachment, group)
        for group in attachment.groups
    }
    return {kind: (row.level, row.count) for kind, row in rows.items()}


def held_slices(attachment: Attachment) -> Iterator[HeldSlice]:
    """All slices whose residual this rank holds, or may hold, in the buckets' order."""
    for group in attachment.groups:
        row, reducer = row_of(attachment, group), attachment.reducer(group)
        for whole in group.buckets:
            numels = {parameter.name: parameter.numel for parameter in whole.parameters}
            part = reducer.part(whole)
            for piece in part.parameters:
                yield HeldSlice(part, piece, numels[piece.name], group.expert, row)


def summed_parameters(attachment: Attachment) -> Iterator[tuple[str, bool, torch.Tensor]]:
    """The whole parameters that this rank saves with `residual_checkpoint=sum`.

    Of each the name, whether it is an expert's, and the sum over all rows: fp32 [P] on the host.

    Collective over all ranks: for each bucket one all-reduce, one copy to the host, and while it
    lasts a buffer of 4 bytes for each element. All ranks have the sums; they save parameters by
    turns.
    """
    turn = 0  # counts parameters; each rank saves those whose turn is its own
    for group in attachment.groups:
        rank, size = data_place(group.expert)
        for whole in group.buckets:
            part = attachment.reducer(group).part(whole)
            values_M = attachment.residuals.settled(part)
            if values_M is None:
                continue
            total_N = in_whole_bucket(values_M, part, whole)
            dist.all_reduce(total_N, group=data_parallel_group(group.expert))
            for parameter in whole.parameters:
                if turn % size == rank:
                    total_P = total_N[parameter.start : parameter.stop].cpu().clone()
                    yield parameter.name, group.expert, total_P
                turn += 1


def data_parallel_group(expert: bool) -> dist.ProcessGroup:
    """The ranks that hold this rank's parameters, as `data_place` counts them."""
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of its own"
    return group


def part_of_sum(total_M: torch.Tensor, held: HeldSlice) -> torch.Tensor:
    """The row's part of a slice of a sum: every `count`-th element of the parameter, else zero.

    So the parts add up to the sum exactly; equal parts would do so only if `count` is a power of
    two. Also, only one row sends each element, instead of all of them.

    Args:
        total_M: the sum over rows, cut as `held` is.
        held: the slice.

    Example:
        The row 0 of 2 of the whole parameter.
        >>> whole = ParameterSlice("w", 0, 3)
        >>> held = HeldSlice(None, whole, 3, False, ResidualRow("rank", 0, 2))
        >>> part_of_sum(torch.tensor([1.0, 2.0, 3.0]), held).tolist()
        [1.0, 0.0, 3.0]
    """
    # The slice's first element whose place in the parameter, modulo `count`, is the row's index.
    first = (held.row.index - held.piece.offset) % held.row.count
    part_M = torch.zeros_like(total_M)
    part_M[first :: held.row.count] = total_M[first :: held.row.count]
    return part_M
