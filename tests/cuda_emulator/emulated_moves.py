"""The CUDA ops of records of moves, run in the emulator.

Each method takes and returns what the op of its name does, tensors of CPU memory all of them, and
does the same as the op's binding: buffers and launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from tests.cuda_emulator.arguments import Buffer
from tests.cuda_emulator.emulated import DTYPE_CODES, Codecs

HEADER_BYTES = 48


class MovesEncodeArguments(ctypes.Structure):
    """Mirrors the struct of moves_launch.h."""

    _fields_ = (
        ("old", ctypes.c_void_p),
        ("now", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("coder", ctypes.c_int),
        ("step", ctypes.c_uint32),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class MovesDecodeArguments(ctypes.Structure):
    """Mirrors the struct of moves_launch.h."""

    _fields_ = (
        ("held", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("coder", ctypes.c_int),
        ("body", ctypes.c_void_p),
        ("body_bytes", ctypes.c_int64),
        ("status", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class MovesOps:
    """The launchers of `csrc/moves_launch.h`, called as ops."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        for name in ("moves_encode", "moves_decode"):
            getattr(codecs.library, name).restype = ctypes.c_char_p
            workspace = getattr(codecs.library, f"workspace_of_{name}")
            workspace.restype = ctypes.c_int64
            workspace.argtypes = (ctypes.c_int64, ctypes.c_int, ctypes.c_int)

    def ops(self) -> dict[str, Callable[..., torch.Tensor]]:
        """The ops by the name they are registered under."""
        return {"moves_encode": self.encode, "moves_decode_": self.decode_}

    def encode(
        self, old: torch.Tensor, new: torch.Tensor, coder: int, step: int, out: torch.Tensor
    ) -> torch.Tensor:
        dtype, numel = DTYPE_CODES[new.dtype], new.numel()
        inputs = [Buffer.of(each, _shift(each)) for each in (old, new)]
        target, size = Buffer(out.numel()), Buffer(8)
        workspace = self._workspace("encode", numel, dtype, coder)
        call = MovesEncodeArguments(
            inputs[0].pointer,
            inputs[1].pointer,
            numel,
            dtype,
            coder,
            step,
            target.pointer,
            size.pointer,
            workspace.pointer,
        )
        buffers = [*inputs, target, size, workspace]
        self._codecs.run("moves_encode", buffers, ctypes.byref(call))
        out.copy_(target.data)
        return size.read(torch.int64)

    def decode_(self, held: torch.Tensor, record: torch.Tensor, coder: int) -> torch.Tensor:
        assert record.data_ptr() % 16 == 0, "the binding refuses such a record"
        dtype, numel = DTYPE_CODES[held.dtype], held.numel()
        target, source, status = Buffer.of(held, _shift(held)), Buffer.of(record), Buffer(16)
        workspace = self._workspace("decode", numel, dtype, coder)
        call = MovesDecodeArguments(
            target.pointer,
            numel,
            dtype,
            coder,
            source.pointer + HEADER_BYTES,
            record.numel() - HEADER_BYTES,
            status.pointer,
            workspace.pointer,
        )
        buffers = [target, source, status, workspace]
        self._codecs.run("moves_decode", buffers, ctypes.byref(call))
        assert torch.equal(source.data, record), "the record was changed"
        held.copy_(target.read(held.dtype))
        return status.read(torch.int64)

    def _workspace(self, what: str, numel: int, dtype: int, coder: int) -> Buffer:
        return Buffer(
            getattr(self._codecs.library, f"workspace_of_moves_{what}")(numel, dtype, coder)
        )


def _shift(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % 16 // tensor.element_size()
