"""The compiled extension: ops of the namespace `megatron_sparse`, loaded on first use.

Nothing is imported or loaded until `load` is called; `ops` calls it. The libraries are built by
`setup.py` at install time or, where one is missing or older than its sources, by the first use.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Literal

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: set[str] = set()


def load(part: Literal["cpu", "cuda"] = "cpu") -> None:
    """Loads the library, building it first if it is missing or older than its sources.

    Thread-safe; ranks that start together wait for the first one's build. Calling it again costs a
    set look-up. Loading the CUDA library loads the CPU one, which holds the schemas.

    Raises:
        DependencyError: it must be built, and a compiler (or torch's headers) is missing.
        ExtensionError: it cannot be built or loaded.
    """
    if part in _loaded:
        return
    with _lock:
        for name in ("cpu", "cuda"):  # in this order, up to `part`
            if name not in _loaded:
                _build_if_needed(name)
                _load_library(name)
            if name == part:
                return


def status() -> dict[str, dict[str, object]]:
    """The state of each part, for `doctor`. Loads the libraries that are built; builds nothing.

    Returns:
        For `cpu` and `cuda`: `path` (str), `built` (current with its sources), `loaded`, and
        `reason` (why it is not loaded, else empty).
    """
    from megatron_sparse.cuda_ext import sources
    from megatron_sparse.errors import ExtensionError

    found: dict[str, dict[str, object]] = {}
    with _lock:
        for name in ("cpu", "cuda"):
            path = sources.library_path(name)
            built = sources.is_current(name)
            reason = ""
            if name not in _loaded:
                if built:
                    try:
                        _load_library(name)
                    except ExtensionError as error:
                        reason = f"{error.what}: {error.got}"
                else:
                    reason = "older than its sources" if path.is_file() else "not built"
            found[name] = {
                "path": str(path),
                "built": built,
                "loaded": name in _loaded,
                "reason": reason,
            }
    return found


def compiles_first(*parts: str) -> str:
    """What the first use of these parts compiles, in words; builds and loads nothing.

    Args:
        parts: of `cpu` and `cuda`.

    Returns:
        Empty where they are built, or where a compiler is missing.
    """
    from megatron_sparse.cuda_ext import sources, toolchain
    from megatron_sparse.errors import DependencyError

    found = []
    for part in parts:
        if sources.is_current(part):
            continue
        try:
            toolchain.find_cxx()
            if part == "cuda":
                toolchain.find_cuda()
        except DependencyError:
            continue
        found.append(part)
    if not found:
        return ""
    several = len(found) > 1
    return (
        f"the native librar{'ies' if several else 'y'} ({', '.join(found)}) "
        f"{'are' if several else 'is'} compiled at the first start, once; this takes minutes"
    )


def _build_if_needed(name: str) -> None:
    """Builds a library that is missing or outdated; rank 0 logs first that this takes minutes."""
    from megatron_sparse.cuda_ext import build, sources

    if not sources.is_current(name):
        waits = compiles_first(name)
        if waits and os.environ.get("RANK", "0") == "0":
            logger.warning("%s", waits)
        build.build("on" if name == "cuda" else "off", parts=(name,))


def _load_library(name: Literal["cpu", "cuda"]) -> None:
    """Registers the ops of a built library with torch, and notes that it is loaded."""
    import torch

    from megatron_sparse.cuda_ext import sources
    from megatron_sparse.errors import ExtensionError

    path = sources.library_path(name)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ExtensionError(
            f"the {name} library cannot be loaded",
            expected=f"a library that fits {path.name}",
            got=error.__cause__ or error,
            remedy="remove it and run python -m megatron_sparse.cuda_ext.build",
        ) from error
    _loaded.add(name)
