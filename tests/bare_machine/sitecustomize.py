"""Hides every package but those of a bare GPU machine: torch, Triton, numpy, pytest, their needs.

Python imports this module at its start from a folder of PYTHONPATH. `scripts/gpu_check.py` puts
this folder there for a rehearsal, in this process and in all that it starts.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OURS = {"megatron_sparse", "cuda_ext", "triton_kernels", "tests", "conftest", "setup"}
PYTEST = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"}
TORCH = {
    *("torch", "torchgen", "functorch", "triton", "numpy", "nvidia", "cuda", "sympy", "mpmath"),
    *("isympy", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions"),
    *("setuptools", "pkg_resources", "_distutils_hack"),
}
VISIBLE = set(sys.stdlib_module_names) | OURS | PYTEST | TORCH


class HidePackages(MetaPathFinder):
    """Says of every other top-level module that it is not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for what may be seen, so that the usual finders look for it."""
        top = fullname.partition(".")[0]
        if top in VISIBLE or top.startswith(("_", "test")):
            return None
        raise ModuleNotFoundError(f"No module named {fullname!r} on a bare machine", name=fullname)


sys.meta_path.insert(0, HidePackages())
