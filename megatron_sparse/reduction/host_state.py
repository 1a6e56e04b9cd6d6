"""What the plugin holds in one process, whichever host it is in: Megatron's, or torch's DDP.

Two things are agreed with the other ranks: that all have kernels for their GPUs, at the start, and
a new target density, while the run goes on.
"""

from __future__ import annotations

import logging
import math
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_sparse.compression.residual import RESIDUAL_DTYPES, ResidualStore
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.cuda_ext.gpu import check_kernels
from megatron_sparse.errors import (
    CommunicationError,
    ConfigError,
    DependencyError,
    ExtensionError,
)
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.reduction.progress import progress_on
from megatron_sparse.reduction.setting_trials import AUTO, SettingTrials

logger = logging.getLogger("megatron_sparse")


class HostState:
    """What `megatron.attachment` and `ddp` share. Making one is collective over the group.

    Args:
        config: of the user, checked, with the thresholds of the cluster file.
        device: of the gradients.
        group: the ranks that exchange messages; None takes all.

    Attributes:
        config: a copy of the given one, which `set_density` and trials change.
        step: training steps so far; drives warm-up and ramp, keys random draws.
        planner: chooses the scheme of each bucket.
        trials: with `compression.density=auto`, choose the preset; else None.
        residuals: error feedback; every step counts as accepted until the host says otherwise.
        progress: drives the buckets.
    """

    def __init__(
        self, config: SparseConfig, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        compression = config.compression
        is_auto = compression.density == AUTO
        # Trials and `set_density` change a copy: the caller may give the same to another model.
        begun = deepcopy(config)
        if is_auto:
            begun.compression.density = compression.given_density  # of the first steps
        check_kernels_of_all(device, group)
        self.config = begun
        self.step = 0
        self.planner = planner_of(self.config, logs=dist.get_rank(group) == 0)
        self.trials: SettingTrials | None = None
        if is_auto:
            self.trials = SettingTrials(compression, self.config, self.planner, device, group)
        self.residuals = ResidualStore(RESIDUAL_DTYPES[compression.residual_dtype])
        self.progress = progress_on(device, config.scheme.timeout_s)
        self._device = device
        self._group = group

    @property
    def enabled(self) -> bool:
        """Switches compression during the run. Off: buckets are sent dense, residual included.

        Set it to the same value on every rank, between two steps.
        """
        return self.planner.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.planner.enabled = value
        logger.info("step %d: compression switched %s", self.step, "on" if value else "off")

    def _between_steps(self) -> None:
        """Called on every rank when a step has ended: the next may have another setting."""
        if self.trials is not None:
            self.trials.step_ended(self.step)

    def set_density(self, density: float) -> None:
        """Changes `compression.density` from the next step on.

        Collective: every rank calls it between two steps. During the warm-up it sets the density
        that the ramp will lead to. It has no effect where nothing is ever pruned. A resumed run
        starts with the density of its configuration.

        Args:
            density: nnz / numel, in (0, 1]; the same on every rank.

        Raises:
            CommunicationError: ranks want different densities; nothing is changed.
            ConfigError: the value is refused, a ramp is under way, or `density=auto` chooses.
        """
        if self.trials is not None:
            raise _refusal("compression.density as a number", AUTO, "name a density at the start")
        _check_same_density(density, self._device, self._group)
        compression = self.config.compression
        checked = replace(compression, density=density)  # refuses a wrong value
        phase, _ = phase_and_density(compression, self.step)
        if phase is Phase.RAMP:
            end = compression.warmup + compression.ramp
            raise _refusal(
                f"a step before the ramp or after it, so from step {end} on",
                f"step {self.step} of the ramp to density {compression.density:g}",
                "wait for the end of the ramp: a new target would make the density jump",
            )
        # If the ramp's length is null, it follows the density: fix it, so that no step's phase
        # changes.
        compression.warmup_iters, compression.ramp_iters = compression.warmup, compression.ramp
        before = compression.density
        compression.density = float(checked.density)
        self.planner.replan()
        logger.info("step %d: target density %g, before %g", self.step, compression.density, before)


def check_kernels_of_all(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Refuses a group in which a rank's GPU has no compiled kernels, on all its ranks.

    Without this the others would wait for that rank's first message. On CUDA collective over the
    group, and the host waits for one number; else it does nothing.

    Args:
        device: of the gradients.
        group: the ranks that will exchange messages; None takes all.

    Raises:
        DependencyError: a compiler or library for the build is missing here.
        ExtensionError: the kernels cannot be built here, do not fit this GPU, or another rank lacks
            them.
    """
    if device.type != "cuda":
        return
    own_error = None
    try:
        check_kernels(device)
    except (DependencyError, ExtensionError) as error:
        own_error = error
    if on_every_rank(own_error is None, device, group):
        return
    raise own_error or ExtensionError(
        "another rank's GPU has no compiled kernels",
        expected="the extension's CUDA part on every rank",
        got="a rank of the group without it, whose own error says why",
        remedy="see megatron-sparse doctor and megatron-sparse build on that rank's machine",
    )


def on_every_rank(own: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether something that holds on this rank (`own`) holds on all ranks of a group.

    Collective; the host waits. The group None takes all ranks.
    """
    holds = torch.tensor([int(own)], device=device)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN, group=group)
    return bool(holds.item())


def _refusal(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(
        "the density cannot be changed now", expected=expected, got=got, remedy=remedy
    )


def _check_same_density(
    density: object, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Raises if ranks want different densities. Collective.

    A value that is no number travels as NaN. If all are NaN this returns: the configuration's own
    check then raises.
    """
    is_number = isinstance(density, int | float) and not isinstance(density, bool)
    own = torch.tensor([density if is_number else math.nan], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    wanted = [value.item() for value in gathered]
    if all(map(math.isnan, wanted)):
        return
    if any(value != wanted[0] for value in wanted):
        raise CommunicationError(
            "ranks want different densities",
            expected="set_density with the same value on every rank",
            got=", ".join(f"rank {rank}: {value:g}" for rank, value in enumerate(wanted)),
            remedy="compute the density from numbers that all ranks have, such as the iteration",
        )
