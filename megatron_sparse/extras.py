"""Optional packages: a command asks for those that it needs before it works."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from megatron_sparse.errors import DependencyError


def is_installed(module: str) -> bool:
    """Whether a module can be found.

    Imports the packages above the module. `megatron` itself holds no code, so the check may come
    before CPU mode.
    """
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed_version(distribution: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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
