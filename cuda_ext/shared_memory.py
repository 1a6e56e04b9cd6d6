"""The engine that moves messages through memory which the ranks of a node share.

`csrc/shared_engine.h` says how. This module only calls its C functions, through ctypes: they take
addresses, and no call holds the interpreter's lock. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from megatron_sparse.cuda_ext import load, sources
from megatron_sparse.errors import DependencyError

SUM_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""By their codes (`csrc/shared_sum.h`)."""
MOST_ENDED = 64


class Geometry(NamedTuple):
    """The shape of the shared memory; all ranks must have the same.

    Attributes:
        ranks: of the node.
        slots: of each ring; each ordered pair of ranks has two rings.
        slot_bytes: a multiple of 64.
    """

    ranks: int
    slots: int
    slot_bytes: int


class Ended(NamedTuple):
    """The end of an operation.

    Attributes:
        number: of the operation.
        misfit: (peer, bytes of the receive, bytes of the message) where they differ; None if all is
            well.
    """

    number: int
    misfit: tuple[int, int, int] | None


class _Message(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("peer", ctypes.c_int32),
        ("is_receive", ctypes.c_int32),
    )


class _Completion(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("expected", ctypes.c_int64),
        ("got", ctypes.c_int64),
        ("peer", ctypes.c_int64),
    )


class _SumCall(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("scatter", ctypes.c_int32),
        ("divisor", ctypes.c_int32),
    )


_GEOMETRY = (ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_POINTER = ctypes.c_void_p
_SIGNATURES = {
    "ms_shared_bytes": (ctypes.c_int64, _GEOMETRY),
    "ms_shared_open": (
        _POINTER,
        (ctypes.c_int, *_GEOMETRY, ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
    ),
    "ms_shared_exchange": (
        None,
        (_POINTER, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Message), ctypes.c_int),
    ),
    "ms_shared_sum": (None, (_POINTER, ctypes.c_int64, ctypes.POINTER(_SumCall))),
    "ms_shared_gather": (None, (_POINTER, ctypes.c_int64, _POINTER, ctypes.c_int64, _POINTER)),
    "ms_shared_wait": (ctypes.c_int, (_POINTER, ctypes.POINTER(_Completion), ctypes.c_int)),
    "ms_shared_stop": (None, (_POINTER,)),
    "ms_shared_free": (None, (_POINTER,)),
}


@cache
def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise DependencyError(
            "ranks cannot share memory on this system",
            expected="Linux",
            got=sys.platform,
            remedy="set scheme.intra_node=backend",
        )
    load()
    library = ctypes.CDLL(str(sources.library_path("cpu")))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def segment_bytes(geometry: Geometry) -> int:
    """The size of the shared memory.

    Raises:
        DependencyError: not on Linux, or the library must be built and there is no compiler.
        ExtensionError: the library cannot be built or loaded.
    """
    return _library().ms_shared_bytes(*geometry)


class Engine:
    """One rank's engine, with a thread of its own (C++, without the interpreter).

    Peers are places in the node. Buffers are contiguous host memory, given by address; they must
    stay alive and unchanged until `wait` has returned the operation's end, or `stop` has returned.

    Args:
        descriptor: of the shared memory, `segment_bytes` long and zero at first; may be closed
            afterwards.
        geometry: of the memory.
        rank: this one's place in the node.

    Raises:
        OSError: the memory cannot be mapped.
        DependencyError, ExtensionError: see `segment_bytes`.
    """

    def __init__(self, descriptor: int, geometry: Geometry, rank: int) -> None:
        self._calls = _library()
        error = ctypes.c_int()
        self._engine = self._calls.ms_shared_open(descriptor, *geometry, rank, ctypes.byref(error))
        if not self._engine:
            raise OSError(error.value, f"mmap: {os.strerror(error.value)}")
        self._ended = (_Completion * MOST_ENDED)()

    def exchange(
        self,
        number: int,
        tag: int,
        sends: Sequence[tuple[int, int, int]],
        receives: Sequence[tuple[int, int, int]],
    ) -> None:
        """Posts messages of one tag: (peer, address, bytes) each, at least one, none empty."""
        messages = [(address, size, peer, 0) for peer, address, size in sends]
        messages += [(address, size, peer, 1) for peer, address, size in receives]
        posted = (_Message * len(messages))(*messages)
        self._calls.ms_shared_exchange(self._engine, number, tag, posted, len(messages))

    def all_reduce(self, number: int, values: int, numel: int, dtype: int) -> None:
        """Posts an in-place sum over all ranks of `numel` values of `SUM_DTYPES[dtype]`."""
        self._sum(number, _SumCall(values, values, numel, dtype, 0, 0))

    def reduce_scatter(
        self, number: int, shard: int, values: int, numel: int, dtype: int, divisor: int
    ) -> None:
        """Posts a sum of which this rank gets its shard, divided by `divisor` unless that is 0."""
        self._sum(number, _SumCall(values, shard, numel, dtype, 1, divisor))

    def _sum(self, number: int, call: _SumCall) -> None:
        self._calls.ms_shared_sum(self._engine, number, ctypes.byref(call))

    def all_gather(self, number: int, gathered: int, own: int, size: int) -> None:
        """Posts a gather of `size` bytes from each rank, in rank order."""
        self._calls.ms_shared_gather(self._engine, number, own, size, gathered)

    def wait(self) -> list[Ended] | None:
        """The operations that have ended; blocks until there is one. None after `stop`."""
        count = self._calls.ms_shared_wait(self._engine, self._ended, MOST_ENDED)
        if count < 0:
            return None
        return [
            Ended(each.number, None if each.peer < 0 else (each.peer, each.expected, each.got))
            for each in self._ended[:count]
        ]

    def stop(self) -> None:
        """Ends the engine's thread; from then on it touches no buffer. Post nothing afterwards."""
        self._calls.ms_shared_stop(self._engine)

    def free(self) -> None:
        """Unmaps the memory. After `stop`, when `wait` has returned None; the last call."""
        self._calls.ms_shared_free(self._engine)
