"""An NCCL whose ranks are threads of this process: `fake_nccl.cpp`, built with g++."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nccl.cpp")


def build(folder: Path) -> ctypes.CDLL:
    """Compiles and opens it; skips the test where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("the fake NCCL needs g++")
    library = folder / "libfake_nccl.so"
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["g++", *flags, "-shared", SOURCE, "-o", library], check=True)
    opened = ctypes.CDLL(str(library))
    opened.fake_nccl_notice.argtypes = (ctypes.c_void_p, ctypes.c_int)
    opened.fake_nccl_refuse.argtypes = (ctypes.c_void_p, ctypes.c_int)
    opened.fake_nccl_is_aborted.argtypes = (ctypes.c_void_p,)
    return opened
