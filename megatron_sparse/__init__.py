"""Gradient compression for Megatron-LM: sparse, error-fed-back gradient synchronisation.

The public API is `install`, `attach` and `detach` for Megatron, `DDPState` and `ddp_hook` for
torch's own DDP, `row_sparse_all_reduce`, and `SparseConfig`. Nothing heavy (torch, megatron) is
imported until one of them is used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse.version import __version__ as __version__

# `triton_kernels`, `cuda_ext` and `configs` stand at the top of the repository. In a wheel and in
# an editable install setuptools maps them into this package; when the checkout itself is what
# Python imports from, the package looks for them beside itself.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "cuda_ext" / "csrc").is_dir() and not (Path(__file__).parent / "cuda_ext").exists():
    __path__.append(str(_checkout))

_EXPORTS = {
    "SparseConfig": "megatron_sparse.config.sparse",
    "CompressionConfig": "megatron_sparse.config.compression",
    "SchemeConfig": "megatron_sparse.config.scheme",
    "TrackingConfig": "megatron_sparse.config.tracking",
    "install": "megatron_sparse.megatron",
    "attach": "megatron_sparse.megatron",
    "detach": "megatron_sparse.megatron",
    "DDPState": "megatron_sparse.ddp.state",
    "ddp_hook": "megatron_sparse.ddp.state",
    "row_sparse_all_reduce": "megatron_sparse.reduction.row_sparse",
}

if TYPE_CHECKING:
    from megatron_sparse.config.compression import CompressionConfig
    from megatron_sparse.config.scheme import SchemeConfig
    from megatron_sparse.config.sparse import SparseConfig
    from megatron_sparse.config.tracking import TrackingConfig
    from megatron_sparse.ddp.state import DDPState, ddp_hook
    from megatron_sparse.megatron import attach, detach, install
    from megatron_sparse.reduction.row_sparse import row_sparse_all_reduce

__all__ = [
    "CompressionConfig",
    "DDPState",
    "SchemeConfig",
    "SparseConfig",
    "TrackingConfig",
    "attach",
    "ddp_hook",
    "detach",
    "install",
    "row_sparse_all_reduce",
]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
