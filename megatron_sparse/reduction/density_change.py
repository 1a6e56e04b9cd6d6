"""Changing the target density while a run goes on, on all ranks at once."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_sparse.collectives import SCHEMES
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.planner import Planner

logger = logging.getLogger("megatron_sparse")


def change_density(
    config: SparseConfig,
    planner: Planner,
    density: float,
    *,
    step: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Sets the target density from `step` on, and lets the planner choose anew.

    Collective over the group, between two steps. Nothing is changed if it raises.

    Args:
        config: `compression.density` of it is changed in place.
        planner: plans by that configuration.
        density: nnz / numel, in (0, 1]; the same on every rank.
        step: the next step, counted from 0.
        device: of the gradients; one number is exchanged there.
        group: the ranks; None takes all.

    Raises:
        CommunicationError: ranks want different densities.
        ConfigError: the value is refused, a ramp is under way, or nothing is ever pruned.
    """
    _check_equal(density, device, group)
    changed = replace(config.compression, density=density)
    compression, name = config.compression, config.scheme.name
    if name != "auto" and SCHEMES[name].takes_all:
        raise _refusal("a sparse scheme", f"scheme={name}", "choose another scheme at the start")
    phase, _ = phase_and_density(compression, step)
    if phase is Phase.OFF:
        raise _refusal("compression.enabled=true", "false", "switch compression on at the start")
    if phase is Phase.RAMP:
        end = compression.warmup + compression.ramp
        raise _refusal(
            f"a step before the ramp or after it, so from step {end} on",
            f"step {step} of the ramp to density {compression.density:g}",
            "wait for the end of the ramp: a new target would make the density jump",
        )
    # Of null, the ramp's length follows the density; the schedule stays what it was.
    compression.warmup_iters, compression.ramp_iters = compression.warmup, compression.ramp
    before, compression.density = compression.density, float(changed.density)
    planner.replan()
    logger.info("step %d: target density %g, before %g", step, compression.density, before)


def _refusal(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(
        "the density cannot be changed now", expected=expected, got=got, remedy=remedy
    )


def _check_equal(density: object, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Compares the value of all ranks; one that is no number is left to the configuration."""
    is_number = isinstance(density, int | float) and not isinstance(density, bool)
    own = torch.tensor([density if is_number else math.nan], dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    wanted = [value.item() for value in found]
    if any(value != wanted[0] for value in wanted) and not all(map(math.isnan, wanted)):
        raise CommunicationError(
            "ranks want different densities",
            expected="set_density with the same value on every rank",
            got=", ".join(f"rank {rank}: {value:g}" for rank, value in enumerate(wanted)),
            remedy="compute the density from numbers that all ranks have, such as the iteration",
        )
