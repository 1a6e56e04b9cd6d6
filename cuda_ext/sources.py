"""The inputs of the native libraries: sources, flags, and a hash of all of them.

Only the standard library is needed to import this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

from megatron_sparse.errors import DependencyError

SOURCES = Path(__file__).resolve().parent / "csrc"
LIBRARIES = Path(__file__).resolve().parent / "_lib"


def cuda_archs(text: str) -> tuple[int, ...]:
    """The compute capabilities in a text such as `80,90`.

    Raises:
        DependencyError: the text is no such list.
    """
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise DependencyError(
            "MEGATRON_SPARSE_CUDA_ARCHS is no list of compute capabilities",
            expected="numbers with commas between, such as 80,90",
            got=repr(text),
            remedy="leave it unset for all that wheels have",
        ) from None


CUDA_ARCHS = cuda_archs(os.environ.get("MEGATRON_SPARSE_CUDA_ARCHS", "80,90,100"))
"""Compute capabilities that kernels are compiled for; with fewer the build is faster."""

TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # 2.11: a byte for each part
_COMMON = ("-O3", "-std=c++17", "-DNDEBUG")
# Without contraction: a fused multiply-add would round differently on each instruction set.
CXX_FLAGS = (*_COMMON, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
CPU_KERNELS = SOURCES / "kernels_isa.cpp"
CPU_BINDINGS = sorted(
    path
    for path in SOURCES.glob("*.cpp")
    if path != CPU_KERNELS and not path.stem.endswith("_cuda")
)
ISAS: dict[str, tuple[int, tuple[str, ...]]] = {
    "portable": (4, ()),
    "avx2": (8, ("-mavx2",)),
    "avx512": (16, ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
}
"""Instruction sets that `CPU_KERNELS` are compiled for: fp32 lanes and flags."""
CUDA_UNITS = (
    "prune_encode",
    "encode",
    "rice_encode",
    "decode",
    "moves_encode",
    "hash_bitmap",
    "moves_decode",
    "row_sparse",
    "hash_memory",
    "hash_partition",
    "threshold",
    "payload_sums",
    "nccl_sum",
)
"""The CUDA library's kernels, each a .cu; those that compile longest come first."""
CUDA_BINDINGS = sorted(path.stem.removesuffix("_cuda") for path in SOURCES.glob("*_cuda.cpp"))
"""Their bindings, each a _cuda.cpp."""
NVCC_FLAGS = (
    *_COMMON,
    "--fmad=false",
    "-Xptxas",
    "-v,-warn-spills",
    *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHS),
)
IS_X86 = platform.machine() in ("x86_64", "AMD64")

_SOURCE_SUFFIXES = (".h", ".cuh", ".cpp", ".cu")


def library_path(name: str, out: Path = LIBRARIES) -> Path:
    """Where the `cpu` or `cuda` library lies."""
    return out / f"megatron_sparse_{name}.so"


def is_current(name: str, out: Path = LIBRARIES) -> bool:
    """Whether the library exists and was built from the current sources and flags.

    It may have been built with another version of torch: the stable ABI makes it fit all versions,
    and a wheel must load where there is no compiler.
    """
    stamp = read_stamp(library_path(name, out))
    return stamp is not None and stamp.get("sources") == source_hash(name)


def source_hash(name: str) -> str:
    """A hash of everything that determines the "cpu" or "cuda" library: sources and flags."""
    digest = hashlib.sha256(repr((TORCH_TARGET, CXX_FLAGS)).encode())
    own_flags = (NVCC_FLAGS, CUDA_UNITS, CUDA_BINDINGS) if name == "cuda" else (ISAS, IS_X86)
    digest.update(repr(own_flags).encode())
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in _SOURCE_SUFFIXES):
        is_cuda_source = path.suffix in (".cu", ".cuh") or path.stem.endswith("_cuda")
        library = "cuda" if is_cuda_source else "cpu"
        # Headers count for both libraries, as either may include them.
        if path.suffix == ".h" or library == name:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_stamp(library: Path) -> dict[str, str] | None:
    """The stamp beside a library, which records its sources; None if either file is missing."""
    stamp = library.with_name(library.name + ".stamp")
    if not library.is_file() or not stamp.is_file():
        return None
    return json.loads(stamp.read_text())
