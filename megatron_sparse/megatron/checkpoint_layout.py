"""How a checkpoint holds the plugin's state: a table of residuals for each parameter, common state.

Bucket layouts change with overlap, bucket size and data-parallel size, so a checkpoint names
parameters, not buckets.

A *row* is one whole residual of a parameter. Where every rank selects from its own gradient
(`compression.level=rank`) each data-parallel rank has a row. Where a node or an optimizer instance
selects from its sum, the node or the instance has the row, and each of its ranks holds slices of
it. Expert parameters have rows of their own, over the ranks of the expert data-parallel group.

A checkpoint has the residuals of each parameter as a table: rows x elements. After a change of
ranks, nodes or level new row r takes the sum of the old rows j with j mod count = r, so the total
over rows, which error feedback still has to send, is preserved.

A *part* is the elements of a bucket that this rank selects from; at level `rank` the whole bucket.
Shape suffixes: N elements of a bucket, P of a parameter, M of a slice.
"""

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
"""Parameter's name and the slice's first element -> the slice's residual, 1-D."""
RowLayouts = dict[str, tuple[str, int]]
"""`dense` and `expert` -> the level of compression, and the number of rows; see `ResidualRow`."""


def data_rank_and_size(expert: bool) -> tuple[int, int]:
    """Returns this rank's number in its data-parallel group, and the size of that group.

    `expert` chooses the group of expert parameters, which differs only in models with experts.
    """
    group = data_parallel_group(expert)
    return dist.get_rank(group), dist.get_world_size(group)


def model_shard(expert: bool) -> str:
    """Names this rank's model-parallel shard (`tp0.pp1`), for keys in a checkpoint."""
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    if expert:
        # Megatron returns None if it made no such group.
        tensor = parallel_state.get_expert_tensor_parallel_rank() or 0
        experts = parallel_state.get_expert_model_parallel_rank()
        return f"expert.tp{tensor}.ep{experts}.pp{pipeline}"
    return f"tp{parallel_state.get_tensor_model_parallel_rank()}.pp{pipeline}"


