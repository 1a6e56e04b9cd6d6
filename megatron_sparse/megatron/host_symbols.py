"""The doors by which the plugin enters Megatron, and whether this Megatron has them.

`attach` needs the first two (megatron-core 0.16.1 and later); `install` needs all (the training
loop ships with megatron-core 0.19 and later).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from megatron_sparse.errors import HostError

UPGRADE = "pip install 'megatron-core>=0.19,<0.20' (needs Python >= 3.12)"


@dataclass(frozen=True)
class Door:
    """One symbol of Megatron that the plugin relies on.

    Attributes:
        name: dotted name.
        found: whether it is there and looks as expected.
        detail: what was found.
        remedy: what to do where it was not.
        needed_by: `attach` or `install`.
    """

    name: str
    found: bool
    detail: str
    remedy: str
    needed_by: str


def _has_parameters(*names: str) -> Callable[[object], str | None]:
    def check(symbol: object) -> str | None:
        found = inspect.signature(symbol).parameters  # type: ignore[arg-type]
        missing = [name for name in names if name not in found]
        return f"without parameter {', '.join(missing)}" if missing else None

    return check


def _has_field(name: str) -> Callable[[object], str | None]:
    def check(symbol: object) -> str | None:
        return None if name in getattr(symbol, "__dataclass_fields__", {}) else f"without {name}"

    return check


def _any(symbol: object) -> str | None:
    return None


_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_TRAINING = "megatron.training.training"
_DOORS: tuple[tuple[str, str, str, Callable[[object], str | None]], ...] = (
    (
        "attach",
        _BUCKETS,
        "_ParamAndGradBucketGroup.start_grad_sync",
        _has_parameters("self", "force_all_reduce"),
    ),
    ("attach", _BUCKETS, "_ParamAndGradBucketGroup.finish_grad_sync", _has_parameters("self")),
    ("install", "megatron.training.models.gpt", "GPTModelConfig", _has_field("post_wrap_hooks")),
    ("install", _TRAINING, "get_megatron_optimizer", _any),
    ("install", _TRAINING, "train_step", _has_parameters("model", "optimizer")),
    ("install", _TRAINING, "save_checkpoint", _has_parameters("iteration")),
    ("install", _TRAINING, "load_checkpoint", _has_parameters("load_arg")),
)


def find_doors(needed_by: str | None = None) -> list[Door]:
    """Looks for every door, or for those that `attach` or `install` needs. Imports megatron."""
    return [
        _find(who, module, attribute, check)
        for who, module, attribute, check in _DOORS
        if needed_by in (None, who) or (needed_by == "install" and who == "attach")
    ]


def _find(who: str, module: str, attribute: str, check: Callable[[object], str | None]) -> Door:
    name = f"{module}.{attribute}"
    try:
        symbol: object = import_module(module)
        for part in attribute.split("."):
            symbol = getattr(symbol, part)
    except (ImportError, AttributeError) as error:
        return Door(name, False, str(error), UPGRADE, who)
    complaint = check(symbol)
    return Door(name, complaint is None, complaint or "found", UPGRADE, who)


def require_doors(needed_by: str) -> None:
    """Checks that `attach` or `install` can work with this Megatron.

    Raises:
        HostError: names the first door that is missing.
    """
    for door in find_doors(needed_by):
        if not door.found:
            raise HostError(
                f"this Megatron lacks the door that {door.needed_by} enters by",
                expected=door.name,
                got=door.detail,
                remedy=door.remedy,
            )
