"""Arguments of the CUDA launchers: mirrors of their structs, and buffers between guards."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from megatron_sparse.wire import RICE_BITS

GUARD = 64
"""Bytes around every buffer, which no kernel may touch."""


class EncodeArguments(ctypes.Structure):
    """Mirrors the struct of encode_launch.h."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("grad_dtype", ctypes.c_int),
        ("value_dtype", ctypes.c_int),
        ("segment_offsets", ctypes.c_void_p),
        ("segment_kinds", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("step", ctypes.c_uint32),
        ("block_size", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("segment_bytes", ctypes.c_void_p),
        ("nnz", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("most_nnz", ctypes.c_void_p),
    )


class PruneArguments(ctypes.Structure):
    """Mirrors the struct of encode_launch.h."""

    _fields_ = (
        ("residual", ctypes.c_void_p),
        ("range_offsets", ctypes.c_void_p),
        ("thresholds", ctypes.c_void_p),
        ("tie_chances", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
        ("leak", ctypes.c_float),
        ("key", ctypes.c_int64),
        ("residual_dtype", ctypes.c_int),
    )


class RiceArguments(ctypes.Structure):
    """Mirrors the struct of rice_encode_launch.h."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("log2_span", ctypes.c_int),
        ("without_indices", ctypes.c_bool),
        ("residual", ctypes.c_void_p),
        ("residual_dtype", ctypes.c_int),
        ("key", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Rice:
    """The kind of a message of Rice records; the residual is fp32, for `encode`."""

    dtype: int
    log2_span: int = 12
    without_indices: bool = False
    residual: torch.Tensor | None = None

    def arguments(self, residual: int | None, residual_dtype: int, key: int) -> RiceArguments:
        """The launchers' struct; raw values have no use for the residual."""
        pointer = residual if self.dtype in RICE_BITS else None
        return RiceArguments(
            self.dtype, self.log2_span, self.without_indices, pointer, residual_dtype, key
        )


class DecodeArguments(ctypes.Structure):
    """Mirrors the struct of decode_launch.h."""

    _fields_ = (
        ("acc", ctypes.c_void_p),
        ("acc_numel", ctypes.c_int64),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_int64),
        ("segment_offsets", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("base", ctypes.c_int64),
        ("value_dtype", ctypes.c_int),
        ("step", ctypes.c_uint32),
        ("fresh", ctypes.c_bool),
        ("workspace", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
    )


class ThresholdArguments(ctypes.Structure):
    """Mirrors the struct of threshold_launch.h."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("grad_dtype", ctypes.c_int),
        ("residual", ctypes.c_void_p),
        ("residual_dtype", ctypes.c_int),
        ("numel", ctypes.c_int64),
        ("range_offsets", ctypes.c_void_p),
        ("densities", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("thresholds", ctypes.c_void_p),
        ("tie_chances", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class Buffer:
    """Bytes at a chosen misalignment, between two guards; the content starts as 0xcd."""

    def __init__(self, nbytes: int, content: torch.Tensor | None = None, shift: int = 0) -> None:
        self._memory = torch.full((nbytes + 2 * GUARD + 256 + shift,), 0xA5, dtype=torch.uint8)
        first = -(self._memory.data_ptr() + GUARD) % 256 + GUARD + shift
        self._range = (first, first + nbytes)
        self.data = self._memory[first : first + nbytes]
        self.data.fill_(0xCD)
        if content is not None and nbytes:
            self.data.copy_(content.contiguous().view(torch.uint8))

    @classmethod
    def of(cls, content: torch.Tensor, shift_elements: int = 0) -> Buffer:
        """A copy of a tensor."""
        size = content.element_size()
        return cls(content.numel() * size, content, shift_elements * size)

    @property
    def pointer(self) -> int:
        """The address of the first byte."""
        return self._memory.data_ptr() + self._range[0]

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the content."""
        return self.data.clone().view(dtype)

    def guards(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes before and after."""
        return self._memory[: self._range[0]], self._memory[self._range[1] :]
