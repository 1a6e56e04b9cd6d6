"""Which codec makes and reads the messages of a device: the compiled one, or torch operations.

On the CPU it is always the compiled codec. On a CUDA device it is the compiled codec if the
extension's CUDA part is there or can be built, and its kernels were compiled for that GPU. Else
`torch_codec` replaces it, and a line in the log says why. MEGATRON_SPARSE_CODEC=cuda makes that an
error; MEGATRON_SPARSE_CODEC=torch selects `torch_codec`. Ranks need not agree as long as all send
dense or COO records, back to back and not sealed: `torch_codec` reads no others.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from megatron_sparse.cuda_ext import load
from megatron_sparse.cuda_ext.sources import CUDA_ARCHS
from megatron_sparse.errors import ConfigError, DependencyError, ExtensionError

CODEC = "MEGATRON_SPARSE_CODEC"

logger = logging.getLogger(__name__)


def is_compiled(device: torch.device) -> bool:
    """Whether the compiled codec works on tensors of this device.

    The first call for a CUDA device loads the extension's CUDA part, which may build it.

    Raises:
        ConfigError: MEGATRON_SPARSE_CODEC is none of auto, cuda and torch.
        DependencyError: it is `cuda`, and a compiler or library for the build is missing.
        ExtensionError: it is `cuda`, and the kernels cannot be built or do not fit the GPU.
    """
    if device.type == "cuda":
        return _is_compiled(device, os.environ.get(CODEC, "auto"))
    return device.type == "cpu"


@cache
def _is_compiled(device: torch.device, wanted: str) -> bool:
    """`is_compiled` of a CUDA device, decided and logged once; `wanted` is the variable's value."""
    if wanted not in ("auto", "cuda", "torch"):
        raise ConfigError(f"{CODEC} is unknown", expected="auto | cuda | torch", got=wanted)
    if wanted == "torch":
        return False
    try:
        load("cuda")
        _check_gpu(device)
    except (DependencyError, ExtensionError) as error:
        if wanted == "cuda":
            raise
        logger.warning(
            "messages on %s are made by torch operations (slower, dense and COO only): %s (%s)",
            device,
            error.what,
            error.remedy,
        )
        return False
    return True


def _check_gpu(device: torch.device) -> None:
    """Refuses a GPU on which no compiled kernel runs.

    Machine code runs on GPUs of the same major version and the same or a higher minor one.
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
