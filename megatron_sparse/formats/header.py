"""The 48-byte header of a record; docs/wire-format.md is the specification.

The compiled codec has its own copy of this layout (`cuda_ext/csrc/header.h`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.errors import WireFormatError

HEADER_BYTES = 48
RECORD_ALIGNMENT = 16
"""Of records and of their sections, in bytes."""
MAGIC = b"MSPG"
VERSION = 1

FORMAT_DENSE, FORMAT_COO, FORMAT_PICI, FORMAT_BLOCKS, FORMAT_HASH_BITMAP = range(5)
FORMAT_ROW_SPARSE = 5
FORMAT_ADAPTIVE = -1
"""Not a format of a record: asks the encoder for the smallest of dense, COO and Pici."""
FORMAT_NAMES = ("dense", "coo", "pici", "blocks", "hash_bitmap", "row_sparse")
FLAG_PICI_LINEAR = 1
PICI_TILE = 4096
BLOCKS_SUBHEADER = struct.Struct("<IIQ")
"""Block size, number of blocks, zero."""
VALUE_BYTES = (4, 2, 2)
"""Bytes of a value, by dtype code: fp32, bf16, fp16."""

_BEFORE_CHECKSUM = struct.Struct("<4sBBBBQQQQI")


@dataclass(frozen=True)
class Header:
    """What precedes a record's sections.

    Attributes:
        format: one of the `FORMAT_*` codes.
        dtype: of the values: 0 fp32, 1 bf16, 2 fp16.
        numel: elements of the segment.
        nnz: non-zero elements.
        payload_bytes: bytes of all sections, padding included.
        offset: the segment's first element in the bucket.
        epoch: the optimizer step, taken modulo 2^32.
        flags: options of the format; `FLAG_PICI_LINEAR` or 0.

    Example:
        >>> h = Header(FORMAT_COO, 0, numel=8, nnz=1, payload_bytes=32, offset=0, epoch=7)
        >>> Header.unpack(h.pack(), rank=0) == h
        True
    """

    format: int
    dtype: int
    numel: int
    nnz: int
    payload_bytes: int
    offset: int
    epoch: int
    flags: int = 0

    def pack(self) -> bytes:
        """The header's 48 bytes, checksum included."""
        body = _BEFORE_CHECKSUM.pack(
            MAGIC,
            VERSION,
            self.format,
            self.dtype,
            self.flags,
            self.numel,
            self.nnz,
            self.payload_bytes,
            self.offset,
            self.epoch % 2**32,
        )
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Header:
        """Reads a header; looks only at magic, version and checksum.

        Args:
            data: the record's first bytes, 48 at least.
            rank: the sender, for the error's text.

        Raises:
            WireFormatError: too few bytes, or one of the three is wrong.
        """
        if len(data) < HEADER_BYTES:
            raise wrong_field(rank, "size", f"{HEADER_BYTES} bytes of header", len(data))
        body = data[: _BEFORE_CHECKSUM.size]
        magic, version, *fields = _BEFORE_CHECKSUM.unpack(body)
        (checksum,) = struct.unpack_from("<I", data, _BEFORE_CHECKSUM.size)
        if magic != MAGIC:
            raise wrong_field(rank, "magic", MAGIC, magic)
        if version != VERSION:
            raise wrong_field(rank, "version", VERSION, version)
        if checksum != zlib.crc32(body):
            raise wrong_field(rank, "checksum", hex(zlib.crc32(body)), hex(checksum))
        form, dtype, flags, numel, nnz, payload, offset, epoch = fields
        return cls(form, dtype, numel, nnz, payload, offset, epoch, flags)

    def check(
        self,
        value_dtype: int,
        numel: int,
        offset: int,
        epoch: int,
        available: int,
        rank: int,
        formats: Sequence[int] = (FORMAT_DENSE, FORMAT_COO),
    ) -> None:
        """Compares every field with what is expected.

        Args:
            value_dtype: dtype code of the values.
            numel: elements of the segment.
            offset: the segment's first element in the bucket.
            epoch: the step.
            available: bytes from the header's first to the message's last.
            rank: the sender, for the error's text.
            formats: what the caller can decode, out of dense, COO, Pici and blocks.

        The size of a blocks record depends on its sub-header, which the caller must look at; here
        it is only at least that of the sub-header.

        Raises:
            WireFormatError: names the rank and the first field that is wrong.
        """
        if self.format not in formats:
            raise wrong_field(rank, "format", " or ".join(map(str, formats)), self.format)
        known_flags = FLAG_PICI_LINEAR if self.format == FORMAT_PICI else 0
        for field, expected, got in (
            ("dtype", value_dtype, self.dtype),
            ("flags", self.flags & known_flags, self.flags),
            ("epoch", epoch % 2**32, self.epoch),
            ("offset", offset, self.offset),
            ("numel", numel, self.numel),
        ):
            if expected != got:
                raise wrong_field(rank, field, expected, got)
        if self.nnz > numel:
            raise wrong_field(rank, "nnz", f"at most {numel}", self.nnz)
        if self.format == FORMAT_BLOCKS:
            demanded = max(self.payload_bytes, BLOCKS_SUBHEADER.size)
        else:
            demanded = payload_bytes(self.format, numel, self.nnz, value_dtype)
        if self.payload_bytes != demanded:
            raise wrong_field(rank, "payload_bytes", demanded, self.payload_bytes)
        if HEADER_BYTES + demanded > available:
            raise wrong_field(rank, "size", f"{HEADER_BYTES + demanded} bytes", available)


