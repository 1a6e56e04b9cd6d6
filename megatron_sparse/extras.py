"""Optional packages: a command asks for those that it needs before it works."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from megatron_sparse.errors import DependencyError


def is_installed(module: str) -> bool:
    """Whether a module can be found. Imports nothing."""
    try:
        return _find(module) is not None
    except (ImportError, ValueError):
        return False


def installed_version(distribution: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find(module: str) -> ModuleSpec | None:
    """The module's spec; None if there is none.

    `find_spec` alone would import the parents, and CPU mode comes before any import of megatron.
    """
    parent = module.rpartition(".")[0]
    if not parent:
        return find_spec(module)
    is_blocked = module in sys.modules and sys.modules[module] is None  # as `import` sees it
    package = _find(parent)
    if package is None or package.submodule_search_locations is None or is_blocked:
        return None
    folders = package.submodule_search_locations
    specs = (finder.find_spec(module, folders) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def require(module: str, does: str, extra: str, otherwise: str = "") -> None:
    """Refuses to go on without a module.

    Args:
        module: as it is imported.
        does: what the module does for the user, to complete "X is missing, which ...".
        extra: the extra of this package that installs it.
        otherwise: another way to go on without it.

    Raises:
        DependencyError: names the extra.

    Example:
        >>> require("json", "reads files", "train")
    """
    if not is_installed(module):
        install = f"pip install 'megatron-sparse[{extra}]'"
        raise DependencyError(
            f"{module} is missing, which {does}",
            expected=f"an importable {module}",
            got="no such module",
            remedy=f"{install}, or {otherwise}" if otherwise else install,
        )


def require_figures() -> None:
    """Refuses to go on without matplotlib.

    Raises:
        DependencyError: names the extra.
    """
    require("matplotlib", "draws figures", "figures")


def require_fits() -> None:
    """Refuses to go on without scipy.

    Raises:
        DependencyError: names the extra.
    """
    require("scipy", "fits synthetic gradients", "figures")
