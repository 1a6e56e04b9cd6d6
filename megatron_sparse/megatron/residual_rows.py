"""Rows: which ranks share a residual, and which slices of it each of them holds and saves.

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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse.bucket import Bucket, ParameterSlice
from megatron_sparse.compression.residual import SliceKey
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.megatron.checkpoint_layout import Coordinates, RowLayouts
from megatron_sparse.reduction.level_parts import in_place


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
        numel: elements of the slice.
        whole_numel: elements of the parameter.
        expert: whether the parameter is an expert's.
        row: of which the slice is a part.
    """

    bucket: Bucket
    piece: ParameterSlice
    numel: int
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
        return ResidualRow(RANK, *Coordinates.here().row(group.expert))
    index, count = level.across.rank, level.across.world_size
    others = group.instances_group
    if level.level == NODE and others is not None:
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
        for host in group.buckets:
            numels = {piece.name: piece.stop - piece.start for piece in host.parameters}
            bucket = reducer.part(host)
            for piece in bucket.parameters:
                numel, whole_numel = piece.stop - piece.start, numels[piece.name]
                yield HeldSlice(bucket, piece, numel, whole_numel, group.expert, row)


def saved_slices(attachment: Attachment) -> Iterator[tuple[HeldSlice, torch.Tensor]]:
    """What this rank saves with `residual_checkpoint=full`: slices and their values [M].

    Values are views. Buckets that were never pruned have none.
    """
    for each in held_slices(attachment):
        values_N = attachment.residuals.settled(each.bucket)
        if values_N is not None:
            yield each, values_N[each.piece.start : each.piece.stop]


@dataclass(frozen=True)
class SummedParameter:
    """A parameter whose sum over all rows this rank saves with `residual_checkpoint=sum`.

    Attributes:
        name: of the parameter.
        expert: whether it is an expert's.
        total_P: the sum, fp32, on the host.
    """

    name: str
    expert: bool
    total_P: torch.Tensor


def summed_parameters(attachment: Attachment) -> Iterator[SummedParameter]:
    """The parameters assigned to this rank, whole.

    Collective over all ranks: for each bucket one all-reduce, one copy to the host, and while it
    lasts a buffer of 4 bytes for each element.
    """
    here, turn = Coordinates.here(), 0
    for group in attachment.groups:
        rank, size = here.row(group.expert)
        for host in group.buckets:
            bucket = attachment.reducer(group).part(host)
            values_N = attachment.residuals.settled(bucket)
            if values_N is None:
                continue
            total_N = in_place(values_N, bucket, host)
            dist.all_reduce(total_N, group=_data_parallel_group(group.expert))
            for piece in host.parameters:
                if turn % size == rank:
                    total_P = total_N[piece.start : piece.stop].cpu().clone()
                    yield SummedParameter(piece.name, group.expert, total_P)
                turn += 1


def _data_parallel_group(expert: bool) -> dist.ProcessGroup:
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of its own"
    return group


def add_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """The sum of rows, in fp32; a single row unchanged, in its own dtype."""
    if len(rows) == 1:
        return rows[0]
    return torch.stack([row.float() for row in rows]).sum(0)


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
        >>> held = HeldSlice(None, whole, 3, 3, False, ResidualRow("rank", 0, 2))
        >>> part_of_sum(torch.tensor([1.0, 2.0, 3.0]), held).tolist()
        [1.0, 0.0, 3.0]
    """
    first = (held.row.index - held.piece.offset) % held.row.count
    part_M = torch.zeros_like(total_M)
    part_M[first :: held.row.count] = total_M[first :: held.row.count]
    return part_M
