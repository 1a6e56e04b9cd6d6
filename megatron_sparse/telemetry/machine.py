"""What a run's summary says about the machine: ranks, device and versions."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.extras import installed_version
from megatron_sparse.version import __version__


def machine() -> dict[str, Any]:
    """Ranks and device; makes no CUDA context."""
    # is_initialized: asking for the device's name must not make a CUDA context on a CPU run.
    cuda = torch.cuda.is_initialized()
    distributed = dist.is_available() and dist.is_initialized()
    return {
        "world_size": dist.get_world_size() if distributed else 1,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def versions() -> dict[str, str | None]:
    """Of this package, and of what it runs on; None where there is none."""
    return {
        "megatron_sparse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_initialized() else None,
        "megatron_core": installed_version("megatron-core"),
        "python": platform.python_version(),
    }
