"""The CUDA ops, compiled for the CPU: bindings, launchers and kernels, called as torch's ops.

A tensor of the emulated GPU is an `OnDevice` (`device.py`). Every op gets copies of such tensors,
which lie between guards at the same misalignment; what it changes is copied back.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from megatron_sparse.cuda_ext import arguments, codec_cuda, load
from megatron_sparse.triton_kernels import prune as triton_prune
from tests.cuda_emulator import ledger
from tests.cuda_emulator.device import OnDevice, to_gpu, unwrapped

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COO, BLOCKS = 1, 3
IN_ORDER, REVERSED, RANDOM = range(3)
SCHEDULES = ((IN_ORDER, 0, 4), (REVERSED, 0, 4), (RANDOM, 1, 3), (RANDOM, 2, 8))
"""Order, seed, and blocks that are resident at once."""
GUARD = 64
"""Bytes around every tensor, which no kernel may touch."""
_ALIGNED = 256
_HOST_TENSORS = {"nccl_sparse_sum": 4}
"""Tensors that an op wants on the host: communicator, shards, the sums' steps, events."""


class Guarded:
    """A copy of a tensor between guards, at the tensor's own misalignment."""

    def __init__(self, original: torch.Tensor) -> None:
        self._original, nbytes = original, original.nbytes
        self._memory = torch.full((nbytes + 2 * GUARD + 2 * _ALIGNED,), 0xA5, dtype=torch.uint8)
        shift = original.data_ptr() % _ALIGNED
        first = -(self._memory.data_ptr() + GUARD) % _ALIGNED + GUARD + shift
        content = self._memory[first : first + nbytes]
        self.guards = (self._memory[:first], self._memory[first + nbytes :])
        self.copy = content.view(original.dtype).view(original.shape).copy_(original)

    def finish(self, name: str, changes: bool) -> None:
        """Copies back what the op has changed, which is nothing if it does not change this one."""
        assert all(bool((guard == 0xA5).all()) for guard in self.guards), f"{name} wrote outside"
        if changes:
            self._original.copy_(self.copy)
        else:
            same = torch.equal(_bytes(self.copy), _bytes(self._original))
            assert same, f"{name} changed what it may only read"


class Emulator:
    """The ops of one library; the test chooses the schedule of their threads and blocks."""

    def __init__(self, library: Path) -> None:
        load()  # the CPU's part, which defines most schemas
        self.library, self._ops = ctypes.CDLL(str(library)), getattr(torch.ops, library.stem)
        self._schemas = torch.library.Library(library.stem, "FRAGMENT")
        for schema in torch._C._jit_get_all_schemas():
            space, _, name = schema.name.partition("::")
            if space == "megatron_sparse" and not hasattr(self._ops, name):
                self._schemas.define(str(schema).removeprefix("megatron_sparse::"))
        for name in ("encode", "rice_encode"):
            getattr(self.library, f"workspace_of_{name}").restype = ctypes.c_int64

    def schedule(
        self, order: int, seed: int = 0, resident_blocks: int = 4, multiprocessors: int = 1
    ) -> None:
        """Chooses how threads and blocks take turns from now on."""
        self.library.emulator_schedule(
            order, ctypes.c_uint64(seed), resident_blocks, multiprocessors
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """Runs an op. Its refusals are those of the binding, and so is its result."""
        op = getattr(self._ops, name).default
        tensors = [v for v in tree_flatten(arguments)[0] if isinstance(v, torch.Tensor)]
        strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
        assert len(strangers) == _HOST_TENSORS.get(name, 0), f"{name}: two devices"
        buffers: list[tuple[Guarded, bool]] = []

        def guarded(value: Any, changes: bool) -> Any:
            if not isinstance(value, OnDevice):
                return value
            if not value.inner.is_contiguous():
                return value.inner  # which a binding refuses
            buffers.append((Guarded(value.inner), changes))
            return buffers[-1][0].copy

        given = []
        for argument, schema in zip(arguments, op._schema.arguments, strict=False):
            changes = schema.alias_info is not None and schema.alias_info.is_write
            given.append(tree_map(lambda value, c=changes: guarded(value, c), argument))
        guards = [guard for buffer, _ in buffers for guard in buffer.guards]
        for guard in guards:
            self._poison(guard, 1)
        try:
            result = self._counted(op, given, [buffer.copy for buffer, _ in buffers])
        finally:
            for guard in guards:
                self._poison(guard, 0)
            whole = self.library.emulator_end_call()
        assert whole, f"{name} wrote outside of what its binding has allocated"
        for buffer, changes in buffers:
            buffer.finish(name, changes)
        return tree_map(lambda v: OnDevice(v) if isinstance(v, torch.Tensor) else v, result)

    def _counted(
        self, op: Callable[..., Any], given: list[Any], buffers: list[torch.Tensor]
    ) -> Any:
        """Runs an op and enters its work into this thread's ledger, if it has one."""
        counted = ledger.current()
        if counted is None:
            return op(*given)
        watches = hasattr(self.library, "emulator_watch")
        for buffer in buffers if watches else ():
            self.library.emulator_watch(
                ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes)
            )
        self.library.emulator_count(1)
        result = op(*given)
        numbers = (ctypes.c_int64 * 5)()
        self.library.emulator_counted(numbers)
        self.library.emulator_count(0)
        if watches:
            self.library.emulator_unwatch()
        counted.add_launcher(*numbers)
        return result

    def _poison(self, guard: torch.Tensor, on: int) -> None:
        self.library.emulator_poison(
            ctypes.c_void_p(guard.data_ptr()), ctypes.c_size_t(guard.numel()), on
        )


class EmulatedDevice:
    """The package with the emulator in the place of a GPU, under `device.EmulatedGpu`."""

    place = staticmethod(to_gpu)

    def __init__(self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._emulator, self._native = emulator, arguments.overload
        monkeypatch.setattr(arguments, "overload", self.overload)
        monkeypatch.setattr(arguments, "load", lambda part="cpu": None)
        # Triton's kernels have tests of their own; here the CPU's `prune_` makes the numbers.
        monkeypatch.setattr(triton_prune, "prune_", self._prune)
        monkeypatch.setattr(codec_cuda, "_stream", lambda device: -1)

    def overload(self, name: str) -> Callable[..., Any]:
        """As `cuda_ext.arguments.overload`: an op for tensors of either device."""

        def op(*given: Any) -> Any:
            if any(isinstance(value, OnDevice) for value in tree_flatten(given)[0]):
                return self._emulator.call(name, *given)
            return self._native(name)(*given)

        return op

    def _prune(self, *given: Any) -> OnDevice:
        grad, residual, ranges, limits, leak, wire_dtype, key = tree_map(unwrapped, given)
        return OnDevice(
            self._native("prune_")(
                grad, residual, ranges, limits[0], leak, wire_dtype, key, limits[1]
            )
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
