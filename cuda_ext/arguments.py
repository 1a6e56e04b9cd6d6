"""How the typed Python ops check their arguments and call the native torch ops.

A refusal is an op's error about its arguments: in C++ a `RuntimeError` whose first line is
"what | expected | got", in Python an `ExtensionError`, which names `op` and the argument `name`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megatron_sparse.cuda_ext import load
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.errors import ExtensionError
from megatron_sparse.wire import RICE_BITS

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
_isa = ""  # the chosen instruction set; the best one without a name


def call(name: str, *arguments: Any) -> Any:
    """Calls the native op `name`; its refusal becomes an `ExtensionError`.

    The op runs on the device of its first argument, a tensor or a list of tensors: for CUDA, the
    CUDA library is loaded first.
    """
    first = arguments[0] if arguments else None
    if isinstance(first, list):
        first = first[0]
    if getattr(first, "is_cuda", False):
        load("cuda")
    return refusing(overload(name), *arguments)


def refusing(op: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `op(*arguments)` and turns its refusal into an `ExtensionError`.

    A `RuntimeError` that is no refusal is raised unchanged.
    """
    try:
        return op(*arguments)
    except RuntimeError as error:
        parts = str(error).split("\n", 1)[0].split(" | ")
        if len(parts) != 3:
            raise
        raise ExtensionError(parts[0], expected=parts[1], got=parts[2]) from error


def overload(name: str) -> Callable[..., Any]:
    """The native op `name`; if MEGATRON_SPARSE_ISA changed, first selects its instruction set."""
    global _isa
    wanted = os.environ.get("MEGATRON_SPARSE_ISA", "")
    if wanted != _isa:
        refusing(_native_op("choose_isa"), wanted)
        _isa = wanted
    return _native_op(name)


@cache
def _native_op(name: str) -> Callable[..., Any]:
    """The native op `name`, cached: torch's look-up costs as much as calling a small op."""
    load()
    return getattr(torch.ops.megatron_sparse, name).default


def refusal(op: str, what: str, expected: object, got: object) -> ExtensionError:
    """The error for an argument that an op refuses."""
    return ExtensionError(f"{op}: {what}", expected=expected, got=got)


def check_flat(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    numel: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuses all but a contiguous 1-D tensor of `dtypes` (if given, of `numel`, on `device`)."""
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise refusal(op, f"{name} has the wrong dtype", names, tensor.dtype)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise refusal(op, f"{name} has the wrong shape", "a contiguous 1-D tensor", got)
    if numel is not None and tensor.numel() != numel:
        raise refusal(op, f"{name} has the wrong length", numel, tensor.numel())
    if device is not None and tensor.device != device:
        raise refusal(op, f"{name} is on the wrong device", device, tensor.device)


def check_device(op: str, name: str, tensor: torch.Tensor) -> str:
    """The type of the tensor's device: `cpu` or `cuda`; others are refused."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise refusal(op, f"{name} is on the wrong device", "cpu or cuda", tensor.device)
    return tensor.device.type


def check_offsets(
    op: str, name: str, offsets: torch.Tensor, numel: int, *, whole: bool = True
) -> None:
    """Refuses a table that is not int64 offsets on the CPU, ascending from 0 to `numel`.

    Without `whole` they may begin later and end earlier.
    """
    check_flat(op, name, offsets, (torch.int64,), device=CPU)
    # This runs in every step; for so few numbers numpy takes a tenth of torch's time.
    table = offsets.numpy()
    lies_in = table.size > 0 and table[0] >= 0 and table[-1] <= numel
    is_short = whole and lies_in and table[-1] - table[0] < numel
    if not lies_in or is_short or (table[1:] < table[:-1]).any():
        expected = f"ascending offsets from 0 to {numel}"
        raise refusal(op, f"{name} does not cut the bucket", expected, offsets.tolist()[:8])


def check_limits(op: str, pruning: Pruning, device: torch.device) -> None:
    """Refuses `pruning` unless it has one fp32 threshold (and tie chance, if given) per range."""
    fp32, ranges = (torch.float32,), pruning.range_offsets.numel() - 1
    check_flat(op, "thresholds", pruning.thresholds_R, fp32, ranges, device)
    if pruning.tie_chances_R is not None:
        check_flat(op, "tie_chances", pruning.tie_chances_R, fp32, ranges, device)


def check_code(op: str, name: str, code: int) -> None:
    """Refuses anything but a dtype code of the wire."""
    if code not in (0, 1, 2):
        raise refusal(op, f"{name} is unknown", "0 (fp32), 1 (bf16) or 2 (fp16)", code)


def check_message_dtype(op: str, code: int) -> None:
    """Refuses anything but the dtype code of a message's values, of which Rice has more."""
    if not 0 <= code <= max(RICE_BITS):
        expected = "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)"
        raise refusal(op, "value_dtype is unknown", expected, code)
