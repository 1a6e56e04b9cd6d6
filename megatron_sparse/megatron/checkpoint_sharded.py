"""The plugin's state inside Megatron's distributed checkpoint (`--ckpt-format torch_dist`).

`sharded_state` makes an addition to the state dict that Megatron saves, so that its parallel and
asynchronous writing apply. `read` lists the checkpoint's keys before it loads any, so that Megatron
raises no error for a missing key or another data-parallel size. To load, one passes Megatron a
*request*: a `ShardedObject` without an object, or a `ShardedTensor` to be filled.

Keys begin with `megatron_sparse.`, and name a shard of the model such as `tp0.pp0`:

    header                       one object: state that all ranks share
    state.SHARD                  one object for each data-parallel rank
    residual.SHARD.PARAMETER     a table of rows x elements (`checkpoint_layout`), of which a rank
                                 writes its slices; with `residual_checkpoint=sum` the sum of rows
    master.SHARD.PARAMETER       with `parameters.method=lossy`: the parameter's exact values, of
                                 which each rank writes those that it owns
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
from megatron_sparse.megatron import checkpoint_layout as layout
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_layout import HeldSlice, Saved
from megatron_sparse.megatron.parameter_masters import saved_parts

PREFIX = "megatron_sparse"
RESIDUAL, MASTER = "residual", "master"


def sharded_state(attachment: Attachment) -> dict[str, Any]:
    """Makes the sharded objects and tensors that `dist_checkpointing.save` is to save.

    Put the result under a key of its own into the state dict that every rank saves. With
    `residual_checkpoint=full` the tensors are copies on a CPU, but on a GPU views of the residuals:
    these must not change until the save has copied them. With `sum` the call is collective.
    """
    rank, size = layout.data_rank_and_size(expert=False)
    sizes = {"model_sizes": layout.model_sizes(), "data_size": size}
    header = layout.common_state(attachment) | sizes
    rank_state = {
        "planner": attachment.planner.state_dict(),
        "rows": layout.row_layouts(attachment),
        "layers": layout.model_layers(attachment),
    }
    # The header is the same on all ranks: Megatron writes the one with `replica_id` 0.
    state: dict[str, Any] = {
        "header": ShardedObject(f"{PREFIX}.header", header, (1,), (0,), replica_id=dist.get_rank()),
        "rank": ShardedObject(_state_key(), rank_state, (size,), (rank,)),
    }
    state |= dict(_sharded_residuals(attachment))
    for lossy, piece, values_M in saved_parts(attachment.parameters.lossy):
        if lossy.instance > 0:
            continue  # all instances have the same masters: the first one saves them
        key = f"{_kind_key(MASTER, lossy.group.expert)}{piece.name}"
        whole = _whole_numel(lossy.bucket, piece.name)
        label = f"{MASTER}.{piece.name}.{piece.offset}"
        state[label] = _part(key, values_M.clone(), (whole,), (piece.offset,))  # steps change them
    return state


def _sharded_residuals(attachment: Attachment) -> Iterator[tuple[str, ShardedTensor]]:
    """Yields what this rank saves of residuals: (key in the state dict, tensor).

    The tensors are slices of the tables, or with `residual_checkpoint=sum` whole sums.
    """
    mode = attachment.config.compression.residual_checkpoint
    if mode == "full":
        for held in layout.held_slices(attachment):
            values_N = attachment.residuals.settled(held.bucket)
            if values_N is None:  # nothing was selected from the bucket yet
                continue
            view_M = values_N[held.piece.start : held.piece.stop]
            # Asynchronous writers copy GPU memory at once, but may read host memory later.
            values_M = view_M.clone() if view_M.device.type == "cpu" else view_M
            name, start = held.key
            key = f"{_kind_key(RESIDUAL, held.expert)}{name}"
            table_shape = (held.row.count, held.whole_numel)
            first = (held.row.index, start)  # row and element at which the slice begins
            yield f"{RESIDUAL}.{name}.{start}", _part(key, values_M[None], table_shape, first)
    elif mode == "sum":
        for name, expert, total_P in layout.summed_parameters(attachment):
            key = f"{_kind_key(RESIDUAL, expert)}{name}"
            yield f"{RESIDUAL}.{name}", ShardedTensor.from_rank_offsets(key, total_P)


def _part(
    key: str, values: torch.Tensor, whole: tuple[int, ...], begin: tuple[int, ...]
) -> ShardedTensor:
    """Wraps `values` as the part that begins at index `begin` of a saved tensor of shape `whole`.

    Megatron's `from_rank_offsets` makes only parts of equal sizes.
    """
    return ShardedTensor(key, values, values.dtype, tuple(values.shape), whole, begin, None)


def read(attachment: Attachment, checkpoint: Path, *, residuals: bool) -> Saved | None:
    """Reads the state that this rank restores; None if the checkpoint holds none of this version.

    Reads the metadata and this rank's own part; not collective.

    Args:
        attachment: says which slices of residuals this rank needs.
        checkpoint: folder of a distributed checkpoint.
        residuals: whether to read residuals; else the model-parallel layout may differ.

    Raises:
        CheckpointError: with `residuals`: another version, model-parallel layout, split of layers
            over the pipeline, or size of a parameter.
    """
    found = _entries(checkpoint)
    saved = _read_header(checkpoint, found, residuals=residuals)
    if saved is None:
        return None
    # label -> (slice, requests for its saved rows)
    slices = dict(_residual_requests(attachment, found, saved.mode)) if residuals else {}
    # One load answers all requests: `loaded` has the same keys, with values in place of requests.
    requests: dict[str, Any] = {label: rows for label, (_, rows) in slices.items() if rows}
    masters = dict(_master_requests(attachment, found))
    if masters:
        requests[MASTER] = {f"{name}.{start}": part for (name, start), part in masters.items()}
    rank, size = layout.data_rank_and_size(expert=False)
    saved_rank = rank if saved.data_size == size else 0  # another size: all read rank 0's state
    rank_object = ShardedObject(_state_key(), None, (saved.data_size,), (saved_rank,))
    # Missing only if the model-parallel layout differs, and no residuals are read.
    if rank_object.unique_key in found:
        requests["rank"] = rank_object
    loaded = _load(checkpoint, requests) if requests else {}
    if "rank" in loaded:
        state = loaded["rank"]
        if residuals:
            layout.check_layers(state.get("layers", {}), attachment)
        saved.planner, saved.rows = state["planner"], state["rows"]
    if masters:
        saved.masters = dict(zip(masters, loaded[MASTER].values(), strict=True))
    for label, (held, rows) in slices.items():
        # A run with more rows than the one that saved has slices without saved rows.
        saved_rows = [row.view(-1) for row in loaded[label].values()] if rows else []
        saved.residuals[held.key] = _combined(held, saved_rows, saved.mode)
    if residuals:
        saved.unknown = _unknown_parameters(attachment, found)
    return saved


def _read_header(checkpoint: Path, found: _Entries, *, residuals: bool) -> Saved | None:
    """Reads the state that all ranks share; None if there is none of this version. See `read`."""
    header_object = ShardedObject(f"{PREFIX}.header", None, (1,), (0,))
    if header_object.unique_key not in found:
        return None
    header = _load(checkpoint, {"header": header_object})["header"]
    layout.check_version(checkpoint, header["version"], wanted=residuals)
    if header["version"] != layout.VERSION:
        return None
    if residuals:
        layout.check_sizes(tuple(header["model_sizes"]))
    names = [field.name for field in fields(Saved) if field.name in header]
    return Saved(**{name: header[name] for name in names})


def _combined(held: HeldSlice, rows: list[torch.Tensor], mode: str) -> torch.Tensor:
    """A slice's residual [M]: the sum of its saved rows, or its share of a saved sum (mode `sum`).

    Without saved rows it is zeros, not missing: a bucket must have one on all ranks or on none.
    """
    if len(rows) == 1:
        value_M = rows[0]  # in the dtype that was saved; sums are in fp32
    elif rows:
        value_M = torch.stack([row.float() for row in rows]).sum(0)
    else:
        value_M = torch.zeros(held.piece.numel)
    return layout.part_of_sum(value_M, held) if mode == "sum" else value_M


type _Entries = dict[str, Any]
"""By key torch's metadata of a tensor, or of an object, which has neither size nor dtype."""