def model_sizes() -> tuple[int, int, int]:
    """Tensor-, pipeline- and expert-parallel sizes; saved residuals fit only the same sizes."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


@dataclass
class Saved:
    """The state in a checkpoint that one rank restores.

    `norms` are those of `spikes.UsualNorm`. `data_size`, `mode` and `rows` are the data-parallel
    size, `compression.residual_checkpoint` and the row layouts of the run that saved; `rows` is
    None if its model-parallel layout differs and residuals are not read. `unknown` names saved
    parameters that this run does not have. `masters` are those in this rank's shards.
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
    """Raises a `CheckpointError` if residuals are `wanted`, but another version has saved them.

    `version` is that of the state in the folder `checkpoint`. A run that restores no residuals
    accepts any.
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
    """Raises a `CheckpointError` if the run that saved had other `model_sizes` than this one."""
    if saved != model_sizes():
        raise CheckpointError(
            "the checkpoint's residuals belong to another model-parallel layout",
            expected=f"(tensor, pipeline, expert) sizes {model_sizes()}",
            got=saved,
            remedy="resume with the same sizes, or start with zero residuals: "
            "compression.residual_checkpoint=none",
        )


def model_layers(attachment: Attachment) -> dict[str, int]:
    """Module name -> global number of its layer, for the layers of this rank's chunks.

    Modules' names, like the parameters' names in a checkpoint, count layers from 0 in each chunk.
    Only the global number shows whether a layer of that name is still the same one.
    """
    return {
        f"chunk{index}.{name}": module.layer_number
        for index, chunk in enumerate(attachment.chunks)
        for name, module in chunk.module.named_modules()
        if isinstance(getattr(module, "layer_number", None), int)
    }


def check_layers(saved: dict[str, int], attachment: Attachment) -> None:
    """Raises a `CheckpointError` if a module's name meant another layer in the run that saved.

    A change of the virtual pipeline size causes this. `saved` is the result of `model_layers`.
    """
    for name, now in model_layers(attachment).items():
        before = saved.get(name, now)  # older checkpoints lack the name: accept it
        if before != now:
            raise CheckpointError(
                "the checkpoint's residuals belong to another split of layers over the pipeline",
                expected=f"{name} in layer {now}",
                got=f"in layer {before}",
                remedy="resume with the same split, or start with zero residuals: "
                "compression.residual_checkpoint=none",
            )


def common_state(attachment: Attachment) -> dict[str, Any]:
    """The state that is the same on every rank, named as in `Saved`. The host waits for the GPU."""
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
    """Every parameter of the buckets, as (whether it is an expert's, its name)."""
    return {
        (group.expert, piece.name)
        for group in attachment.groups
        for bucket in group.buckets
        for piece in bucket.parameters
    }


@dataclass(frozen=True)
class ResidualRow:
    """The row that a rank has, whole or in part, in the tables of one bucket group's parameters.

    Attributes:
        level: the level of compression, `rank`, `node` or `instance`: which ranks share a row.
        index: the row's number.
        count: rows in the table.
    """

    level: str
    index: int
    count: int

    def takes(self, saved_count: int) -> range:
        """Which of the saved rows, 0 to `saved_count` - 1, are added up to make this row.

        Example:
            >>> list(ResidualRow("rank", 1, 2).takes(5))
            [1, 3]
        """
        return range(self.index, saved_count, self.count)


@dataclass(frozen=True)
class HeldSlice:
    """A slice of a parameter whose residual this rank holds.

    Attributes:
        bucket: the part of a bucket that the rank selects from.
        piece: the slice: its offset in the parameter, and where it lies in `bucket`.
        whole_numel: elements of the parameter.
        expert: whether the parameter is an expert's.
        row: the row of the parameter's table that the slice belongs to.
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
    """The row of this rank in the tables of a bucket group's parameters."""
    level = attachment.reducer(group).level_groups  # None at level `rank`
    # With one node (a lone rank in `across`) a rank's part is the whole bucket: see `level_of`.
    if level is None or level.across.world_size == 1:
        return ResidualRow(RANK, *data_rank_and_size(group.expert))
    # `across` has one rank of each node, or of each instance: its number is that of the row.
    index, count = level.across.rank, level.across.world_size
    instances = group.instances_group
    if level.level == NODE and instances is not None:
        # `across` counts the nodes of one instance: rows of instance 1 follow those of instance 0.
        index += count * dist.get_rank(instances)
        count *= dist.get_world_size(instances)
    return ResidualRow(level.level, index, count)


def row_layouts(attachment: Attachment) -> RowLayouts:
    """The level and the number of rows for dense parameters, and for those of experts."""
    rows = {  # groups of a kind agree, so it does not matter that the last one stays
        "expert" if group.expert else "dense": row_of(attachment, group)
        for group in attachment.groups
    }
    return {kind: (row.level, row.count) for kind, row in rows.items()}


def held_slices(attachment: Attachment) -> Iterator[HeldSlice]:
    """Yields all slices that this rank selects from, even if nothing was selected from one yet."""
    for group in attachment.groups:
        row, reducer = row_of(attachment, group), attachment.reducer(group)
        for whole in group.buckets:
            numels = {parameter.name: parameter.numel for parameter in whole.parameters}
            part = reducer.part(whole)
            for piece in part.parameters:
                yield HeldSlice(part, piece, numels[piece.name], group.expert, row)


def summed_parameters(attachment: Attachment) -> Iterator[tuple[str, bool, torch.Tensor]]:
    """Adds up the rows of each parameter; yields the parameters that this rank is to save.

    For `residual_checkpoint=sum`. All ranks get all sums, but save different parameters. Yields
    (name, whether it is an expert's, sum over all rows: fp32 [P] on the host).

    Collective over all ranks: one small all-reduce; for each bucket one all-reduce, and meanwhile a
    buffer of 4 bytes for each element.
    """
    turn = 0  # number of the parameter, which the rank `turn % size` saves
    for group in attachment.groups:
        rank, size = data_rank_and_size(group.expert)
        ranks = data_parallel_group(group.expert)
        parts = [attachment.reducer(group).part(whole) for whole in group.buckets]
        residuals = [attachment.residuals.settled(part) for part in parts]
        # A resumed rank may have none where others do: nothing of its part had been saved.
        own = [values_M is not None for values_M in residuals]
        on_any_rank = torch.tensor(own, dtype=torch.uint8, device=parts[0].grad_N.device)
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, ranks)
        held = zip(group.buckets, parts, residuals, on_any_rank.tolist(), strict=True)
        for whole, part, values_M, is_saved in held:
            if not is_saved:
                continue
            if values_M is None:
                values_M = torch.zeros_like(part.grad_N)
            total_N = in_whole_bucket(values_M, part, whole)
            dist.all_reduce(total_N, group=ranks)
            for parameter in whole.parameters:
                if turn % size == rank:
                    total_P = total_N[parameter.start : parameter.stop].cpu().clone()
                    yield parameter.name, group.expert, total_P
                turn += 1


def data_parallel_group(expert: bool) -> dist.ProcessGroup:
    """The ranks that hold the same parameters as this rank; `expert` means those of experts."""
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of its own"
    return group


def part_of_sum(total_M: torch.Tensor, held: HeldSlice) -> torch.Tensor:
    """Splits a saved sum among `count` rows: each takes every `count`-th element, zero elsewhere.

    Returns the row's values of the slice `held`. The rows add up to the sum exactly; sum / `count`
    would do so only for a power of two. Also, each element is then sent by one row only.

    Args:
        total_M: the elements of the sum that lie in the slice.
        held: the slice and its row.

    Example:
        Row 0 of 2, for a slice that is the whole parameter.
        >>> whole = ParameterSlice("w", 0, 3)
        >>> held = HeldSlice(None, whole, 3, False, ResidualRow("rank", 0, 2))
        >>> part_of_sum(torch.tensor([1.0, 2.0, 3.0]), held).tolist()
        [1.0, 0.0, 3.0]
    """
    # The slice's first element whose number in the parameter, modulo `count`, is the row's index.
    first = (held.row.index - held.piece.offset) % held.row.count
    part_M = torch.zeros_like(total_M)
    part_M[first :: held.row.count] = total_M[first :: held.row.count]
    return part_M