def read_headers(message: bytes, rank: int) -> list[Header]:
    """The headers of all records of a message, by following their sizes.

    Raises:
        WireFormatError: a header is damaged, or the last record does not end with the message.
    """
    headers, position = [], 0
    while position < len(message):
        header = Header.unpack(message[position : position + HEADER_BYTES], rank)
        headers.append(header)
        position += HEADER_BYTES + header.payload_bytes
    if position != len(message):
        raise wrong_field(rank, "size", f"{position} bytes", len(message))
    return headers


def payload_bytes[T: (int, torch.Tensor)](form: int, numel: T, nnz: T, value_dtype: int) -> T:
    """Bytes of the sections of a dense, COO or Pici record, padding included; or of many records.

    Example:
        >>> payload_bytes(FORMAT_COO, 1000, 3, 1)  # 12 bytes of indices, 6 of values
        32
    """
    value_bytes = VALUE_BYTES[value_dtype]
    if form == FORMAT_DENSE:
        return pad16(numel * value_bytes)
    if form == FORMAT_PICI:
        tiles = -(-numel // PICI_TILE)
        return tiles * PICI_TILE // 8 + pad16(4 * (tiles + 1)) + pad16(nnz * value_bytes)
    assert form == FORMAT_COO, f"the size of format {form} depends on more"
    return pad16(nnz * 4) + pad16(nnz * value_bytes)


def blocks_payload_bytes(n_blocks: int, block_size: int, value_dtype: int) -> int:
    """Bytes of the sections of a blocks record, padding included.

    Example:
        >>> blocks_payload_bytes(3, 64, 0)  # 16 of sub-header, 12 of indices, 768 of values
        800
    """
    values = n_blocks * block_size * VALUE_BYTES[value_dtype]
    return BLOCKS_SUBHEADER.size + pad16(4 * n_blocks) + pad16(values)


def pad16[T: (int, torch.Tensor)](nbytes: T) -> T:
    """The next multiple of `RECORD_ALIGNMENT`."""
    return -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def wrong_field(rank: int, field: str, expected: object, got: object) -> WireFormatError:
    """The error that names the sending rank and the field of its message that is wrong."""
    return WireFormatError(
        f"rank {rank}: field {field} is wrong",
        expected=expected,
        got=got,
        remedy="run the same version of megatron_sparse with the same configuration on all ranks; "
        "if they do, the message was damaged on its way",
    )