def _entries(checkpoint: Path) -> _Entries:
    """The metadata of the plugin's keys in the checkpoint.

    Megatron's own function is not used: it makes a tensor from the properties of each entry, and
    fails with torch 2.15, which has one property more.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if key.startswith(f"{PREFIX}.")}


def _residual_requests(
    attachment: Attachment, found: _Entries, mode: str
) -> Iterator[tuple[str, tuple[HeldSlice, dict[str, ShardedTensor]]]]:
    """Yields the slices that this rank reads: (label, (slice, requests for its rows)).

    The requests are keyed 0, 1, ...; empty if the slice has no saved rows. `mode`: the
    `residual_checkpoint` with which the checkpoint was saved.

    Raises:
        CheckpointError: a parameter has another size.
    """
    for held in layout.held_slices(attachment):
        name, start = held.key
        key = f"{_kind_key(RESIDUAL, held.expert)}{name}"
        if key in found:
            saved_numel = found[key].size[-1]  # the table is [rows, elements], a sum [elements]
            check_size(name, saved_numel, held.whole_numel)
            rows = {str(i): row for i, row in enumerate(_row_requests(key, found, held, mode))}
            yield f"{RESIDUAL}.{name}.{start}", (held, rows)


def _row_requests(key: str, found: _Entries, held: HeldSlice, mode: str) -> Iterator[ShardedTensor]:
    """The requests for the saved rows that add up to a slice, or for the slice of a saved sum."""
    numel, offset = held.piece.numel, held.piece.offset
    whole, dtype = tuple(found[key].size), found[key].properties.dtype
    if mode == "sum":
        yield _part(key, torch.empty(numel, dtype=dtype), whole, (offset,))
        return
    saved_count = whole[0]
    for row in held.row.takes(saved_count):
        yield _part(key, torch.empty((1, numel), dtype=dtype), whole, (row, offset))


def _unknown_parameters(attachment: Attachment, found: _Entries) -> set[str]:
    """Names of parameters with saved residuals that this run's model does not have."""
    known = layout.model_parameters(attachment)
    unknown = set()
    for expert in (False, True):
        prefix = _kind_key(RESIDUAL, expert)
        saved = {key.removeprefix(prefix) for key in found if key.startswith(prefix)}
        unknown |= {name for name in saved if (expert, name) not in known}
    return unknown


