"""The plugin's state in one process, for both frameworks that can run it: Megatron and torch's DDP.

Ranks agree here on two things: at the start, that every rank's GPU has compiled kernels; during the
run, on a new target density (density: selected elements / all elements of a bucket).
"""

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
from megatron_sparse.errors import CommunicationError, ConfigError, DependencyError, ExtensionError
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.reduction.progress import progress_on
from megatron_sparse.reduction.setting_trials import AUTO, SettingTrials

logger = logging.getLogger("megatron_sparse")


class HostState:
    """State shared by `megatron.attachment` and `ddp`. Making it is collective over the group.

    `config` is the user's, checked, with the thresholds of the cluster file. `group` has the ranks
    that exchange messages; None takes all.

    Attributes:
        config: a copy of the argument; `set_density` and `trials` change it.
        step: training steps so far; drives warm-up and ramp, keys random draws.
        planner: chooses the scheme (collective algorithm) of each bucket.
        trials: with `compression.density=auto`, chooses the preset by timing steps; else None.
        residuals: error feedback; the framework may undo a step's (`ResidualStore.is_reported`).
        progress: runs the buckets' pipelines.
    """

    def __init__(
        self, config: SparseConfig, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        compression = config.compression
        is_auto = compression.density == AUTO
        # A copy, because this object changes it, and the caller may use `config` for another model.
        self.config = deepcopy(config)
        if is_auto:  # a number for the first steps, until trials have chosen one
            self.config.compression.density = compression.given_density
        check_kernels_of_all(device, group)
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
        """Whether buckets are compressed. Else they are sent dense, with their residuals added.

        May be set during the run: between two steps, to the same value on every rank.
        """
        return self.planner.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.planner.enabled = value
        logger.info("step %d: compression switched %s", self.step, "on" if value else "off")

    def _between_steps(self) -> None:
        """Lets trials time the step that has ended, and change the settings of the next."""
        if self.trials is not None:
            self.trials.step_ended(self.step)

    def set_density(self, density: float) -> None:
        """Changes `compression.density` from the next step on.

        Collective: every rank calls it between two steps. During the warm-up it sets the density
        at which the ramp will end. It has no effect if compression is off or the scheme sends every
        element. Checkpoints do not save it: a resumed run starts with its configured density.

        Args:
            density: nnz / numel, in (0, 1]; the same on every rank.

        Raises:
            CommunicationError: ranks want different densities; nothing is changed.
            ConfigError: the value is invalid, a ramp is under way, or `density=auto` is configured.
        """
        if self.trials is not None:
            raise _refusal("compression.density as a number", AUTO, "name a density at the start")
        _check_same_density(density, self._device, self._group)
        compression = self.config.compression
        checked = replace(compression, density=density)  # its constructor refuses a wrong value
        phase, _ = phase_and_density(compression, self.step)
        if phase is Phase.RAMP:
            ramp_end = compression.warmup + compression.ramp
            raise _refusal(
                f"a step before the ramp or after it, so from step {ramp_end} on",
                f"step {self.step} of the ramp to density {compression.density:g}",
                "wait for the end of the ramp: a new target would make the density jump",
            )
        # Where `ramp_iters` is null, the ramp's length is computed from the density. Keep the
        # length of the old density, or this step could fall into another phase.
        compression.warmup_iters, compression.ramp_iters = compression.warmup, compression.ramp
        before = compression.density
        compression.density = float(checked.density)
        self.planner.replan()
        logger.info("step %d: target density %g, before %g", self.step, compression.density, before)


def check_kernels_of_all(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Raises on all ranks of a group if the GPU of any of them has no compiled kernels.

    If only that rank raised, the other ranks would wait for its first message until their timeout.
    On CUDA collective and blocking (one small all-reduce); on a CPU it does nothing.

    `group` has the ranks that will exchange messages; None takes all.

    Raises:
        DependencyError: a compiler or library for the build is missing here.
        ExtensionError: the kernels cannot be built here, do not fit this GPU, or another rank lacks
            them.
    """
    if device.type != "cuda":
        return
    own_error = None  # raised only after the all-reduce, in which every rank must take part
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
    """Whether `own` is true on all ranks of a group: a logical AND over the group.

    Collective; blocks until the result is on the CPU. The group None takes all ranks.
    """
    holds = torch.tensor([int(own)], device=device)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN, group=group)
    return bool(holds.item())


def _refusal(expected: str, got: str, remedy: str) -> ConfigError:
    """The error of a `set_density` that is not allowed now."""
    return ConfigError(
        "the density cannot be changed now", expected=expected, got=got, remedy=remedy
    )


def _check_same_density(
    density: object, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Raises CommunicationError if ranks pass different densities. Collective.

    Something that is no number is sent as NaN. If every rank sends NaN this returns, and the caller
    validates the value.
    """
    is_number = isinstance(density, int | float) and not isinstance(density, bool)
    own = torch.tensor([density if is_number else math.nan], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    wanted = [value.item() for value in gathered]
    if all(map(math.isnan, wanted)):
        return
    if any(value != wanted[0] for value in wanted):  # NaN differs from everything
        raise CommunicationError(
            "ranks want different densities",
            expected="set_density with the same value on every rank",
            got=", ".join(f"rank {rank}: {value:g}" for rank, value in enumerate(wanted)),
            remedy="compute the density from numbers that all ranks have, such as the iteration",
        )
