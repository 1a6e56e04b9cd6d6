"""Saves and restores the plugin's state in a Megatron checkpoint: residuals, step, plan and others.

The state is inside Megatron's own distributed checkpoint (`checkpoint_sharded`), the format
`--ckpt-format torch_dist`. With other formats nothing of it is saved; `refusals` refuses them where
residuals are to be saved. A *row* is one rank's, node's or instance's residual of a parameter. With
`parameters.method=lossy` a *master* is the exact value of a parameter, of which ranks gather only
an approximation; a *raw* gather sends the exact values.

What happens if the run differs from the one that saved:

- If the checkpoint holds no state of the plugin, residuals start at zero. State that an earlier
  version wrote is an error, unless the run takes over no residuals.
- With another number of ranks, nodes or instances residuals are added up or spread, and their total
  is preserved; see `checkpoint_layout`.
- Residuals move between buckets by parameter name.
- Residuals of another precision, or of a loss divided otherwise, are converted to this run's unit.
- A bucket of another size or number of ranks is planned anew.
- Another tensor-, pipeline- or expert-parallel size, or split of layers over stages, is an error.
- Masters move by parameter name and position. If any is missing, the parameters that Megatron
  loads become the masters, and the next gather is raw.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint

from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.buckets import device_of
from megatron_sparse.megatron.checkpoint_layout import RowLayouts, Saved, row_layouts
from megatron_sparse.megatron.checkpoint_sharded import PREFIX as KEY
from megatron_sparse.megatron.checkpoint_sharded import read, sharded_state
from megatron_sparse.megatron.optimizer_step import WrappedMethod
from megatron_sparse.megatron.parameter_masters import masters_from
from megatron_sparse.megatron.spikes import UsualNorm
from megatron_sparse.parameters.agreement import LOSSY
from megatron_sparse.reduction.host_state import on_every_rank

__all__ = ["KEY", "load", "save_with", "sharded_state"]

logger = logging.getLogger("megatron_sparse")


def save_with(
    attachment: Attachment, optimizer: Any, when: Callable[[], bool] = lambda: True
) -> None:
    """Wraps the optimizer's `sharded_state_dict`: it includes the plugin's state, until `detach`.

    For loops that save checkpoints themselves, such as Megatron-Bridge's. Call it after loading a
    checkpoint, because Megatron also calls `sharded_state_dict` to know what to load.

    `when` is asked at each call whether to include the plugin's state.
    """

    def sharded_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's state, and under `KEY` the plugin's."""
        state = original(*args, **kwargs)
        if when():
            state[KEY] = sharded_state(attachment)
        return state

    attachment.wrapped.append(WrappedMethod(optimizer, "sharded_state_dict", sharded_state_dict))


def load(attachment: Attachment, checkpoint: Path, iteration: int) -> None:
    """Restores the plugin's state from the checkpoint's folder. Collective over all ranks.

    `checkpoint` is the folder that Megatron has loaded, of any format, `iteration` the step to
    continue from if it holds no state of the plugin.

    Raises:
        CheckpointError: residuals do not fit this run (see `read`), or the saved plan is damaged.
    """
    takes_residuals = attachment.config.compression.residual_checkpoint != "none"
    saved = None
    if check_is_distributed_checkpoint(str(checkpoint)):
        saved = read(attachment, checkpoint, residuals=takes_residuals)
    # Without saved state the residuals become zero.
    _restore(attachment, saved or Saved(iteration, attachment.enabled))
    if saved is None:
        logger.warning(
            "%s holds no state of this version of the plugin: residuals start at zero, step %d",
            checkpoint,
            iteration,
        )
        return
    master_lines = _restore_masters(attachment, saved)
    if saved.unknown:
        names = ", ".join(sorted(saved.unknown))
        logger.warning("residuals of unknown parameters dropped: %s", names)
    if dist.get_rank() == 0:
        for line in [*_residual_lines(attachment, checkpoint, saved), *master_lines]:
            logger.info(line)


def _restore(attachment: Attachment, saved: Saved) -> None:
    """Sets the attachment's state from `saved`, except for masters; missing residuals become 0."""
    for group in attachment.groups:
        # The elements of each bucket that this rank selects from: only they have residuals here.
        own_parts = map(attachment.reducer(group).part, group.buckets)
        attachment.residuals.load(own_parts, saved.residuals)
    attachment.residuals_came_back()  # if compression is off now, the next step still sends them
    attachment.step = saved.step
    attachment.usual_norm = UsualNorm(saved.norms)
    attachment.parameters.forget()  # the next gather is raw, unless a master is restored
    attachment.planner.enabled = saved.enabled
    if attachment.trials is not None:
        attachment.trials.load_state_dict(saved.trials, saved.step)
    attachment.planner.load_state_dict(saved.planner)
    unit_change = attachment.unit.restore(saved.loss_scale, saved.gradient_factor)
    if unit_change is not None:  # this run's residuals have another unit
        attachment.residuals.rescale(unit_change)


def _restore_masters(attachment: Attachment, saved: Saved) -> list[str]:
    """Restores the masters of lossy gathers, if every rank has found all of its masters.

    Returns lines for the log. Collective with `parameters.method=lossy`, so that ranks agree.
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


def _residual_lines(attachment: Attachment, checkpoint: Path, saved: Saved) -> list[str]:
    """Lines for the log: where the residuals come from, and whether their rows have changed."""
    config = attachment.config.compression
    if config.residual_checkpoint == "none":
        how = "residuals start at zero (compression.residual_checkpoint=none)"
    elif saved.mode == "none":
        how = "residuals start at zero (saved with compression.residual_checkpoint=none)"
    elif saved.mode == "sum":
        how = "residuals restored from their sum"
    else:
        how = "residuals restored"
    lines = [f"{checkpoint}, step {attachment.step}: {how}"]
    restores = "none" not in {config.residual_checkpoint, saved.mode}
    if restores and saved.rows not in (None, row_layouts(attachment)):
        before, now = _in_words(saved.rows), _in_words(row_layouts(attachment))
        lines.append(
            f"residuals were {before} and are {now}: they are added up or spread, their total is "
            "the same"
        )
    return lines


def _in_words(rows: RowLayouts) -> str:
    """For example `of 2 nodes (dense), of 4 ranks (expert)`."""
    return ", ".join(f"of {count} {level}s ({kind})" for kind, (level, count) in rows.items())
