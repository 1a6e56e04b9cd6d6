"""The plugin's side of Megatron-LM; the only package of the project that imports megatron.

`install` is for scripts that run Megatron's own `pretrain`, `attach` for scripts that build a
`DistributedDataParallel` themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_sparse.megatron.attachment import Attachment, attach, detach
    from megatron_sparse.megatron.plugin import Plugin, install

_EXPORTS = {
    "Attachment": "megatron_sparse.megatron.attachment",
    "attach": "megatron_sparse.megatron.attachment",
    "detach": "megatron_sparse.megatron.attachment",
    "Plugin": "megatron_sparse.megatron.plugin",
    "install": "megatron_sparse.megatron.plugin",
}

__all__ = ["Attachment", "Plugin", "attach", "detach", "install"]


def __getattr__(name: str) -> object:
    """Imports a name of `_EXPORTS` when it is first used; says which functions Megatron lacks."""
    # Lazy, because cpu_mode must run before anything imports megatron.
    if name in _EXPORTS:
        try:
            return getattr(import_module(_EXPORTS[name]), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron."):
                raise
            # A whole module is missing: older versions of Megatron have no training loop.
            from megatron_sparse.megatron.host_symbols import require_host_symbols

            require_host_symbols("install" if _EXPORTS[name].endswith(".plugin") else "attach")
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
