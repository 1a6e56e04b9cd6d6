"""The plugin's part of a Megatron checkpoint: one file for each rank, beside Megatron's own.

`<checkpoint>/iter_0000100/megatron_sparse/rank_00000.pt` holds the step, the running switch, the
loss scale, the planner's state and the residual **by parameter**: bucket layouts change with
overlap, bucket size and data-parallel size, parameters do not. Files are tensors and plain
containers, read with `weights_only`.

Policies, each with a line in the log: without these files (or with some missing) residuals start
at zero; with another data-parallel size, new rank r takes the sum of the old ranks j with
j mod size = r, so the total over ranks, which is what error feedback owes the model, is preserved;
what was planned for a bucket of another size or number of ranks is planned anew.
Another tensor-, pipeline- or expert-parallel size is an error.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.attachment import Attachment

logger = logging.getLogger("megatron_sparse")

FOLDER = "megatron_sparse"
VERSION = 1


@dataclass(frozen=True)
class Place:
    """This rank's coordinates. Ranks that differ only in `data` hold the same parameters."""

    data: int
    data_size: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    expert: int
    expert_size: int

    @classmethod
    def here(cls) -> Place:
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
        )

    def model_sizes(self) -> tuple[int, int, int]:
        """What must not change between save and load."""
        return self.tensor_size, self.pipeline_size, self.expert_size

    def same_parameters(self, other: Place) -> bool:
        """Whether `other` holds the same parameters."""
        return (self.tensor, self.pipeline, self.expert) == (
            other.tensor, other.pipeline, other.expert
        )  # fmt: skip


def save(attachment: Attachment, checkpoint: Path) -> Path:
    """Writes this rank's file into the checkpoint's folder; complete or not at all.

    With `residual_checkpoint=none` the file holds everything but the residual. Copies residuals to
    the host, which on CUDA waits for them.
    """
    residuals = {}
    if attachment.config.compression.residual_checkpoint == "full":
        residuals = {
            name: view.detach().cpu().clone() for name, view in attachment.residuals.by_parameter()
        }
    state = {
        "version": VERSION,
        "place": asdict(Place.here()),
        "step": attachment.step,
        "enabled": attachment.enabled,
        "loss_scale": attachment.loss_scale,
        "planner": attachment.planner.state_dict(),
        "residuals": residuals,
    }
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{dist.get_rank():05d}.pt"
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)
    return path


def load(attachment: Attachment, checkpoint: Path, iteration: int) -> None:
    """Restores the plugin's state from the checkpoint's folder. Collective over all ranks.

    Raises:
        CheckpointError: a file is damaged, or belongs to another model-parallel layout.
    """
    here = Place.here()
    states = _read_all(checkpoint / FOLDER)
    mine = [s for s in states if Place(**s["place"]).same_parameters(here)]
    old_size = Place(**mine[0]["place"]).data_size if mine else 0
    complete = torch.tensor([bool(mine) and len(mine) == old_size], dtype=torch.int32)
    if dist.get_backend() == "nccl":
        complete = complete.cuda()
    dist.all_reduce(complete, op=dist.ReduceOp.MIN)
    if not complete.item():
        attachment.restore(
            {}, step=iteration, enabled=attachment.enabled, loss_scale=None, planner={}
        )
        logger.warning(
            "%s holds no complete plugin state: residuals start at zero, step %d",
            checkpoint, iteration,
        )  # fmt: skip
        return
    for state in mine:
        sizes = Place(**state["place"]).model_sizes()
        if sizes != here.model_sizes():
            raise CheckpointError(
                "the checkpoint's residuals belong to another model-parallel layout",
                expected=f"(tensor, pipeline, expert) sizes {here.model_sizes()}",
                got=sizes,
                remedy="resume with the same sizes, or delete the checkpoint's "
                f"{FOLDER} folder to start with zero residuals",
            )
    sources = [s for s in mine if s["place"]["data"] % here.data_size == here.data]
    if here.expert_size > 1 and old_size != here.data_size:
        raise CheckpointError(
            "residuals of expert parameters cannot be moved to another data-parallel size",
            expected=f"data-parallel size {old_size}",
            got=here.data_size,
            remedy="resume with the same size, or delete the checkpoint's "
            f"{FOLDER} folder to start with zero residuals",
        )
    unused = attachment.restore(
        _sum(sources), step=mine[0]["step"], enabled=mine[0]["enabled"],
        loss_scale=mine[0]["loss_scale"], planner=mine[0].get("planner", {}),
    )  # fmt: skip
    if unused:
        logger.warning("residuals of unknown parameters dropped: %s", ", ".join(sorted(unused)))
    if dist.get_rank() == 0:
        moved = "" if old_size == here.data_size else f" (data-parallel size was {old_size})"
        logger.info("residuals restored from %s, step %d%s", checkpoint, attachment.step, moved)


def _read_all(folder: Path) -> list[dict[str, Any]]:
    """Every rank's state, in rank order. A rank needs its own and, after a change of size, more."""
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
        if version != VERSION:
            raise CheckpointError(
                f"{path} was written by another version",
                expected=VERSION,
                got=version,
                remedy="resume with that version of megatron_sparse",
            )
        states.append(state)
    return states


def _sum(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state["residuals"].items():
            total[name] = total[name] + value if name in total else value
    return total
