"""An emulated GPU: tensors that claim to be on it, and ops that run in the emulator.

An `OnDevice` tensor has the device `cuda:0`; its numbers lie in CPU memory. Under `EmulatedGpu`
torch's own operations work on those, and refuse what a GPU refuses: tensors of two devices in one
operation. Functions that make tensors make them on the given `device=`. What the package calls
through `cuda_ext.arguments.call` with a tensor of the GPU runs in the emulator (`emulator.py`). So
everything is the code that a GPU runs, devices included; only streams and time are missing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from tests.cuda_emulator import ledger

GPU = torch.device("cuda:0")
_CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_NUMBER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_aten = torch.ops.aten
_SIZE_ON_DEVICE = {
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten.bincount,
    _aten.is_nonzero,
    _aten.item,
}
"""Operations whose result, or its size, the host must know."""
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_}
_mode = threading.local()

type Place = Callable[..., torch.Tensor]
"""Puts a tensor on a GPU, or an emulated one, some elements behind an aligned address."""


type NotWaiting = Callable[[], AbstractContextManager[None]]
"""Makes contexts in which it is an error if the host waits for the device."""


class OnDevice(torch.Tensor):
    """A tensor of the emulated GPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def record_stream(self, stream: Stream) -> None: ...

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _waits("tolist")
        return self.inner.tolist()

    def __repr__(self) -> str:  # torch's own asks the device for more than there is
        return f"OnDevice({self.inner})"


class EmulatedGpu(TorchDispatchMode):
    """While it is entered, `device="cuda"` makes tensors of the emulated GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def sync_debug_error() -> Iterator[None]:
    """As after `torch.cuda.set_sync_debug_mode("error")`: it is an error if this thread waits.

    Detects the same as torch: copies between host and device that are not `non_blocking`, and
    operations of which the host needs a number. Detects also copies in which CUDA may wait because
    the host's memory is not pinned.
    """
    _mode.waiting_is_an_error = True
    try:
        yield
    finally:
        _mode.waiting_is_an_error = False


@contextmanager
def torch_sync_debug_error() -> Iterator[None]:
    """The same on a real GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def to_gpu(tensor: torch.Tensor, shift: int = 0) -> OnDevice:
    """A copy on the emulated GPU, `shift` elements behind an address that 256 divides."""
    memory = torch.empty((tensor.numel() + shift) * tensor.element_size() + 256, dtype=torch.uint8)
    first = -memory.data_ptr() % 256 + shift * tensor.element_size()
    flat = memory[first : first + tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return OnDevice(flat.copy_(tensor.reshape(-1)).view(tensor.shape))


def unwrapped(value: Any) -> Any:
    """The CPU tensor of a tensor of the GPU; anything else as it is."""
    return value.inner if isinstance(value, OnDevice) else value


class Event:
    """A CUDA event; the emulated GPU completes every operation at once."""

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        del blocking, enable_timing
        self._recorded_ns = ctypes.c_int64()

    @property
    def cuda_event(self) -> int:
        """The address for C++; `cudaEventRecord` writes the time there."""
        return ctypes.addressof(self._recorded_ns)

    def record(self) -> None:
        self._recorded_ns.value = time.monotonic_ns()

    def elapsed_time(self, end: Event) -> float:
        return (end._recorded_ns.value - self._recorded_ns.value) / 1e6

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """A CUDA stream, on which every operation ends at once."""

    def __init__(self, device: torch.device | None = None) -> None:
        del device

    def wait_event(self, event: Event) -> None: ...


_STREAM = Stream()


def pretend_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch name a GPU on a machine without one, and wait for it."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _STREAM)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def _waiting_is_an_error() -> bool:
    return getattr(_mode, "waiting_is_an_error", False)


def _waits(what: str) -> None:
    if _waiting_is_an_error():
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def _check_waiting(func, args, kwargs) -> None:
    """Whether an operation on these arguments makes the host wait for the device."""
    packet = func.overloadpacket
    if func is _aten.copy_.default:
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        _check_copy(source, isinstance(target, OnDevice), target, non_blocking)
    elif func is _aten._to_copy.default and kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == "cuda"
        _check_copy(args[0], to_device, None, kwargs.get("non_blocking", False))
    elif not any(isinstance(v, OnDevice) for v in tree_flatten((args, kwargs))[0]):
        return
    elif func in _NUMBER or packet in _SIZE_ON_DEVICE:
        _waits(str(func))
    elif packet is _aten.repeat_interleave and kwargs.get("output_size") is None:
        _waits("repeat_interleave without output_size")
    elif packet in (_aten.index, _aten.index_put_) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        _waits("indexing with a mask")


def _check_copy(
    source: torch.Tensor, to_device: bool, target: torch.Tensor | None, non_blocking: bool
) -> None:
    """A copy of `source`; `target` is None if it is new and therefore not pinned."""
    if isinstance(source, OnDevice) == to_device:
        return
    if not non_blocking:
        _waits("a copy between host and device")
    if not _is_pinned(source if to_device else target):
        _waits("a copy from or to memory that is not pinned")


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.pinned_in_emulation = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: torch.Tensor | None) -> bool:
    return getattr(tensor, "pinned_in_emulation", False)


def _count(func, args, kwargs, result, here: bool) -> None:
    """Enters an operation into this thread's ledger, if it has one."""
    counted = ledger.current()
    if counted is None:
        return
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    read: list[torch.Tensor] = []
    for argument in func._schema.arguments:
        # What is only written is not read: `copy_`, `fill_`, `zero_` and `out=`.
        is_target = argument.alias_info is not None and argument.alias_info.is_write
        if is_target and (argument.name == "out" or func.overloadpacket in _OVERWRITES):
            continue
        values = tree_flatten(given.get(argument.name))[0]
        read += [value.inner for value in values if isinstance(value, OnDevice)]
    results = tree_flatten(result)[0]
    counted.add_torch_op(func, read, [v for v in results if here and isinstance(v, torch.Tensor)])


def _run(func, args, kwargs):
    if _waiting_is_an_error():
        _check_waiting(func, args, kwargs)
    if func.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
        return _pinned(args[0].clone())
    if func.overloadpacket is _aten.is_pinned:
        return _is_pinned(args[0])
    tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
    held = [v for v in tensors if isinstance(v, OnDevice)]
    here = bool(held)
    pins = bool(kwargs.get("pin_memory"))
    if pins:
        kwargs = kwargs | {"pin_memory": False}  # there is no driver to ask
    wanted = kwargs.get("device")
    if wanted is not None:
        here = torch.device(wanted).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif held and func not in _CROSSING:
        strangers = [v for v in tensors if not isinstance(v, OnDevice) and v.dim()]
        if strangers:
            raise RuntimeError(f"{func}: expected all tensors on the same device")
    if func is torch.ops.aten.copy_.default:
        here = isinstance(args[0], OnDevice)
    plain_args, plain_kwargs = tree_map(unwrapped, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if held or here:
        _count(func, args, kwargs, result, here)
    if pins:
        return _pinned(result)
    if not here or func in _NUMBER:
        return result
    # An operation in place returns its argument.
    own = {id(v.inner): v for v in held}
    return tree_map_only(
        torch.Tensor, lambda v: own[id(v)] if id(v) in own else OnDevice(v), result
    )
