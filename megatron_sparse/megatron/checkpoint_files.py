"""The plugin's state in files of its own, one for each rank, beside Megatron's.

`<checkpoint>/iter_0000100/megatron_sparse/rank_00000.pt`, for checkpoint formats that cannot hold
it. Tensors and plain containers, read with `weights_only`. Files of version 1 (without sums,
method state and bucket sizes) are read as well.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.checkpoint_layout import (
    VERSION,
    Place,
    Saved,
    Stores,
    add_rows,
    common_state,
    expert_parameters,
    part_of_sum,
    rank_state,
    rows_for,
    store_contents,
)
from megatron_sparse.megatron.parameter_masters import overlapping, saved_parts

FOLDER = "megatron_sparse"
READABLE = (1, VERSION)


def save(attachment: Attachment, checkpoint: Path) -> Path:
    """Writes this rank's file into the checkpoint's folder; complete or not at all.

    Copies residuals to the host, which on CUDA waits for them. With `residual_checkpoint=sum`
    collective over all ranks.
    """
    stores: Stores = {name: {} for name in attachment.stores()}
    for name, parameter, view in store_contents(attachment):
        stores[name][parameter] = view.detach().cpu().clone()
    masters = [
        (part.name, part.start, part.expert, part.values_M.detach().cpu().clone())
        for part in saved_parts(attachment.parameters.lossy)
    ]
    state = common_state(attachment) | rank_state(attachment) | {"masters": masters}
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{dist.get_rank():05d}.pt"
    part = path.with_suffix(".part")
    torch.save(state | {"place": asdict(Place.here()), "stores": stores}, part)
    os.replace(part, path)
    return path


def read(attachment: Attachment, checkpoint: Path, *, stores: bool) -> Saved | None:
    """The state that this rank takes over; None if files of its model part are missing.

    Args:
        attachment: names the parameters of experts.
        checkpoint: the checkpoint's folder.
        stores: whether to read residuals; without them the layout of the model does not matter.

    Raises:
        CheckpointError: a file is damaged, or belongs to another model-parallel layout.
    """
    here = Place.here()
    states = [(Place(**state["place"]), state) for state in _read_all(checkpoint / FOLDER)]
    mine = [(p, s) for p, s in states if (p.tensor, p.pipeline) == (here.tensor, here.pipeline)]
    if not mine or len(mine) != mine[0][0].data_size:
        return None
    if stores:
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
        own["kept"],
        own["planner"],
        own["method"] if same else {},
        own["buckets"],
    )
    saved.masters = _masters(attachment, here, states)
    if not stores:
        return saved
    experts = expert_parameters(attachment)
    if saved.mode == "sum":
        saved.stores = _parts_of_sums(here, states, experts)
    elif same:
        saved.stores = own["stores"]
    elif experts:
        raise CheckpointError(
            "residuals of expert parameters cannot be moved to another data-parallel size",
            expected=f"data-parallel size {old_size}",
            got=here.data_size,
            remedy="resume with the same size, or set compression.residual_checkpoint=none; "
            "checkpoints of --ckpt-format torch_dist can be moved",
        )
    else:
        saved.stores = _rows([mine[j][1] for j in rows_for(here.data, here.data_size, old_size)])
    return saved


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


def _rows(states: list[dict[str, Any]]) -> Stores:
    """The sum over `states`, by parameter."""
    rows: dict[tuple[str, str], list[torch.Tensor]] = {}
    for state in states:
        for store, values in state["stores"].items():
            for name, value in values.items():
                rows.setdefault((store, name), []).append(value)
    result: Stores = {}
    for (store, name), values in rows.items():
        result.setdefault(store, {})[name] = add_rows(values)
    return result


def _parts_of_sums(
    here: Place, states: list[tuple[Place, dict[str, Any]]], experts: set[str]
) -> Stores:
    result: Stores = {}
    for place, state in states:
        for store, values in state["stores"].items():
            for name, total_N in values.items():
                expert = name in experts
                if place.shard(expert) == here.shard(expert):
                    part_N = part_of_sum(total_N, *here.row(expert))
                    result.setdefault(store, {})[name] = part_N
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
        if version not in READABLE:
            raise CheckpointError(
                f"{path} was written by another version",
                expected=" or ".join(map(str, READABLE)),
                got=version,
                remedy="resume with that version of megatron_sparse",
            )
        states.append(state if version == VERSION else _of_version_1(state))
    return states


def _of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    return state | {
        "stores": {"residual": state["residuals"]},
        "mode": "full" if state["residuals"] else "none",
        "kept": ["residual"],
        "gradient_factor": None,
        "planner": state.get("planner", {}),
        "method": {},
        "buckets": None,
    }
