"""Counts the work that a thread gives to the emulated GPU: launches, and bytes of device memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_here = threading.local()
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach")


@dataclass
class Ledger:
    """What was counted of the package's launchers and kernels, and of torch's operations.

    Each of `torch_ops` is at least one launch; copies from and to the host are among them, views
    and allocations are not. Bytes are those of device memory: kernels' in sectors of 32 bytes
    (`traffic.cpp`), and all arguments of torch's operations.
    """

    kernels: int = 0
    memsets: int = 0
    torch_ops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    blocks: int = 0

    @property
    def launches(self) -> int:
        """Everything that is queued, NCCL's own kernels apart."""
        return self.kernels + self.memsets + self.torch_ops

    def add_launcher(
        self, kernels: int, memsets: int, bytes_read: int, bytes_written: int, blocks: int
    ) -> None:
        """Adds what a launcher has queued."""
        self.kernels += kernels
        self.memsets += memsets
        self.bytes_read += bytes_read
        self.bytes_written += bytes_written
        self.blocks += blocks

    def add_torch_op(
        self, func: Any, read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Adds an operation, unless it touches no memory."""
        schema = func._schema
        is_view = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in schema.returns
        )
        if is_view or schema.name.removeprefix("aten::") in _ALLOCATES:
            return
        self.torch_ops += 1
        self.bytes_read += sum(tensor.nbytes for tensor in read)
        self.bytes_written += sum(tensor.nbytes for tensor in written)


def current() -> Ledger | None:
    """The ledger of this thread, if its work is counted."""
    return getattr(_here, "ledger", None)


@contextmanager
def counting(ledger: Ledger | None) -> Iterator[None]:
    """Counts this thread's work in the ledger; with None, counts nothing."""
    before, _here.ledger = current(), ledger
    try:
        yield
    finally:
        _here.ledger = before
