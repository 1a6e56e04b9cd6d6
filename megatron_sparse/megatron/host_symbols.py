"""The functions and classes of Megatron that the plugin hooks, and whether this Megatron has them.

Also the versions of Megatron that the tests run on. Of the symbols, `attach` needs the first four
(megatron-core 0.16.1 and later); `install` needs all (the training loop ships with megatron-core
0.19 and later).
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from megatron_sparse.errors import HostError

UPGRADE = "pip install 'megatron-core>=0.19,<0.20' (needs Python >= 3.12)"
TESTED = ("0.16.1", "0.19.2")
"""Versions of megatron-core that the tests run on, oldest first; docs/versions.md lists them."""
NEWEST_TESTED = TESTED[-1]


class HostSymbol(NamedTuple):
    """One function or class of Megatron that the plugin hooks.

    Attributes:
        needed_by: `attach` or `install`.
        name: dotted name.
        problem: why it cannot be hooked: it is missing, or lacks parameters that the plugin uses;
            None if it can.
    """

    needed_by: str
    name: str
    problem: str | None


_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_GROUP = "_ParamAndGradBucketGroup"
_TRAINING = "megatron.training.training"
_SYMBOLS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("attach", _BUCKETS, f"{_GROUP}.start_grad_sync", ("self", "force_all_reduce")),
    ("attach", _BUCKETS, f"{_GROUP}.finish_grad_sync", ("self",)),
    ("attach", _BUCKETS, f"{_GROUP}.start_param_sync", ("self", "force_sync")),
    ("attach", _BUCKETS, f"{_GROUP}.finish_param_sync", ("self", "skip_next_bucket_dispatch")),
    ("install", "megatron.training.models.gpt", "GPTModelConfig", ("post_wrap_hooks",)),
    ("install", _TRAINING, "setup_model_and_optimizer", ()),
    ("install", _TRAINING, "get_megatron_optimizer", ()),
    ("install", _TRAINING, "train_step", ("forward_step_func", "model", "optimizer")),
    ("install", _TRAINING, "save_checkpoint", ("iteration",)),
    ("install", _TRAINING, "load_checkpoint", ("load_arg",)),
)
"""The user, module and name of each symbol, and the parameters that the plugin relies on."""


def untested_megatron() -> str | None:
    """Returns a warning if the tests do not run on this version of Megatron; None if they do.

    Imports `megatron.core` for its version: it may be a checkout, without package metadata.
    """
    # Megatron appends "+" and a commit if the current folder is in a git checkout.
    version: str = import_module("megatron.core").__version__.split("+")[0]
    if version in TESTED:
        return None
    return f"{version} is not tested: newest tested is {NEWEST_TESTED}"


def find_host_symbols(needed_by: str = "install") -> list[HostSymbol]:
    """Looks up each symbol that `attach` or `install` needs. Imports megatron."""
    # `install` also needs all that `attach` does.
    users = ("attach", "install") if needed_by == "install" else ("attach",)
    return [
        HostSymbol(user, f"{module}.{attribute}", _problem(module, attribute, parameters))
        for user, module, attribute, parameters in _SYMBOLS
        if user in users
    ]


def _problem(module: str, attribute: str, parameters: Sequence[str]) -> str | None:
    """Returns why a symbol of Megatron cannot be hooked; None if it can.

    An `attribute` with a dot is a method. `parameters` are the names of those that the function, or
    the class's constructor, must have.
    """
    try:
        symbol: Any = import_module(module)
        for part in attribute.split("."):
            symbol = getattr(symbol, part)
    except (ImportError, AttributeError) as error:
        return str(error)
    missing = [name for name in parameters if name not in inspect.signature(symbol).parameters]
    return f"without parameter {', '.join(missing)}" if missing else None


def require_host_symbols(needed_by: str) -> None:
    """Checks that `attach` or `install` can work with this Megatron.

    Raises:
        HostError: names the first symbol that is missing.
    """
    for symbol in find_host_symbols(needed_by):
        if symbol.problem is not None:
            raise HostError(
                f"this Megatron lacks a function that {symbol.needed_by} hooks",
                expected=symbol.name,
                got=symbol.problem,
                remedy=UPGRADE,
            )
