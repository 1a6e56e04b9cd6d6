"""NCCL's C functions through ctypes, from the same library that torch has loaded.

This module makes communicators, asks them for errors and ends them. The exchanges of buckets are
posted by C++ (`cuda_ext.nccl_ops`), which gets the functions' addresses from here. Functions and
numbers are those of nccl.h since NCCL 2.7.
"""

import ctypes
import os
from functools import cache

from megatron_sparse.errors import CommunicationError, DependencyError

SONAME = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
POSTING = ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv")
"""The functions that C++ calls, in the order of `addresses`."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


_SIGNATURES = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclCommDestroy": (ctypes.c_void_p,),
}


class NcclLibrary:
    """The functions of libnccl, opened. Every call may block; it releases the interpreter's lock.

    Raises:
        DependencyError: a function is missing.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        try:
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            library.ncclGetErrorString.argtypes = (ctypes.c_int,)
            library.ncclGetErrorString.restype = ctypes.c_char_p
            self.addresses = tuple(
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in POSTING
            )
        except AttributeError as error:
            raise _missing(error) from error

    def unique_id(self) -> bytes:
        """Makes a communicator's identifier. One rank calls this and sends it to the others."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def make(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Makes a communicator on this thread's device once all ranks do; returns its address."""
        made = ctypes.c_void_p()
        identifier = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(made), world_size, identifier, rank)
        return made.value or 0

    def trouble(self, communicator: int) -> str | None:
        """NCCL's asynchronous error, in words; None for none. Does not block."""
        found = ctypes.c_int()
        self._call("ncclCommGetAsyncError", communicator, ctypes.byref(found))
        return None if found.value in (SUCCESS, IN_PROGRESS) else self.words(found.value)

    def abort(self, communicator: int) -> None:
        """Ends the communicator and its pending operations; kernels that wait for a peer end."""
        self._call("ncclCommAbort", communicator)

    def destroy(self, communicator: int) -> None:
        """Ends the communicator after all its operations are done."""
        self._call("ncclCommDestroy", communicator)

    def words(self, result: int) -> str:
        """NCCL's text for a result."""
        return f"{self._library.ncclGetErrorString(result).decode()} (ncclResult_t {result})"

    def _call(self, name: str, *arguments: object) -> None:
        """Calls a function of NCCL; raises CommunicationError unless it returns ncclSuccess."""
        result = getattr(self._library, name)(*arguments)
        if result != SUCCESS:
            raise CommunicationError(
                f"{name} failed",
                expected="ncclSuccess",
                got=self.words(result),
                remedy="set NCCL_DEBUG=WARN; NCCL then logs the reason",
            )


@cache
def loaded_nccl() -> NcclLibrary:
    """Opens the NCCL that torch has loaded: the process must not load a second one.

    Raises:
        DependencyError: this torch has no NCCL as a shared library.
    """
    import torch  # noqa: F401 - loads NCCL

    try:
        return NcclLibrary(ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except OSError as error:
        raise _missing(error) from error


def _missing(error: Exception) -> DependencyError:
    """The error for a torch whose NCCL cannot be called from here."""
    return DependencyError(
        "NCCL's functions cannot be called",
        expected=f"{SONAME}, loaded by torch, with ncclSend (2.7 or newer)",
        got=error,
        remedy="install a torch for CUDA, or leave scheme.nccl_engine out",
    )
