"""A line of `bench codecs` and of `bench prune`: an operation beside a copy and beside a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_sparse.bench.codecs.cases import DTYPES, Task
from megatron_sparse.bench.table import TableRow


@dataclass
class OperationRow(TableRow):
    """One line of the table and one JSON object; times are medians in microseconds.

    Attributes:
        op: the operation.
        format: of the record; `-` if the operation makes none.
        dtype: of the gradient and of the values on the wire.
        density: fraction that is sent.
        count: elements.
        bytes_moved: read and written.
        time_us: of the operation; null if its result is wrong.
        copy_us: of a copy that reads and writes as much.
        peer: name of another implementation.
        peer_us: the peer's time.
        device: `cpu` or `cuda`.
        wrong: elements or bytes that differ from the oracle's.
    """

    op: str
    format: str
    dtype: str
    density: float
    count: int
    bytes_moved: int
    time_us: float | None
    copy_us: float | None
    peer: str | None
    peer_us: float | None
    device: str
    wrong: int

    @classmethod
    def of(cls, task: Task, size: int, density: float, dtype: str, device: str = "cpu") -> Self:
        """The row of a task that is not timed yet."""
        return cls(
            op=task.op,
            format=task.format,
            dtype=dtype,
            density=density,
            count=size // DTYPES[dtype].itemsize,
            bytes_moved=task.bytes_moved,
            time_us=None,
            copy_us=None,
            peer=None,
            peer_us=None,
            device=device,
            wrong=task.wrong,
        )

    @property
    def size(self) -> int:
        """Bytes of the gradient."""
        return self.count * DTYPES[self.dtype].itemsize
