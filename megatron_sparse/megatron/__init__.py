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
"""Each public name of this package, and the module that defines it."""
__all__ = ["Attachment", "Plugin", "attach", "detach", "install"]


def __getattr__(name: str) -> object:
    """Imports a public name's module when the name is first used.

    Not earlier, because `cpu_mode` must run before anything imports megatron.
    """
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_EXPORTS[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megatron."):
            # This Megatron lacks a module; older versions have no training loop. Raise a HostError
            # that names the missing function.
            from megatron_sparse.megatron.host_symbols import require_host_symbols

            require_host_symbols("install" if _EXPORTS[name].endswith(".plugin") else "attach")
        raise
