"""Optional packages: a command checks at its start that those it needs are installed."""

from importlib import metadata
from importlib.util import find_spec

from megatron_sparse.errors import DependencyError


def is_installed(module: str) -> bool:
    """Whether a module is installed. Imports the packages above it, but not the module.

    For `megatron.core` that is `megatron`, which holds no code: so the check may come before
    `cpu_mode.enable`, which must run before any code of megatron.
    """
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a package above is missing, or the module has no spec
        return False


def installed_version(distribution: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def require(module: str, does: str, extra: str, otherwise: str = "") -> None:
    """Raises an error if a module is not installed.

    Args:
        module: the name to import it by.
        does: what the module does for the user, to complete "X is missing, which ...".
        extra: the extra of this package that installs it.
        otherwise: what the user can do in place of installing it, for the remedy.

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
    """Raises a `DependencyError` if matplotlib is not installed."""
    require("matplotlib", "draws figures", "figures")


def require_fits() -> None:
    """Raises a `DependencyError` if scipy is not installed."""
    require("scipy", "fits synthetic gradients", "figures")