def _master_requests(
    attachment: Attachment, found: _Entries
) -> Iterator[tuple[tuple[str, int], ShardedTensor]]:
    """Yields requests for the masters in this rank's shards: ((parameter, first element), request).

    A master whose parameter had another size is left out.
    """
    for lossy in attachment.parameters.lossy:
        for piece in lossy.pieces:
            key = f"{_kind_key(MASTER, lossy.group.expert)}{piece.name}"
            whole = (_whole_numel(lossy.bucket, piece.name),)
            if key in found and tuple(found[key].size) == whole:
                # Elements that no rank has saved stay NaN, and count as missing.
                dtype = found[key].properties.dtype
                empty = torch.full((piece.numel,), torch.nan, dtype=dtype)
                yield (piece.name, piece.offset), _part(key, empty, whole, (piece.offset,))


def _whole_numel(bucket: Bucket, name: str) -> int:
    """Elements of a parameter of one of Megatron's buckets."""
    return next(piece.numel for piece in bucket.parameters if piece.name == name)


def _state_key() -> str:
    return f"{PREFIX}.state.{layout.model_shard(expert=False)}"


def _kind_key(kind: str, expert: bool) -> str:
    return f"{PREFIX}.{kind}.{layout.model_shard(expert)}."


def _load(checkpoint: Path, requests: dict[str, Any]) -> dict[str, Any]:
    """Loads requests on this rank alone, without Megatron's collective check; returns values."""
    loaded = dist_checkpointing.load(
        {PREFIX: requests}, str(checkpoint), validate_access_integrity=False
    )
    assert isinstance(loaded, dict)
    return loaded[PREFIX]
