"""The wire record of a row-sparse gradient; docs/wire-format.md is the specification.

A gradient [R, D] is cut into p parts; a part holds the rows i with i mod p = part. Frequent tokens
have low numbers, so blocks of adjacent rows would leave most of the work to the first rank.

K rows of D values of b bytes take 48 + 32 bytes of headers, 4 K bytes of indices (8 K where R is
above 2^31) and K D b bytes of values, each section padded to 16.
"""

import struct
from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext.checksum_ops import seal_
from megatron_sparse.formats.header import Header, check_fields, read_head
from megatron_sparse.formats.message import VALUE_DTYPES, WIRE_CODES
from megatron_sparse.formats.row_sparse import RowSparse
from megatron_sparse.wire import FORMAT_ROW_SPARSE, HEADER_BYTES, pad16, wrong_field

_SUB_HEADER = struct.Struct("<QQQII")
"""Rows and columns of the whole gradient, rows in the record, part, parts."""
SECTIONS_AT = HEADER_BYTES + _SUB_HEADER.size
MAX_NARROW_ROWS = 2**31
"""Up to this many rows an index takes 4 bytes."""


@dataclass(frozen=True)
class RowPart:
    """The properties that all records of one part of one gradient share.

    Attributes:
        num_rows: R, of the whole gradient.
        columns: D.
        value_dtype: fp32, bf16 or fp16.
        part: the rows i with i mod parts = part.
        parts: 1 for the whole gradient.
        step: the step.
        checksum: records are sealed.

    Example:
        >>> part = RowPart(num_rows=5, columns=1, value_dtype="fp32", part=1, parts=2, step=0)
        >>> part.rows, part.record_bytes(2)  # rows 1 and 3
        (2, 112)
    """

    num_rows: int
    columns: int
    value_dtype: str
    part: int
    parts: int
    step: int
    checksum: bool = False

    @property
    def rows(self) -> int:
        """Rows that belong to the part."""
        return len(range(self.part, self.num_rows, self.parts))

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.int32 if self.num_rows <= MAX_NARROW_ROWS else torch.int64

    def record_bytes(self, stored_rows: int) -> int:
        """Bytes of a record with this many rows."""
        values = self._value_bytes(stored_rows)
        return SECTIONS_AT + pad16(stored_rows * self._index_dtype.itemsize) + pad16(values)

    def _value_bytes(self, stored_rows: int) -> int:
        return stored_rows * self.columns * VALUE_DTYPES[self.value_dtype].itemsize

    def positions(self, gradient: RowSparse) -> torch.Tensor:
        """Where the rows of this part stand among the gradient's, int64 ascending."""
        return (gradient.indices_K % self.parts == self.part).nonzero().squeeze(1)

    def encode(self, gradient: RowSparse, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the record of some rows of a gradient.

        Args:
            gradient: [num_rows, columns] with values of `value_dtype`; only read.
            positions: which of its K stored rows to write, as the method `positions` selects them.
            out: uint8, `record_bytes(positions.numel())` long. Mutated.
        """
        stored = positions.numel()
        header = Header(
            FORMAT_ROW_SPARSE,
            WIRE_CODES[self.value_dtype],
            numel=self.num_rows * self.columns,
            nnz=stored * self.columns,
            payload_bytes=out.numel() - HEADER_BYTES,
            offset=0,
            step=self.step,
        )
        sub_header = _SUB_HEADER.pack(self.num_rows, self.columns, stored, self.part, self.parts)
        head = bytearray(header.pack() + sub_header)
        out[:SECTIONS_AT].copy_(torch.frombuffer(head, dtype=torch.uint8))
        index_bytes, value_bytes = stored * self._index_dtype.itemsize, self._value_bytes(stored)
        values_at = SECTIONS_AT + pad16(index_bytes)
        # Clear the padding of both sections, indices and values.
        out[SECTIONS_AT + index_bytes : values_at].zero_()
        out[values_at + value_bytes :].zero_()
        indices = out[SECTIONS_AT : SECTIONS_AT + index_bytes].view(self._index_dtype)
        indices.copy_(gradient.indices_K[positions])
        rows = out[values_at : values_at + value_bytes].view(gradient.rows_KD.dtype)
        if rows.numel():  # else there is nothing to copy
            rows = rows.view(stored, self.columns)
            torch.index_select(gradient.rows_KD, 0, positions, out=rows)
        if self.checksum:
            seal_(out, records=1)

    def decode(self, record: torch.Tensor, rank: int) -> RowSparse:
        """Checks a record and returns its rows, which share its memory; the indices are copied.

        On CUDA the CPU waits for the 80 bytes of headers, for the payload's sum if records are
        sealed, and for the check of the indices.

        Args:
            record: uint8, 16-byte aligned, exactly one record; not trusted.
            rank: the sender, for the error's text.

        Raises:
            WireFormatError: names the rank and the first field that is wrong.
        """
        header, head = read_head(record, SECTIONS_AT, rank, sealed=self.checksum)
        num_rows, columns, stored, part, parts = _SUB_HEADER.unpack_from(head, HEADER_BYTES)
        if stored > self.rows:
            raise wrong_field(rank, "stored rows", f"at most {self.rows}", stored)
        code, numel = WIRE_CODES[self.value_dtype], self.num_rows * self.columns
        check_fields(rank, ("format", FORMAT_ROW_SPARSE, header.format))
        header.check_segment(code, numel, 0, self.step, rank)
        check_fields(
            rank,
            ("num_rows", self.num_rows, num_rows),
            ("columns", self.columns, columns),
            ("part", self.part, part),
            ("parts", self.parts, parts),
            ("nnz", stored * self.columns, header.nnz),
            ("payload_bytes", self.record_bytes(stored) - HEADER_BYTES, header.payload_bytes),
            ("size", self.record_bytes(stored), record.numel()),
        )
        index_bytes = stored * self._index_dtype.itemsize
        indices = record[SECTIONS_AT : SECTIONS_AT + index_bytes].view(self._index_dtype).long()
        self._check_indices(indices, rank)
        values_at = SECTIONS_AT + pad16(index_bytes)
        values = record[values_at : values_at + self._value_bytes(stored)]
        rows = values.view(VALUE_DTYPES[self.value_dtype]).view(stored, self.columns)
        return RowSparse(indices, rows, self.num_rows)

    def _check_indices(self, indices: torch.Tensor, rank: int) -> None:
        """Refuses row indices that do not ascend strictly, or that belong to another part."""
        outside = (indices < 0) | (indices >= self.num_rows)
        wrong = outside | (indices % self.parts != self.part)
        wrong[1:] |= indices[1:] <= indices[:-1]  # not above the index before
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0])
            raise wrong_field(
                rank,
                "row indices",
                f"ascending, from 0 to {self.num_rows - 1}, {self.part} modulo {self.parts}",
                f"{int(indices[position])} at position {position}",
            )
