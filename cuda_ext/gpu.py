"""Checks whether the CUDA kernels of this package run on a GPU."""

from __future__ import annotations

from functools import cache

import torch

from megatron_sparse.cuda_ext import load
from megatron_sparse.cuda_ext.sources import CUDA_ARCHS
from megatron_sparse.errors import ExtensionError


@cache
def check_kernels(device: torch.device) -> None:
    """Raises an error if a CUDA device cannot run the kernels.

    The first call for a device loads the extension's CUDA part, which may build it.

    Raises:
        DependencyError: a compiler or library for the build is missing.
        ExtensionError: the kernels cannot be built, or were not compiled for this GPU.
    """
    load("cuda")
    check_architecture(device)


def check_architecture(device: torch.device) -> None:
    """Raises an error for a GPU that the kernels are not compiled for; loads and builds nothing.

    Machine code runs on GPUs of the same major version and the same or a higher minor one.

    Raises:
        ExtensionError: the kernels were not compiled for this GPU.
    """
    major, minor = torch.cuda.get_device_capability(device)
    same_major = [arch for arch in CUDA_ARCHS if arch // 10 == major]  # 90 is version 9.0
    if not any(arch % 10 <= minor for arch in same_major):
        raise ExtensionError(
            f"the CUDA kernels were not compiled for {device}",
            expected=" or ".join(f"sm_{arch}" for arch in CUDA_ARCHS),
            got=f"sm_{major}{minor}",
            remedy="export MEGATRON_SPARSE_CUDA_ARCHS with it, for the build and for every run",
        )
