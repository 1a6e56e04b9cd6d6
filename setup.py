"""Builds the native libraries when the package is installed; pyproject.toml says all the rest.

They are plain shared libraries that torch loads, not Python extension modules, so the wheel fits
every Python 3 of its platform. `MEGATRON_SPARSE_CUDA` (auto, on, off) and
`MEGATRON_SPARSE_STRICT=1` decide what becomes of a part that cannot be built; see
cuda_ext/build.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from megatron_sparse.cuda_ext import build, sources  # noqa: E402
from megatron_sparse.errors import MegatronSparseError  # noqa: E402

PACKAGE_LIBRARIES = Path("megatron_sparse") / "cuda_ext" / "_lib"


class BuildLibraries(build_ext):
    """Runs our own build in place of the compilation of Python extension modules."""

    def build_extensions(self) -> None:
        """Builds into the checkout for an editable install, else into the wheel's tree."""
        out = sources.LIBRARIES if self._in_place() else Path(self.build_lib) / PACKAGE_LIBRARIES
        try:
            parts = build.build_for_install(out.resolve())
        except MegatronSparseError as error:
            sys.exit(f"error: {error}")
        for part in parts:
            print(part, flush=True)
        if not self._in_place():
            (out / build.LOCK).unlink()  # nobody else builds here, and a wheel needs none

    def copy_extensions_to_source(self) -> None:
        """Nothing is left to copy: an editable install builds in its place."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file's name without the tag of one Python version."""
        return fullname.replace(".", "/") + ".so"

    def get_outputs(self) -> list[str]:
        """The libraries, with their stamps, that this build put into the wheel's tree."""
        folder = Path(self.build_lib) / PACKAGE_LIBRARIES
        return sorted(str(path) for path in folder.glob("*.so*"))

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is mapped from the wheel's tree to the checkout."""
        return {}

    def _in_place(self) -> bool:
        return bool(self.inplace) or bool(self.editable_mode)


class PlatformWheel(bdist_wheel):
    """Tags the wheel `py3-none-<platform>`."""

    def get_tag(self) -> tuple[str, str, str]:
        """The libraries hold no Python symbols: any Python 3 of the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    # Named so that the wheel is known to be of one platform; its sources are build.py's affair.
    ext_modules=[Extension("megatron_sparse.cuda_ext._lib.megatron_sparse_cpu", sources=[])],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
