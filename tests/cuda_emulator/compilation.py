"""Compiles the CUDA launchers for the CPU, with the emulator in the place of CUDA's headers."""

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_sparse.cuda_ext.sources import CUDA_UNITS, SOURCES, TORCH_TARGET
from megatron_sparse.cuda_ext.toolchain import find_torch

HERE = Path(__file__).resolve().parent
# Kernels load values as raw bits; nvcc does not assume strict aliasing either.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-pthread",
    f"-I{HERE / 'include'}",
    f"-I{SOURCES}",
)


def find_gxx() -> str | None:
    """The compiler of the emulator: g++ 11 or newer (std::source_location)."""
    return shutil.which("g++")


TRAFFIC = (
    "-DCUDA_EMULATOR_TRAFFIC",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
)
"""Options with which kernels announce their accesses to `traffic.cpp`."""


def compile_library(
    folder: Path, extra: Sequence[str] = (), *, counts_bytes: bool = False, name: str = "emulated"
) -> Path:
    """Builds the shared library in a folder and returns its path.

    `counts_bytes`: its ledgers contain bytes, not launches only. `name`: the name space of its ops.
    """
    torch, _ = find_torch()
    bindings = (TORCH_TARGET, f"-DEMULATED={name}", "-isystem", str(torch / "include"))
    kernels = (*extra, *TRAFFIC) if counts_bytes else extra
    jobs = [
        (HERE / "emulated_ops.cpp", (*extra, *bindings)),
        *((SOURCES / f"{unit}.cu", kernels) for unit in CUDA_UNITS),
    ]
    if counts_bytes:
        jobs.append((HERE / "traffic.cpp", extra))

    def compile_one(source: Path, options: Sequence[str]) -> Path:
        target = folder / f"{source.name}.o"
        command = ["g++", *FLAGS, *options, "-x", "c++", "-c", source, "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile_one(*job), jobs))
    library = folder / f"{name}.so"
    link = ["g++", "-shared", "-pthread", *extra, *objects, f"-L{torch / 'lib'}", "-ltorch_cpu"]
    subprocess.run([*link, "-o", library], check=True)
    return library
