"""The plugin's state inside Megatron's distributed checkpoint (`--ckpt-format torch_dist`).

`sharded_state` makes an addition to the state dict that Megatron saves, so that its parallel and
asynchronous writing apply. `read` lists the checkpoint's keys before it loads any, so that Megatron
raises no error for a missing key or another data-parallel size.

Keys begin with `megatron_sparse.`: `header` (one object), `state.tp0.pp0` (one object for each
data-parallel rank) and `residual.<part of the model>.<parameter>`: a table of rows x elements
(`residual_rows`), of which a rank writes its slices; or with `residual_checkpoint=sum` the sum of
all rows, once.
With `parameters.method=lossy` there is also `master.<part of the model>.<parameter>.<start>`, for
each part of a parameter that a rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sparse.compression.residual import check_size
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_layout import (
    VERSION,
    Coordinates,
    Saved,
    bucket_sizes,
    check_sizes,
    check_version,
    common_state,
    model_parameters,
)
from megatron_sparse.megatron.parameter_masters import overlapping, saved_parts
from megatron_sparse.megatron.residual_rows import (
    HeldSlice,
    add_rows,
    held_slices,
    part_of_sum,
    row_layouts,
    saved_slices,
    summed_parameters,
)

PREFIX = "megatron_sparse"
RESIDUAL, MASTER = "residual", "master"


def sharded_state(attachment: Attachment) -> dict[str, Any]:
    """Sharded objects and tensors to be saved by `dist_checkpointing.save`.

    Put it under a key of its own into the state dict that every rank saves. With
    `residual_checkpoint=full` tensors are the residuals themselves on a GPU, which must not change
    before the save has copied them, and copies on a CPU; with `sum` building it is collective.
    """
    here = Coordinates.here()
    header = common_state(attachment) | {
        "model_sizes": here.model_sizes(),
        "data_size": here.data_size,
    }
    own = {
        "planner": attachment.planner.state_dict(),
        "buckets": bucket_sizes(attachment),
        "rows": row_layouts(attachment),
    }
    state: dict[str, Any] = {
        "header": ShardedObject(f"{PREFIX}.header", header, (1,), (0,), replica_id=dist.get_rank()),
        "rank": ShardedObject(_state_key(here), own, (here.data_size,), (here.data,)),
    }
    state |= dict(_sharded_residuals(attachment, here))
    for part in saved_parts(attachment.parameters.lossy):
        key = f"{_kind_key(MASTER, here, part.expert)}{part.name}.{part.start}"
        values_M = part.values_M.clone()
        state[f"{MASTER}.{part.name}.{part.start}"] = ShardedTensor.from_rank_offsets(
            key, values_M, replica_id=part.instance
        )
    return state


def _sharded_residuals(
    attachment: Attachment, here: Coordinates
) -> Iterator[tuple[str, ShardedTensor]]:
    mode = attachment.config.compression.residual_checkpoint
    if mode == "full":
        for held, view_M in saved_slices(attachment):
            # Asynchronous writers copy GPU memory at once, but may read host memory later.
            values_M = view_M.clone() if view_M.device.type == "cpu" else view_M
            name, start = held.key
            key = f"{_kind_key(RESIDUAL, here, held.expert)}{name}"
            table = (held.row.count, held.whole_numel)
            yield (
                f"{RESIDUAL}.{name}.{start}",
                _part_of_table(key, values_M, table, (held.row.index, start)),
            )
    elif mode == "sum":
        for each in summed_parameters(attachment):
            key = f"{_kind_key(RESIDUAL, here, each.expert)}{each.name}"
            yield (f"{RESIDUAL}.{each.name}", ShardedTensor.from_rank_offsets(key, each.total_P))


def _part_of_table(
    key: str, values_M: torch.Tensor, table: tuple[int, int], at: tuple[int, int]
) -> ShardedTensor:
    """Values in one row of a table, from the element `at` on. Parts may be of different sizes."""
    return ShardedTensor(key, values_M[None], values_M.dtype, (1, len(values_M)), table, at, None)


def read(attachment: Attachment, checkpoint: Path, *, residuals: bool) -> Saved | None:
    """The state that this rank takes over; None if the checkpoint holds none of this version.

    Reads the metadata and this rank's own part; not collective.

    Args:
        attachment: names the slices to read.
        checkpoint: folder of a distributed checkpoint.
        residuals: whether to read them; without them the layout of the model does not matter.

    Raises:
        CheckpointError: residuals are of another version or another model-parallel layout.
    """
    here = Coordinates.here()
    found = _entries(checkpoint)
    header_object = ShardedObject(f"{PREFIX}.header", None, (1,), (0,))
    if header_object.unique_key not in found:
        return None
    header = _load(checkpoint, {"header": header_object})["header"]
    check_version(checkpoint, header["version"], wanted=residuals)
    if header["version"] != VERSION:
        return None
    if residuals:
        check_sizes(tuple(header["model_sizes"]), here)
    saved = Saved(**{each.name: header[each.name] for each in fields(Saved) if each.name in header})
    same = saved.data_size == here.data_size
    rank_object = ShardedObject(
        _state_key(here), None, (saved.data_size,), (here.data if same else 0,)
    )
    pieces = list(_pieces(attachment, here, found, saved.mode)) if residuals else []
    template: dict[str, Any] = {piece.label: piece.template for piece in pieces if piece.template}
    masters = _master_entries(attachment, here, found)
    template |= {entry.key: _whole(entry) for entry in masters.values()}
    # Missing only for a model with another layout, whose residuals are not read.
    if rank_object.unique_key in found:
        template["rank"] = rank_object
    loaded = _load(checkpoint, template) if template else {}
    if "rank" in loaded:
        own = loaded["rank"]
        saved.planner, saved.buckets, saved.rows = own["planner"], own["buckets"], own["rows"]
    saved.masters = {part: loaded[entry.key]["whole"] for part, entry in masters.items()}
    for piece in pieces:
        # A row that takes none over is zero, but exists: all ranks save the same parameters.
        value_M = torch.zeros(piece.held.numel)
        if piece.template:
            value_M = add_rows([row.view(-1) for row in loaded[piece.label].values()])
        if saved.mode == "sum":
            value_M = part_of_sum(value_M, piece.held)
        saved.residuals[piece.held.key] = value_M
    if residuals:
        saved.unknown = _unknown(attachment, here, found)
    return saved


@dataclass(frozen=True)
class _Entry:
    """A tensor in a checkpoint, or an object, which has no shape."""

    key: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def _entries(checkpoint: Path) -> dict[str, _Entry]:
    """The plugin's entries in the checkpoint.

    Megatron's own function for this makes a tensor from every entry's properties, and fails with
    torch 2.15, which has one property more.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key: _Entry(key, tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else _Entry(key)
        for key, entry in stored.items()
        if key.startswith(f"{PREFIX}.")
    }


