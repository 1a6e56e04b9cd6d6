"""The plugin's part of a Megatron checkpoint: step, switch, scales, plan and residuals.

All of it travels in Megatron's own distributed checkpoint (`checkpoint_sharded`), the format
`--ckpt-format torch_dist`. With other formats nothing of it is saved; `refusals` refuses them where
residuals are to be saved.

Policies; where the residuals come from, and whether their rows have changed, is in the log:

- If the checkpoint holds no state of the plugin, residuals start at zero. State that an earlier
  version wrote is an error, unless the run takes over no residuals.
- With another number of ranks, nodes or instances residuals are added up or spread, and their total
  is preserved; see `checkpoint_layout`.
- Residuals move between buckets by parameter name.
- Residuals of another precision, or of a loss divided otherwise, are converted to this run's unit.
- A bucket of another size or number of ranks is planned anew.
- Another tensor-, pipeline- or expert-parallel size, or split of layers over stages, is an error.
- The masters of `parameters.method=lossy` move by parameter name and position. If any is missing,
  the loaded parameters count, and the next gather is raw.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint

from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.buckets import device_of
from megatron_sparse.megatron.checkpoint_layout import (
    RowLayouts,
    Saved,
    row_layouts,
)
from megatron_sparse.megatron.checkpoint_sharded import PREFIX as KEY
from megatron_sparse.megatron.checkpoint_sharded import read, sharded_state
from megatron_sparse.megatron.parameter_masters import masters_from
from megatron_sparse.megatron.spikes import UsualNorm
from megatron_sparse.parameters.agreement import LOSSY
from megatron_sparse.reduction.host_state import on_every_rank

__all__ = ["KEY", "load", "save_with", "sharded_state"]

logger = logging.getLogger("megatron_sparse")


def save_with(
    attachment: Attachment, optimizer: Any, when: Callable[[], bool] = lambda: True
) -> None:
    """Adds the plugin's state to the optimizer's, which takes it to a checkpoint; until `detach`.

    For loops that save by themselves, such as Megatron-Bridge's. Load before.

    Args:
        attachment: whose state travels.
        optimizer: the one that is attached; its `sharded_state_dict` is wrapped.
        when: asked at each call whether to add the state.
    """
    original = optimizer.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        """The optimizer's state with the plugin's in it."""
        state = original(*args, **kwargs)
        if when():
            state[KEY] = sharded_state(attachment)
        return state

    optimizer.sharded_state_dict = sharded_state_dict


def load(attachment: Attachment, checkpoint: Path, iteration: int) -> None:
    """Restores the plugin's state from the checkpoint's folder. Collective over all ranks.

    Args:
        attachment: mutated.
        checkpoint: the folder that Megatron has loaded, of any format.
        iteration: the step to continue from if the folder holds no state of the plugin.

    Raises:
        CheckpointError: residuals are of another version or another model-parallel layout.
    """
    wanted = attachment.config.compression.residual_checkpoint != "none"
    saved = None
    if check_is_distributed_checkpoint(str(checkpoint)):
        saved = read(attachment, checkpoint, residuals=wanted)
    _restore(attachment, saved or Saved(iteration, attachment.enabled))
    if saved is None:
        logger.warning(
            "%s holds no state of this version of the plugin: residuals start at zero, step %d",
            checkpoint,
            iteration,
        )
        return
    lines = _restore_masters(attachment, saved)
    if saved.unknown:
        names = ", ".join(sorted(saved.unknown))
        logger.warning("residuals of unknown parameters dropped: %s", names)
    if dist.get_rank() == 0:
        for line in [*_applied_policies(attachment, checkpoint, saved), *lines]:
            logger.info(line)


def _restore(attachment: Attachment, saved: Saved) -> None:
    """Gives the attachment a checkpoint's state; residuals that it lacks start at zero."""
    for group in attachment.groups:
        own_parts = map(attachment.reducer(group).part, group.buckets)  # what it keeps residuals of
        attachment.residuals.load(own_parts, saved.residuals)
    attachment.residuals_came_back()
    attachment.step = saved.step
    attachment.usual_norm = UsualNorm(saved.norms)
    attachment.parameters.forget()
    attachment.planner.enabled = saved.enabled
    if attachment.trials is not None:
        attachment.trials.load_state_dict(saved.trials, saved.step)
    attachment.planner.load_state_dict(saved.planner)
    unit_change = attachment.unit.restore(saved.loss_scale, saved.gradient_factor)
    if unit_change is not None:
        attachment.residuals.rescale(unit_change)


def _restore_masters(attachment: Attachment, saved: Saved) -> list[str]:
    """Gives each lossy gather its master, if every rank has found its own.

    Returns lines for the log. Collective with `parameters.method=lossy`.
    """
    if attachment.config.parameters.method != LOSSY:
        return []
    buckets = attachment.parameters.lossy
    masters = masters_from(buckets, saved.masters)
    if not on_every_rank(masters is not None, device_of(attachment.buckets)):
        return ["the checkpoint has no masters of the parameters: the next gather is raw"]
    assert masters is not None
    for bucket, master_M in zip(buckets, masters, strict=True):
        bucket.gather.restore(master_M)
    return ["masters of the parameters restored"]


def _applied_policies(attachment: Attachment, checkpoint: Path, saved: Saved) -> list[str]:
    """The policies that applied, as lines for the log."""
    config = attachment.config.compression
    if config.residual_checkpoint == "none":
        how = "residuals start at zero (compression.residual_checkpoint=none)"
    elif saved.mode == "none":
        how = "residuals start at zero (saved with compression.residual_checkpoint=none)"
    elif saved.mode == "sum":
        how = "residuals restored from their sum"
    else:
        how = "residuals restored"
    lines = [f"{how} from {checkpoint}, step {attachment.step}"]
    if saved.rows is not None and saved.rows != row_layouts(attachment):
        before, now = _in_words(saved.rows), _in_words(row_layouts(attachment))
        lines.append(
            f"residuals were {before} and are {now}: they are added up or spread, their total is "
            "the same"
        )
    return lines


def _in_words(rows: RowLayouts) -> str:
    """For example `of 2 nodes (dense), of 4 ranks (expert)`."""
    return ", ".join(f"of {count} {level}s ({kind})" for kind, (level, count) in rows.items())
