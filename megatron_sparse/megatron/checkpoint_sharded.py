"""The plugin's state inside Megatron's distributed checkpoint (`--ckpt-format torch_dist`).

`sharded_state` makes an addition to the state dict that Megatron saves, so that its parallel and
asynchronous writing apply. `read` lists the checkpoint's keys before it loads any, so that Megatron
raises no error for a missing key or another data-parallel size.

Keys begin with `megatron_sparse.`: `header` (one object), `state.tp0.pp0` (one object for each
data-parallel rank) and `residual.<part of the model>.<parameter>`: a table of rows x elements
(`checkpoint_layout`), of which a rank writes its slices; or with `residual_checkpoint=sum` the sum
of all rows, once.
With `parameters.method=lossy` there is also `master.<part of the model>.<parameter>`, of which each
rank writes the part that it owns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_sparse.bucket import Bucket
from megatron_sparse.compression.residual import check_size
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_layout import (
    VERSION,
    HeldSlice,
    Saved,
    check_layers,
    check_sizes,
    check_version,
    common_state,
    data_place,
    held_slices,
    model_layers,
    model_parameters,
    model_shard,
    model_sizes,
    part_of_sum,
    row_layouts,
    summed_parameters,
)
from megatron_sparse.megatron.parameter_masters import saved_parts

PREFIX = "megatron_sparse"
RESIDUAL, MASTER = "residual", "master"


def sharded_state(attachment: Attachment) -> dict[str, Any]:
    """Sharded objects and tensors to be saved by `dist_checkpointing.save`.

    Put it under a key of its own into the state dict that every rank saves. With
    `residual_checkpoint=full` tensors are the residuals themselves on a GPU, which must not change
    before the save has copied them, and copies on a CPU; with `sum` building it is collective.
    """
    rank, size = data_place(expert=False)
    header = common_state(attachment) | {"model_sizes": model_sizes(), "data_size": size}
    rank_state = {
        "planner": attachment.planner.state_dict(),
        "rows": row_layouts(attachment),
        "layers": model_layers(attachment),
    }
    state: dict[str, Any] = {
        "header": ShardedObject(f"{PREFIX}.header", header, (1,), (0,), replica_id=dist.get_rank()),
        "rank": ShardedObject(_state_key(), rank_state, (size,), (rank,)),
    }
    state |= dict(_sharded_residuals(attachment))
    for lossy, piece, values_M in saved_parts(attachment.parameters.lossy):
        if lossy.instance > 0:
            continue  # the first instance saves the same
        key = f"{_kind_key(MASTER, lossy.group.expert)}{piece.name}"
        whole = _whole_numel(lossy.bucket, piece.name)
        label = f"{MASTER}.{piece.name}.{piece.offset}"
        state[label] = _part(key, values_M.clone(), (whole,), (piece.offset,))
    return state


def _sharded_residuals(attachment: Attachment) -> Iterator[tuple[str, ShardedTensor]]:
    """What this rank saves of residuals, by label: slices of tables of rows, or whole sums."""
    mode = attachment.config.compression.residual_checkpoint
    if mode == "full":
        for held in held_slices(attachment):
            values_N = attachment.residuals.settled(held.bucket)
            if values_N is None:  # a bucket that was never pruned
                continue
            view_M = values_N[held.piece.start : held.piece.stop]
            # Asynchronous writers copy GPU memory at once, but may read host memory later.
            values_M = view_M.clone() if view_M.device.type == "cpu" else view_M
            name, start = held.key
            key = f"{_kind_key(RESIDUAL, held.expert)}{name}"
            table = (held.row.count, held.whole_numel)
            place = (held.row.index, start)
            yield f"{RESIDUAL}.{name}.{start}", _part(key, values_M[None], table, place)
    elif mode == "sum":
        for name, expert, total_P in summed_parameters(attachment):
            key = f"{_kind_key(RESIDUAL, expert)}{name}"
            yield f"{RESIDUAL}.{name}", ShardedTensor.from_rank_offsets(key, total_P)


def _part(
    key: str, values: torch.Tensor, whole: tuple[int, ...], begin: tuple[int, ...]
) -> ShardedTensor:
    """Returns `values` as the part, from the indices `begin` on, of a tensor of shape `whole`.

    Parts may be of different sizes.
    """
    return ShardedTensor(key, values, values.dtype, tuple(values.shape), whole, begin, None)


def read(attachment: Attachment, checkpoint: Path, *, residuals: bool) -> Saved | None:
    """The state that this rank takes over; None if the checkpoint holds none of this version.

    Reads the metadata and this rank's own part; not collective.

    Args:
        attachment: names the slices to read.
        checkpoint: folder of a distributed checkpoint.
        residuals: whether to read them; without them the layout of the model does not matter.

    Raises:
        CheckpointError: residuals are of another version or another model-parallel layout, or of
            another split of layers over the pipeline.
    """
    rank, size = data_place(expert=False)
    found = _entries(checkpoint)
    header_object = ShardedObject(f"{PREFIX}.header", None, (1,), (0,))
    if header_object.unique_key not in found:
        return None
    header = _load(checkpoint, {"header": header_object})["header"]
    check_version(checkpoint, header["version"], wanted=residuals)
    if header["version"] != VERSION:
        return None
    if residuals:
        check_sizes(tuple(header["model_sizes"]))
    names = [field.name for field in fields(Saved) if field.name in header]
    saved = Saved(**{name: header[name] for name in names})
    # Requests: residuals, masters, this rank's state (after a change of ranks that of rank 0).
    slices = dict(_residual_requests(attachment, found, saved.mode)) if residuals else {}
    # What one load reads: `loaded` has the same keys, with values in place of requests.
    template: dict[str, Any] = {label: rows for label, (_, rows) in slices.items() if rows}
    masters = dict(_master_requests(attachment, found))
    if masters:
        template[MASTER] = {f"{name}.{start}": part for (name, start), part in masters.items()}
    saved_rank = rank if saved.data_size == size else 0  # whose plan and layout are read
    rank_object = ShardedObject(_state_key(), None, (saved.data_size,), (saved_rank,))
    # Missing only for a model with another layout, whose residuals are not read.
    if rank_object.unique_key in found:
        template["rank"] = rank_object
    loaded = _load(checkpoint, template) if template else {}
    if "rank" in loaded:
        state = loaded["rank"]
        if residuals:
            check_layers(state.get("layers", {}), attachment)
        saved.planner, saved.rows = state["planner"], state["rows"]
    if masters:
        saved.masters = dict(zip(masters, loaded[MASTER].values(), strict=True))
    # A slice without saved rows was left out of the request: its residual is zero.
    for label, (held, rows) in slices.items():
        own_rows = [row.view(-1) for row in loaded[label].values()] if rows else []
        saved.residuals[held.key] = _taken_over(held, own_rows, saved.mode)
    if residuals:
        saved.unknown = _unknown(attachment, found)
    return saved


def _taken_over(held: HeldSlice, rows: list[torch.Tensor], mode: str) -> torch.Tensor:
    """A slice's residual [M]: the sum of saved rows in fp32, or the slice's part of a saved sum.

    A slice that takes no row over is zero, but exists: all ranks save the same parameters.
    """
    if len(rows) == 1:
        value_M = rows[0]  # unchanged, in its own dtype
    elif rows:
        value_M = torch.stack([row.float() for row in rows]).sum(0)
    else:
        value_M = torch.zeros(held.piece.numel)
    return part_of_sum(value_M, held) if mode == "sum" else value_M


type _Entries = dict[str, Any]
"""By key torch's metadata of a tensor, or of an object, which has neither size nor dtype."""


