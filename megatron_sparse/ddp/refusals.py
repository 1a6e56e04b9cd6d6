"""What `DDPState` refuses: models that DDP did not wrap, and settings that need Megatron."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from megatron_sparse.config.level import AUTO, RANK
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CheckpointError, ConfigError, HostError


def device_of(ddp: object) -> torch.device:
    """Checks the model, and returns the one device that all of its parameters are on.

    Raises:
        HostError: DDP has not wrapped the model, or its parameters are on several devices.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise HostError(
            "this model was not wrapped by DDP",
            expected="a torch.nn.parallel.DistributedDataParallel",
            got=f"{type(ddp).__module__}.{type(ddp).__qualname__}",
            remedy="wrap it first; for Megatron's own DDP use megatron_sparse.attach",
        )
    devices = {parameter.device for parameter in ddp.module.parameters()}
    if len(devices) != 1:
        raise HostError(
            "the model spreads over several devices",
            expected="all parameters on one device",
            got=", ".join(sorted(map(str, devices))),
            remedy="use one process for each device",
        )
    return devices.pop()


def check_config(
    config: SparseConfig, ddp: DistributedDataParallel, scaler: torch.amp.GradScaler | None
) -> None:
    """Refuses what plain DDP (torch's, not Megatron's) cannot do, and what would corrupt residuals.

    `scaler` is the GradScaler that `DDPState` got, or None.

    Raises:
        ConfigError: names the setting, or the parameter.
    """
    method, level = config.parameters.method, config.compression.level
    if config.compression.residual_checkpoint == "sum":
        # Each rank saves its own state by itself, so no collective can add residuals up.
        raise ConfigError(
            "compression.residual_checkpoint=sum does not go with plain DDP",
            expected="full or none",
            got="sum",
            remedy="set compression.residual_checkpoint=full",
        )
    if method in COMPRESSED:
        # Every rank of plain DDP updates all parameters itself.
        raise ConfigError(
            f"parameters.method={method} does not go with plain DDP",
            expected="parameters.method=auto or raw",
            got=method,
            remedy="leave it out; it is for Megatron's distributed optimizer",
        )
    if level not in (RANK, AUTO):
        # DDP makes new buckets after the first step, and their parts would lie on other ranks.
        raise ConfigError(
            f"compression.level={level} does not go with plain DDP",
            expected="compression.level=rank or auto, which takes rank",
            got=level,
            remedy="leave it out, or use Megatron with megatron_sparse.attach; scheme.name="
            "hierarchical adds up inside a node what its ranks have selected",
        )
    if scaler is not None and config.compression.undo == "never":
        raise ConfigError(
            "compression.undo=never does not go with DDPState(..., scaler=...)",
            expected="compression.undo=auto or always: a step that overflows is undone by a copy",
            got="never",
            remedy="leave it out",
        )
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{dtype} parameters do not go with plain DDP",
                expected="fp32 or bf16 parameters; fp16 by autocast and a GradScaler",
                got=f"{name} in {dtype}",
                remedy="train in fp32 or bf16; in fp16 under Megatron, with megatron_sparse.attach",
            )


def optimizers_of_loop(known: torch.amp.GradScaler | None) -> list[torch.optim.Optimizer]:
    """Finds all optimizers in this process, and refuses a GradScaler that is not the `known` one.

    `DDPState` could not convert its residuals when such a GradScaler changes its scale.

    Raises:
        ConfigError: another GradScaler is in use.
    """
    found: list[torch.optim.Optimizer] = []
    for thing in gc.get_objects():
        kind = type(thing)  # `isinstance` fails for a weak proxy whose object is gone
        if issubclass(kind, torch.optim.Optimizer):
            found.append(thing)
            continue
        is_other_scaler = issubclass(kind, torch.amp.GradScaler) and thing is not known
        # `_scale` is None until it scales a loss; a disabled scaler does not have the attribute.
        if is_other_scaler and getattr(thing, "_scale", None) is not None:
            raise ConfigError(
                "a GradScaler scales the loss, and DDPState does not know it",
                expected="DDPState(ddp, scaler=...)",
                got="a scaler in use",
                remedy="give it to DDPState, or train in bf16 without a scaler",
            )
    return found


def check_saved(
    state: Mapping[str, Any], own: Mapping[str, int], names: Mapping[torch.nn.Parameter, str]
) -> None:
    """Refuses a saved state of another rank or another model.

    `own` are entries that `state`, of `DDPState.state_dict`, must have: this process's version of
    the format, rank and world size. `names`: parameter -> its name in the model.

    Raises:
        CheckpointError: names the entry, or the parameter.
    """
    for key, expected in own.items():
        if state.get(key) != expected:
            raise CheckpointError(
                f"the saved state has another {key}",
                expected=expected,
                got=state.get(key),
                remedy="load on each rank what it saved itself, with as many ranks, or start "
                "with zero residuals by not loading it",
            )
    if lacking := sorted({"step", "enabled", "scale", "residuals"} - state.keys()):
        raise CheckpointError(
            "the saved state is incomplete",
            expected="all entries of DDPState.state_dict()",
            got=f"no {', '.join(lacking)}",
            remedy="load it unchanged, or start with zero residuals by not loading it",
        )
    numels = {name: parameter.numel() for parameter, name in names.items()}
    for name, residual in state["residuals"].items():
        if residual.numel() != numels.get(name):
            raise CheckpointError(
                f"the saved residual of {name} does not fit the model",
                expected=f"{numels[name]} elements" if name in numels else "a parameter",
                got=residual.numel(),
                remedy="resume with the same model",
            )
