"""CUB's DeviceSelect as a peer of the CUDA encoders: compiled here, with the nvcc of the build.

It selects the non-zero elements of an fp32 vector in one pass with decoupled look-back, about as
fast as memory allows. It writes no indices and no header.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from megatron_sparse.cuda_ext.sources import SOURCES
from megatron_sparse.cuda_ext.toolchain import find_cuda, find_cxx
from megatron_sparse.errors import DependencyError, ExtensionError


def action(values_N: torch.Tensor) -> Callable[[], object] | None:
    """A call that selects from an fp32 vector on the current stream; None without nvcc.

    Raises:
        ExtensionError: CUB does not compile, or its first call fails.
    """
    try:
        library = _library(torch.cuda.get_device_capability(values_N.device))
    except DependencyError:
        return None
    select = library.cub_select_nonzero
    to_N = torch.empty_like(values_N)
    count = torch.zeros(1, dtype=torch.int64, device=values_N.device)
    needed = ctypes.c_size_t()

    def call(scratch: int | None) -> None:
        stream = torch.cuda.current_stream(values_N.device).cuda_stream
        failed = select(
            ctypes.c_void_p(scratch),
            ctypes.byref(needed),
            ctypes.c_void_p(values_N.data_ptr()),
            ctypes.c_void_p(to_N.data_ptr()),
            ctypes.c_void_p(count.data_ptr()),
            ctypes.c_longlong(values_N.numel()),
            ctypes.c_void_p(stream),
        )
        if failed:
            raise ExtensionError("CUB's DeviceSelect failed", expected="cudaSuccess", got=failed)

    call(None)
    scratch = torch.empty(needed.value, dtype=torch.uint8, device=values_N.device)
    return lambda: call(scratch.data_ptr())


@cache
def _library(capability: tuple[int, int]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "cub_select.so"
        compile_for(capability, target)
        return ctypes.CDLL(str(target))  # stays mapped after the file is deleted


def compile_for(capability: tuple[int, int], target: Path) -> None:
    """Compiles the peer into a shared library for one architecture.

    Raises:
        DependencyError: nvcc or the C++ compiler is missing.
        ExtensionError: nvcc failed.
    """
    toolkit = find_cuda()
    major, minor = capability
    command = [
        toolkit.nvcc,
        "-ccbin",
        find_cxx(),
        "-O3",
        "-std=c++17",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}",
        "-isystem",
        toolkit.home / "include" / "cccl",
        SOURCES / "cub_select.cu",
        f"-L{toolkit.lib}",
        "-o",
        target,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError(
            "CUB's DeviceSelect does not compile",
            expected="nvcc with CCCL's headers",
            got="\n".join((done.stdout + done.stderr).strip().splitlines()[:10]),
        )
