"""Finds the tools for the native libraries: torch's headers, a C++ compiler, a CUDA toolkit.

Only the standard library is needed to import this module, and torch is found without importing it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_sparse.errors import DependencyError

MIN_TORCH = (2, 11)


@dataclass(frozen=True)
class CudaToolkit:
    """An nvcc with the headers and the static runtime that go with it."""

    home: Path
    lib: Path

    @property
    def nvcc(self) -> Path:
        """The compiler driver."""
        return self.home / "bin" / "nvcc"


def find_torch() -> tuple[Path, str]:
    """The folder of torch (which is not imported) and its version.

    Raises:
        DependencyError: torch is not installed, is too old, or comes without headers.
    """
    spec = importlib.util.find_spec("torch")
    wanted = ".".join(map(str, MIN_TORCH))
    remedy = f"pip install 'torch>={wanted}', then python -m megatron_sparse.cuda_ext.build"
    if spec is None or spec.origin is None:
        raise DependencyError(
            "torch is not installed here", expected=f"torch >= {wanted}", got="none", remedy=remedy
        )
    root = Path(spec.origin).parent
    version = metadata.version("torch")
    major_minor = version.split("+")[0].split(".")[:2]
    parts = tuple(map(int, major_minor))
    headers = root / "include" / "torch" / "csrc" / "stable" / "library.h"
    if parts < MIN_TORCH or not headers.is_file():
        raise DependencyError(
            "torch does not fit",
            expected=f"torch >= {wanted} with its headers",
            got=f"torch {version}" + ("" if headers.is_file() else " without its headers"),
            remedy=remedy,
        )
    return root, version


def find_cxx() -> str:
    """The C++ compiler: $CXX, or the first of g++, clang++ and c++ on PATH.

    Raises:
        DependencyError: there is no compiler.
    """
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["g++", "clang++", "c++"]:
        if path := shutil.which(candidate):
            return path
    raise DependencyError(
        "there is no C++ compiler",
        expected="g++, clang++ or c++ on PATH, or one named in CXX",
        got=f"CXX={named}" if named else "none of them on PATH",
        remedy="install one (Debian: apt-get install g++; conda: conda install gxx), "
        "then python -m megatron_sparse.cuda_ext.build",
    )


def find_cuda() -> CudaToolkit:
    """Finds the first complete toolkit: nvcc with headers and static runtime.

    Looks in CUDA_HOME, CUDA_PATH, nvcc's folder on PATH, /usr/local/cuda, and nvidia/cu13 of the
    PyPI wheels, in this order.

    Raises:
        DependencyError: there is no nvcc with headers and static runtime.
    """
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    homes.append(str(Path(on_path).resolve().parent.parent) if on_path else None)
    homes.append("/usr/local/cuda")
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    homes.extend(str(Path(folder) / "cu13") for folder in folders or [])
    for home in map(Path, filter(None, homes)):
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            for lib in (home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib"):
                if (lib / "libcudart_static.a").is_file():
                    return CudaToolkit(home, lib)
    raise DependencyError(
        "there is no nvcc",
        expected="nvcc, cuda_runtime.h and libcudart_static.a",
        got="not in CUDA_HOME, on PATH, in /usr/local/cuda or in the PyPI packages",
        remedy="install nvcc (pip install 'megatron-sparse[cuda]', or NVIDIA's toolkit) and name "
        "its folder in CUDA_HOME if it is in none of the usual places",
    )
