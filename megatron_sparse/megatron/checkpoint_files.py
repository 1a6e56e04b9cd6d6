"""The plugin's state in files of its own, one for each rank, beside Megatron's.

`<checkpoint>/iter_0000100/megatron_sparse/rank_00000.pt`, for checkpoint formats that cannot hold
it. Tensors and plain containers, read with `weights_only`. Residuals are by (parameter,
first element). Files of version 2 (whole parameters, by name) and version 1 (without sums and
bucket sizes too) are read as well.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.compression.residual import SliceKey, check_size
from megatron_sparse.config.level import RANK
from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_layout import (
    READABLE,
    VERSION,
    Place,
    Residuals,
    RowLayouts,
    Saved,
    common_state,
    expert_parameters,
    model_parameters,
    rank_state,
)
from megatron_sparse.megatron.parameter_masters import overlapping, saved_parts
from megatron_sparse.megatron.residual_rows import (
    add_rows,
    cut,
    has_parameter,
    held_slices,
    part_of_sum,
    row_layouts,
    rows_here,
    saved_slices,
    summed_parameters,
)

FOLDER = "megatron_sparse"
READABLE_FILES = (1, *READABLE)
RESIDUAL = "residual"


def save(attachment: Attachment, checkpoint: Path) -> Path:
    """Writes this rank's file into the checkpoint's folder; complete or not at all.

    Copies residuals to the host, which on CUDA waits for them. With `residual_checkpoint=sum`
    collective over all ranks.
    """
    residuals: Residuals = {}
    mode = attachment.config.compression.residual_checkpoint
    if mode == "full":
        for held, view_M in saved_slices(attachment):
            residuals[held.key] = view_M.detach().cpu().clone()
    elif mode == "sum":
        for each in summed_parameters(attachment):
            residuals[each.name, 0] = each.total_P
    masters = [
        (part.name, part.start, part.expert, part.values_M.detach().cpu().clone())
        for part in saved_parts(attachment.parameters.lossy)
    ]
    state = common_state(attachment) | rank_state(attachment) | {"masters": masters}
    rows = {kind: row.index for kind, row in rows_here(attachment).items()}
    state |= {"rows": row_layouts(attachment), "row": rows}
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{dist.get_rank():05d}.pt"
    part = path.with_suffix(".part")
    torch.save(state | {"place": asdict(Place.here()), "stores": {RESIDUAL: residuals}}, part)
    os.replace(part, path)
    return path


def read(attachment: Attachment, checkpoint: Path, *, residuals: bool) -> Saved | None:
    """The state that this rank takes over; None if files of its model part are missing.

    Args:
        attachment: names the parameters of experts.
        checkpoint: the checkpoint's folder.
        residuals: whether to read them; without them the layout of the model does not matter.

    Raises:
        CheckpointError: a file is damaged, or belongs to another model-parallel layout.
    """
    here = Place.here()
    states = [(Place(**state["place"]), state) for state in _read_all(checkpoint / FOLDER)]
    mine = [(p, s) for p, s in states if (p.tensor, p.pipeline) == (here.tensor, here.pipeline)]
    if not mine or len(mine) != mine[0][0].data_size:
        return None
    if residuals:
        for place, _ in mine:
            check_sizes(place.model_sizes(), here, "delete the checkpoint's megatron_sparse folder")
    mine.sort(key=lambda item: item[0].data)
    old_size = mine[0][0].data_size
    same = old_size == here.data_size
    _, own = mine[here.data if same else 0]
    saved = Saved(
        own["step"],
        own["enabled"],
        own["loss_scale"],
        own["gradient_factor"],
        old_size,
        own["mode"],
        own["planner"],
        buckets=own["buckets"],
        rows=own["rows"],
    )
    layouts = row_layouts(attachment)
    same = same and saved.has_rows(layouts)
    saved.masters = _masters(attachment, here, states)
    if not residuals:
        return saved
    known = {name for _, name in model_parameters(attachment)}
    saved.unknown = {name for name, _ in own["stores"][RESIDUAL]} - known
    if saved.mode == "sum":
        saved.residuals = _parts_of_sums(attachment, here, states)
    elif same and _is_whole(layouts):
        saved.residuals = own["stores"][RESIDUAL]  # whole parameters, whatever the buckets
    elif not same and expert_parameters(attachment):
        raise CheckpointError(
            "residuals of expert parameters cannot be moved to other ranks, nodes or levels",
            expected=f"data-parallel size {old_size}, rows {saved.rows or 'of ranks'}",
            got=f"{here.data_size}, {layouts}",
            remedy="resume with the same size, or set compression.residual_checkpoint=none; "
            "checkpoints of --ckpt-format torch_dist can be moved",
        )
    else:
        saved.residuals = _moved(attachment, here, states)
    return saved


def _is_whole(layouts: RowLayouts) -> bool:
    """Whether each rank has a row."""
    return all(level == RANK for level, _ in layouts.values())


def _masters(
    attachment: Attachment, here: Place, states: list[tuple[Place, dict[str, Any]]]
) -> dict[tuple[str, int], torch.Tensor]:
    """The parts of masters that this rank needs, from the files of all ranks."""
    found, needed = {}, {}
    for place, state in states:
        # Files of earlier versions have none.
        for name, start, expert, values_M in state.get("masters", ()):
            if place.shard(expert) == here.shard(expert):
                found[expert, name, start] = values_M
    for expert in (False, True):
        rows = [(key[1], key[2], v.numel()) for key, v in found.items() if key[0] == expert]
        for name, start, _ in overlapping(attachment.parameters.lossy, expert, rows):
            needed[name, start] = found[expert, name, start]
    return needed


def _moved(
    attachment: Attachment, here: Place, states: list[tuple[Place, dict[str, Any]]]
) -> Residuals:
    """The slices of this rank, from rows that lie, or are cut, in another way.

    Raises:
        CheckpointError: a parameter has another size.
    """
    experts = expert_parameters(attachment)
    # By kind the rows, each with all that its ranks have saved: the same parameters.
    tables: dict[bool, dict[int, dict[SliceKey, torch.Tensor]]] = {False: {}, True: {}}
    for place, state in states:
        for key, value_M in state["stores"][RESIDUAL].items():
            expert = key[0] in experts
            if place.shard(expert) == here.shard(expert):
                row = state["row"]["expert" if expert else "dense"]
                tables[expert].setdefault(row, {})[key] = value_M
    result: Residuals = {}
    for held in held_slices(attachment):
        found = [row for _, row in sorted(tables[held.expert].items())]
        if found and has_parameter(found[0], held):
            parts = [cut(found[row], held) for row in held.row.takes(len(found))]
            # A row that takes none over is zero, but exists: all ranks save the same ones.
            result[held.key] = add_rows(parts) if parts else torch.zeros(held.numel)
    return result


def _parts_of_sums(
    attachment: Attachment, here: Place, states: list[tuple[Place, dict[str, Any]]]
) -> Residuals:
    sums = {
        (expert, name): total_P
        for place, state in states
        for (name, _), total_P in state["stores"][RESIDUAL].items()
        for expert in (False, True)
        if place.shard(expert) == here.shard(expert)
    }
    result: Residuals = {}
    for held in held_slices(attachment):
        name, start = held.key
        total_P = sums.get((held.expert, name))
        if total_P is not None:
            check_size(name, total_P.numel(), held.whole_numel)
            result[held.key] = part_of_sum(total_P[start : start + held.numel], held)
    return result


def check_sizes(saved: tuple[int, ...], here: Place, remedy: str) -> None:
    """Refuses residuals of a model with another layout.

    Raises:
        CheckpointError: a tensor-, pipeline- or expert-parallel size differs.
    """
    if saved != here.model_sizes():
        raise CheckpointError(
            "the checkpoint's residuals belong to another model-parallel layout",
            expected=f"(tensor, pipeline, expert) sizes {here.model_sizes()}",
            got=saved,
            remedy=f"resume with the same sizes, or {remedy} to start with zero residuals",
        )


def _read_all(folder: Path) -> list[dict[str, Any]]:
    """Every rank's state, in rank order. After a change of size a rank needs more than its own."""
    states = []
    for path in sorted(folder.glob("rank_*.pt")):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            version = state["version"]
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged",
                expected="a file written by megatron_sparse",
                got=error,
                remedy=f"delete {folder} to start with zero residuals",
            ) from error
        if version not in READABLE_FILES:
            raise CheckpointError(
                f"{path} was written by another version",
                expected=" or ".join(map(str, READABLE_FILES)),
                got=version,
                remedy="resume with that version of megatron_sparse",
            )
        if version == 1:
            state = _of_version_1(state)
        states.append(_of_version_2(state) if version < VERSION else state)
    return states


def _of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    return state | {
        "stores": {"residual": state["residuals"]},
        "mode": "full" if state["residuals"] else "none",
        "gradient_factor": None,
        "planner": state.get("planner", {}),
        "buckets": None,
    }


def _of_version_2(state: dict[str, Any]) -> dict[str, Any]:
    """Every rank had a row of its own, of whole parameters."""
    stores = {
        store: {(name, 0): value_P for name, value_P in values.items()}
        for store, values in state["stores"].items()
    }
    return state | {"stores": stores, "rows": None, "row": {"dense": state["place"]["data"]}}