@dataclass
class _Piece:
    """A slice of a residual, and the saved rows of it that this rank takes over."""

    held: HeldSlice
    template: dict[str, ShardedTensor]

    @property
    def label(self) -> str:
        name, start = self.held.key
        return f"{RESIDUAL}.{name}.{start}"


def _pieces(
    attachment: Attachment, here: Coordinates, found: dict[str, _Entry], mode: str
) -> Iterator[_Piece]:
    """What this rank reads.

    Raises:
        CheckpointError: a parameter has another size.
    """
    for each in held_slices(attachment):
        name, _ = each.key
        entry = found.get(f"{_kind_key(RESIDUAL, here, each.expert)}{name}")
        if entry is not None:
            check_size(name, entry.shape[-1], each.whole_numel)
            taken = _sum(entry, each) if mode == "sum" else _rows(entry, each)
            yield _Piece(each, {str(index): one for index, one in enumerate(taken)})


def _sum(entry: _Entry, held: HeldSlice) -> list[ShardedTensor]:
    """The request for a slice of the sum."""
    empty_M, start = torch.empty(held.numel, dtype=entry.dtype), (held.piece.offset,)
    shape = (held.numel,)
    return [ShardedTensor(entry.key, empty_M, empty_M.dtype, shape, entry.shape, start, None)]


def _rows(entry: _Entry, held: HeldSlice) -> list[ShardedTensor]:
    """The requests for the rows that a slice takes over."""
    table, requests = (entry.shape[0], entry.shape[1]), []
    for row in held.row.takes(entry.shape[0]):
        empty_M = torch.empty(held.numel, dtype=entry.dtype)
        requests.append(_part_of_table(entry.key, empty_M, table, (row, held.piece.offset)))
    return requests


def _unknown(attachment: Attachment, here: Coordinates, found: dict[str, _Entry]) -> set[str]:
    """Saved parameters that this run does not have."""
    known = model_parameters(attachment)
    prefixes = {_kind_key(RESIDUAL, here, expert): expert for expert in (False, True)}
    return {
        key.removeprefix(prefix)
        for prefix, expert in prefixes.items()
        for key in found
        if key.startswith(prefix) and (expert, key.removeprefix(prefix)) not in known
    }


def _master_entries(
    attachment: Attachment, here: Coordinates, found: dict[str, _Entry]
) -> dict[tuple[str, int], _Entry]:
    """The stored parts of masters that this rank needs, by parameter and first element."""
    needed = {}
    for expert in (False, True):
        prefix, stored = _kind_key(MASTER, here, expert), {}
        for key, entry in found.items():
            if key.startswith(prefix):
                name, start = key.removeprefix(prefix).rsplit(".", 1)
                stored[name, int(start)] = entry
        rows = [(name, start, entry.shape[0]) for (name, start), entry in stored.items()]
        for name, start, _ in overlapping(attachment.parameters.lossy, expert, rows):
            needed[name, start] = stored[name, start]
    return needed


def _whole(entry: _Entry) -> dict[str, ShardedTensor]:
    """The request for a whole tensor."""
    empty = torch.empty(entry.shape, dtype=entry.dtype)
    return {"whole": ShardedTensor.from_rank_offsets(entry.key, empty)}


def _state_key(place: Coordinates) -> str:
    return f"{PREFIX}.state.{place.shard(expert=False)}"


def _kind_key(kind: str, place: Coordinates, expert: bool) -> str:
    return f"{PREFIX}.{kind}.{place.shard(expert)}."


def _load(checkpoint: Path, template: dict[str, Any]) -> dict[str, Any]:
    """Reads the entries of `template` on this rank alone."""
    loaded = dist_checkpointing.load(
        {PREFIX: template}, str(checkpoint), validate_access_integrity=False
    )
    assert isinstance(loaded, dict)
    return loaded[PREFIX]
