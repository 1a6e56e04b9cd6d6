"""Which of torch's NCCL backends `scheme.nccl_errors=typed` and `scheme.nccl_engine` support.

Both support `nccl` where it is torch's `ProcessGroupNCCL`. Its watchdog publishes errors in a known
order, aborts communicators and leaves the process alone if `nccl_errors.ENVIRONMENT` says so.

torch 2.14 adds backends that are written anew, `nccl2` and `nccl-lazy`, and can make `nccl` an
alias of the former (`TORCH_DIST_USE_NCCL2=1`). Their thread aborts the communicator, and as a rule
the process with it, as soon as it finds an error, and tells no other rank. So an error could not be
typed, and a checkpoint could hold the results of an aborted operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.errors import ConfigError

TYPED_ERRORS = "scheme.nccl_errors=typed"
ENGINE = "scheme.nccl_engine=true"
SUPPORTED = "the backend nccl, as torch's ProcessGroupNCCL"
SWITCH = "TORCH_DIST_USE_NCCL2"


def check_switch(setting: str, environment: Mapping[str, str]) -> None:
    """Refuses an environment in which torch's backend `nccl` is another one.

    Args:
        setting: `TYPED_ERRORS` or `ENGINE`.
        environment: of the ranks.

    Raises:
        ConfigError: `TORCH_DIST_USE_NCCL2` is 1.
    """
    if environment.get(SWITCH) == "1":
        raise ConfigError(
            f"{setting} with {SWITCH}=1",
            expected=SUPPORTED,
            got="nccl2 under the name nccl",
            remedy=f"unset {SWITCH}, or leave {setting.partition('=')[0]} out",
        )


def cuda_backend(group: dist.ProcessGroup) -> Any | None:
    """The backend that serves a group's CUDA tensors; None for a group of the CPU alone."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks each operation in a wrapper.
    return getattr(backend, "wrapped_pg", backend)


def is_supported(backend: Any) -> bool:
    """Whether it is `ProcessGroupNCCL`; a torch without NCCL has none."""
    return isinstance(backend, getattr(dist, "ProcessGroupNCCL", ()))


def require_supported(setting: str, group: dist.ProcessGroup, name: str) -> None:
    """Refuses a group whose CUDA tensors another backend than `ProcessGroupNCCL` serves.

    Args:
        setting: `TYPED_ERRORS` or `ENGINE`.
        group: of this process.
        name: of the group, for the error.

    Raises:
        ConfigError: names the backend.
    """
    backend = cuda_backend(group)
    if not is_supported(backend):
        raise ConfigError(
            f"{setting} with the group {name}",
            expected=SUPPORTED,
            got=f"{dist.get_backend(group)} ({type(backend).__name__})",
            remedy="initialise torch.distributed with the backend nccl and without "
            f"{SWITCH}, or leave {setting.partition('=')[0]} out",
        )
