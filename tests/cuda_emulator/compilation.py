"""Compiles the CUDA launchers for the CPU, with the emulator in the place of CUDA's headers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "cuda_ext" / "csrc"
# Kernels load values as raw bits; nvcc does not assume strict aliasing either.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
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


def compile_library(folder: Path, extra: Sequence[str] = (), *, counts_bytes: bool = False) -> Path:
    """Builds the shared library, whose ledgers contain bytes or launches only; returns its path."""

    def compile_one(source: Path, options: Sequence[str]) -> Path:
        target = folder / f"{source.name}.o"
        command = ["g++", *FLAGS, *options, "-x", "c++", "-c", source, "-o", target]
        subprocess.run(command, check=True)
        return target

    units = (
        SOURCES / "prune_encode.cu",
        HERE / "codec_api.cpp",
        HERE / "rice_encode_api.cpp",
        HERE / "hash_api.cpp",
        HERE / "moves_api.cpp",
        HERE / "nccl_api.cpp",
    )
    options = (*extra, *TRAFFIC) if counts_bytes else extra
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda unit: compile_one(unit, options), units))
    if counts_bytes:
        objects.append(compile_one(HERE / "traffic.cpp", extra))
    library = folder / "codecs_on_cpu.so"
    subprocess.run(["g++", "-shared", "-pthread", *extra, *objects, "-o", library], check=True)
    return library
