"""Peers of `bench codecs` on a GPU: Triton's selection, CUB's DeviceSelect, cupy.

Triton's kernels select where the compiled library is not there: `Triton prune_` with the same
threshold, and `Triton selection`, which samples the threshold too. Neither writes a record.

CUB selects the non-zero elements of an fp32 vector in one pass with decoupled look-back, about as
fast as memory allows; it is compiled here, with the nvcc of the build. It writes no indices.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_sparse.bench.codec.frame import CPU, KEY, Case, differing
from megatron_sparse.bench.table import Action
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.cuda_ext import compilers, ops, threshold_triton
from megatron_sparse.cuda_ext.record_spec import Limits, Pruning
from megatron_sparse.cuda_ext.sources import SOURCES
from megatron_sparse.cuda_ext.toolchain import find_cuda, find_cxx
from megatron_sparse.errors import DependencyError, ExtensionError

SAMPLES = CompressionConfig.samples


def prune_encode(case: Case, grad_N: torch.Tensor) -> dict[str, Action]:
    """Triton's two; each works on copies, which pruning again does not change."""
    sent_N, selected_N = grad_N.clone(), grad_N.clone()
    rests = [torch.zeros(case.numel, device=case.device) for _ in range(2)]
    threshold_R = torch.tensor([case.threshold], device=case.device)
    pruning = Pruning(rests[0], torch.tensor([0, case.numel]), threshold_R, 0.0, KEY)
    sample = threshold_triton.sample_threshold
    return {
        "Triton prune_": lambda: ops.prune_(sent_N, pruning, case.code),
        "Triton selection": lambda: _select(sample, case, selected_N, rests[1]),
    }


def wrong_triton(case: Case) -> int:
    """Bytes in which Triton's selection differs from the CPU's, of gradient and residual."""
    grad_N = replace(case, device=CPU).gradient()
    results = []
    for device, sample in (
        (CPU, ops.sample_threshold),
        (case.device, threshold_triton.sample_threshold),
    ):
        sent_N, rest_N = grad_N.to(device, copy=True), torch.zeros(case.numel, device=device)
        _select(sample, case, sent_N, rest_N)
        results.append((sent_N, rest_N))
    return sum(differing(got, wanted) for wanted, got in zip(*results, strict=True))


def _select(
    sample: Callable[..., Limits], case: Case, grad_N: torch.Tensor, residual_N: torch.Tensor
) -> None:
    """Samples the threshold and prunes, with leak 0.5; mutates both."""
    offsets, densities_R = torch.tensor([0, case.numel]), torch.tensor([case.density])
    limits = sample(grad_N, residual_N, offsets, densities_R, SAMPLES, torch.tensor([KEY]))
    pruning = Pruning(
        residual_N, offsets, limits.thresholds, 0.5, KEY, tie_chances_R=limits.tie_chances
    )
    ops.prune_(grad_N, pruning, case.code)


def encode(pruned_N: torch.Tensor) -> dict[str, Action]:
    """CUB's and cupy's ways to get the values, where they are installed."""
    peers: dict[str, Action] = {}
    if pruned_N.dtype == torch.float32 and (cub := cub_select(pruned_N)) is not None:
        peers["CUB DeviceSelect"] = cub
    if pruned_N.dtype != torch.bfloat16 and find_spec("cupy") is not None:
        cupy = import_module("cupy")
        array = cupy.from_dlpack(pruned_N)
        peers["cupy flatnonzero"] = lambda: array[cupy.flatnonzero(array)]
    return peers


def cub_select(values_N: torch.Tensor) -> Action | None:
    """A call that selects from an fp32 vector on the current stream; None without nvcc.

    Raises:
        ExtensionError: CUB does not compile, or its first call fails.
    """
    try:
        library = _cub_library(torch.cuda.get_device_capability(values_N.device))
    except DependencyError:
        return None
    to_N = torch.empty_like(values_N)
    count = torch.zeros(1, dtype=torch.int64, device=values_N.device)
    needed = ctypes.c_size_t()

    def call(scratch: int | None) -> None:
        stream = torch.cuda.current_stream(values_N.device).cuda_stream
        failed = library.cub_select_nonzero(
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
def _cub_library(capability: tuple[int, int]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "cub_select.so"
        compile_cub(capability, target)
        return ctypes.CDLL(str(target))  # stays mapped after the file is deleted


def compile_cub(capability: tuple[int, int], target: Path) -> None:
    """Compiles CUB's DeviceSelect into a shared library for one architecture.

    Raises:
        DependencyError: nvcc or the C++ compiler is missing.
        ExtensionError: nvcc failed.
    """
    toolkit = find_cuda()
    number = "{}{}".format(*capability)
    words = [
        toolkit.nvcc,
        "-ccbin",
        find_cxx(),
        *["-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"],
    ]
    words += [f"-gencode=arch=compute_{number},code=sm_{number}"]
    words += ["-isystem", toolkit.home / "include" / "cccl", SOURCES / "cub_select.cu"]
    compilers.run([*words, f"-L{toolkit.lib}", "-o", target], verbose=False)