def _entries(checkpoint: Path) -> _Entries:
    """The plugin's entries in the checkpoint.

    Megatron's own function for this makes a tensor from every entry's properties, and fails with
    torch 2.15, which has one property more.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if key.startswith(f"{PREFIX}.")}


def _residual_requests(
    attachment: Attachment, found: _Entries, mode: str
) -> Iterator[tuple[str, tuple[HeldSlice, dict[str, ShardedTensor]]]]:
    """The slices that this rank reads: label, and (slice, requests for its saved rows by number).

    Raises:
        CheckpointError: a parameter has another size.
    """
    for held in held_slices(attachment):
        name, start = held.key
        key = f"{_kind_key(RESIDUAL, held.expert)}{name}"
        if key in found:
            check_size(name, found[key].size[-1], held.whole_numel)  # [-1]: elements, not rows
            rows = {str(i): row for i, row in enumerate(_row_requests(key, found, held, mode))}
            yield f"{RESIDUAL}.{name}.{start}", (held, rows)


def _row_requests(key: str, found: _Entries, held: HeldSlice, mode: str) -> Iterator[ShardedTensor]:
    """The requests for the rows that a slice takes over, or for its part of the sum."""
    numel, offset = held.piece.numel, held.piece.offset
    whole, dtype = tuple(found[key].size), found[key].properties.dtype
    if mode == "sum":
        yield _part(key, torch.empty(numel, dtype=dtype), whole, (offset,))
        return
    for row in held.row.takes(whole[0]):
        yield _part(key, torch.empty((1, numel), dtype=dtype), whole, (row, offset))


def _unknown(attachment: Attachment, found: _Entries) -> set[str]:
    """Saved parameters that this run does not have."""
    known = model_parameters(attachment)
    unknown = set()
    for expert in (False, True):
        prefix = _kind_key(RESIDUAL, expert)
        saved = {key.removeprefix(prefix) for key in found if key.startswith(prefix)}
        unknown |= {name for name in saved if (expert, name) not in known}
    return unknown


def _master_requests(
    attachment: Attachment, found: _Entries
) -> Iterator[tuple[tuple[str, int], ShardedTensor]]:
    """This rank's parts of the stored masters, by parameter and first element."""
    for lossy in attachment.parameters.lossy:
        for piece in lossy.pieces:
            key = f"{_kind_key(MASTER, lossy.group.expert)}{piece.name}"
            whole = (_whole_numel(lossy.bucket, piece.name),)
            if key in found and tuple(found[key].size) == whole:
                # What no rank has written stays NaN.
                dtype = found[key].properties.dtype
                empty = torch.full((piece.numel,), torch.nan, dtype=dtype)
                yield (piece.name, piece.offset), _part(key, empty, whole, (piece.offset,))


def _whole_numel(bucket: Bucket, name: str) -> int:
    """Elements of a parameter of one of Megatron's buckets."""
    return next(piece.numel for piece in bucket.parameters if piece.name == name)


def _state_key() -> str:
    return f"{PREFIX}.state.{model_shard(expert=False)}"


def _kind_key(kind: str, expert: bool) -> str:
    return f"{PREFIX}.{kind}.{model_shard(expert)}."


def _load(checkpoint: Path, template: dict[str, Any]) -> dict[str, Any]:
    """Reads the entries of `template` on this rank alone, without Megatron's check over ranks."""
    loaded = dist_checkpointing.load(
        {PREFIX: template}, str(checkpoint), validate_access_integrity=False
    )
    assert isinstance(loaded, dict)
    return loaded[PREFIX]
