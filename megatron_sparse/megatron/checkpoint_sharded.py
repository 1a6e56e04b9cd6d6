"""The plugin's state inside Megatron's distributed checkpoint (`--ckpt-format torch_dist`).

`sharded_state` makes an addition to the state dict that Megatron saves, so that its parallel and
asynchronous writing apply. `read` lists the checkpoint's keys before it loads any, so that Megatron
raises no error for a missing key or another data-parallel size.

Keys begin with `megatron_sparse.`: `header` (one object), `state.tp0.pp0` (one object for each
data-parallel rank) and `<store>.<part of the model>.<parameter>`: one row of the parameter's
elements for each data-parallel rank, or with `residual_checkpoint=sum` the sum of all rows, once.
With `parameters.method=lossy` there is also `master.<part of the model>.<parameter>.<start>`, for
each part of a parameter that a rank owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_files import check_sizes
from megatron_sparse.megatron.checkpoint_layout import (
    VERSION,
    Place,
    Saved,
    add_rows,
    common_state,
    expert_parameters,
    part_of_sum,
    rank_state,
    rows_for,
    store_contents,
)
from megatron_sparse.megatron.parameter_masters import overlapping, saved_parts

PREFIX = "megatron_sparse"
MASTER = "master"


def sharded_state(attachment: Attachment) -> dict[str, Any]:
    """Sharded objects and tensors to be saved by `dist_checkpointing.save`.

    Put it under a key of its own into the state dict that every rank saves. With
    `residual_checkpoint=full` tensors are the residuals themselves on a GPU, which must not change
    before the save has copied them, and copies on a CPU; with `sum` building it is collective.
    """
    here = Place.here()
    header = common_state(attachment) | {
        "model_sizes": here.model_sizes(),
        "data_size": here.data_size,
    }
    state: dict[str, Any] = {
        "header": ShardedObject(f"{PREFIX}.header", header, (1,), (0,), replica_id=dist.get_rank()),
        "rank": ShardedObject(
            _state_key(here), rank_state(attachment), (here.data_size,), (here.data,)
        ),
    }
    experts = expert_parameters(attachment)
    mode = attachment.config.compression.residual_checkpoint
    for store, name, view in store_contents(attachment):
        expert = name in experts
        key = f"{_store_key(store, here, expert)}{name}"
        if mode == "sum":
            tensor = ShardedTensor.from_rank_offsets(key, view)
        else:
            row, size = here.row(expert)
            # Asynchronous writers copy GPU memory at once, but may read host memory later.
            view = view.clone() if view.device.type == "cpu" else view
            tensor = ShardedTensor.from_rank_offsets(key, view, (0, row, size), prepend_axis_num=1)
        state[f"{store}.{name}"] = tensor
    for part in saved_parts(attachment.parameters.lossy):
        key = f"{_store_key(MASTER, here, part.expert)}{part.name}.{part.start}"
        values_M = part.values_M.clone()
        state[f"{MASTER}.{part.name}.{part.start}"] = ShardedTensor.from_rank_offsets(
            key, values_M, replica_id=part.instance
        )
    return state


def read(attachment: Attachment, checkpoint: Path, *, stores: bool) -> Saved | None:
    """The state that this rank takes over; None if the checkpoint holds none of the plugin's.

    Reads the metadata and this rank's own part; not collective.

    Args:
        attachment: names the stores to read.
        checkpoint: folder of a distributed checkpoint.
        stores: whether to read residuals; without them the layout of the model does not matter.

    Raises:
        CheckpointError: the state is of another version or another model-parallel layout.
    """
    here = Place.here()
    found = _entries(checkpoint)
    header_object = ShardedObject(f"{PREFIX}.header", None, (1,), (0,))
    if header_object.unique_key not in found:
        return None
    header = _load(checkpoint, {"header": header_object})["header"]
    if header["version"] != VERSION:
        raise CheckpointError(
            f"the plugin's state in {checkpoint} was written by another version",
            expected=VERSION,
            got=header["version"],
            remedy="resume with that version of megatron_sparse",
        )
    if stores:
        check_sizes(tuple(header["model_sizes"]), here, "set compression.residual_checkpoint=none")
    saved = Saved(
        header["step"],
        header["enabled"],
        header["loss_scale"],
        header["gradient_factor"],
        header["data_size"],
        header["mode"],
        header["kept"],
    )
    same = saved.data_size == here.data_size
    rank_object = ShardedObject(
        _state_key(here), None, (saved.data_size,), (here.data if same else 0,)
    )
    pieces = _pieces(attachment, here, found, saved.mode) if stores else []
    template: dict[str, Any] = {f"{p.store}.{p.name}": p.template for p in pieces if p.template}
    masters = _master_entries(attachment, here, found)
    template |= {entry.key: _whole(entry) for entry in masters.values()}
    # Missing only for a model with another layout, whose residuals are not read.
    if rank_object.unique_key in found:
        template["rank"] = rank_object
    loaded = _load(checkpoint, template) if template else {}
    if "rank" in loaded:
        saved.planner, saved.buckets = loaded["rank"]["planner"], loaded["rank"]["buckets"]
        saved.method = loaded["rank"]["method"] if same else {}
    saved.masters = {part: loaded[entry.key]["whole"] for part, entry in masters.items()}
    for piece in pieces:
        if piece.template:
            rows = [row.view(-1) for row in loaded[f"{piece.store}.{piece.name}"].values()]
            value = add_rows(rows)
            if saved.mode == "sum":
                value = part_of_sum(value, piece.row, piece.size)
            saved.stores.setdefault(piece.store, {})[piece.name] = value
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
    """A parameter of a store, and the saved rows of it that this rank takes over."""

    store: str
    name: str
    row: int
    size: int
    template: dict[str, ShardedTensor]


def _pieces(
    attachment: Attachment, here: Place, found: dict[str, _Entry], mode: str
) -> list[_Piece]:
    pieces = []
    for store in attachment.stores():
        for expert in (False, True):
            prefix, (row, size) = _store_key(store, here, expert), here.row(expert)
            for key, entry in found.items():
                if key.startswith(prefix):
                    template = _whole(entry) if mode == "sum" else _rows(entry, row, size)
                    pieces.append(_Piece(store, key.removeprefix(prefix), row, size, template))
    return pieces


def _master_entries(
    attachment: Attachment, here: Place, found: dict[str, _Entry]
) -> dict[tuple[str, int], _Entry]:
    """The stored parts of masters that this rank needs, by parameter and first element."""
    needed = {}
    for expert in (False, True):
        prefix, stored = _store_key(MASTER, here, expert), {}
        for key, entry in found.items():
            if key.startswith(prefix):
                name, start = key.removeprefix(prefix).rsplit(".", 1)
                stored[name, int(start)] = entry
        rows = [(name, start, entry.shape[0]) for (name, start), entry in stored.items()]
        for name, start, _ in overlapping(attachment.parameters.lossy, expert, rows):
            needed[name, start] = stored[name, start]
    return needed


def _whole(entry: _Entry) -> dict[str, ShardedTensor]:
    """The request for a whole tensor: a sum, or a part of a master."""
    empty = torch.empty(entry.shape, dtype=entry.dtype)
    return {"whole": ShardedTensor.from_rank_offsets(entry.key, empty)}


def _rows(entry: _Entry, row: int, size: int) -> dict[str, ShardedTensor]:
    """The request for the rows that row `row` of `size` takes over; empty if there are fewer."""
    count, numel = entry.shape
    return {
        str(j): ShardedTensor.from_rank_offsets(
            entry.key, torch.empty(numel, dtype=entry.dtype), (0, j, count), prepend_axis_num=1
        )
        for j in rows_for(row, size, count)
    }


def _state_key(place: Place) -> str:
    return f"{PREFIX}.state.{place.shard(expert=False)}"


def _store_key(store: str, place: Place, expert: bool) -> str:
    return f"{PREFIX}.{store}.{place.shard(expert)}."


def _load(checkpoint: Path, template: dict[str, Any]) -> dict[str, Any]:
    """Reads the entries of `template` on this rank alone."""
    loaded = dist_checkpointing.load(
        {PREFIX: template}, str(checkpoint), validate_access_integrity=False
    )
    assert isinstance(loaded, dict)
    return loaded[PREFIX]
