"""Loads the two native libraries, "cpu" and "cuda", with torch ops of namespace `megatron_sparse`.

Importing this package loads neither; the typed ops of `ops` do, at their first call. `setup.py`
builds the libraries; one that is missing or older than its sources is built when it is first used.
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
    """Loads a native library into torch; builds it before if it is missing or outdated.

    Thread-safe; of ranks that start together one builds, and the others wait for its file lock.
    A second call returns at once. "cuda" loads "cpu" first, which declares the schemas of all ops.

    Raises:
        DependencyError: it must be built, and a compiler (or torch's headers) is missing.
        ExtensionError: it cannot be built or loaded.
    """
    if part in _loaded:
        return
    with _lock:
        for name in ("cpu",) if part == "cpu" else ("cpu", "cuda"):
            if name not in _loaded:
                _build_if_needed(name)
                _load_library(name)


def status() -> dict[str, dict[str, object]]:
    """The state of both libraries, for `doctor`; loads those that are built, builds none.

    Returns:
        For each of "cpu" and "cuda" a dict: `path` (str), `built` (bool: from the current sources),
        `loaded` (bool), and `reason` (str: why it is not loaded, else empty).
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
            loaded = name in _loaded
            found[name] = {"path": str(path), "built": built, "loaded": loaded, "reason": reason}
    return found


def compiles_first(*parts: str) -> str:
    """A sentence that names the libraries to be compiled on first use; builds and loads nothing.

    `parts` are "cpu", "cuda" or both. The sentence is empty if none need be compiled. One that
    lacks a compiler is left out: `build` reports it.
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
    """Builds a library if it is missing or outdated; rank 0 first logs that this takes minutes."""
    from megatron_sparse.cuda_ext import build, sources

    if not sources.is_current(name):
        notice = compiles_first(name)
        if notice and os.environ.get("RANK", "0") == "0":  # once, not once for each rank
            logger.warning("%s", notice)
        build.build("on", parts=(name,))


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
