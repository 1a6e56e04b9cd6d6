"""The 48-byte header of a record; docs/wire-format.md is the specification.

A record is a header and a payload: for some formats a sub-header, then sections. The native ops
have a copy of this layout (`cuda_ext/csrc/header.h`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext.checksum_ops import payload_sums
from megatron_sparse.cuda_ext.reports import Copies, on_cpu
from megatron_sparse.wire import (
    FLAG_PICI_LINEAR,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    MAGIC,
    RECORD_ALIGNMENT,
    SUBHEADER_BYTES,
    VERSION,
    pad16,
    payload_bytes,
    wrong_field,
)

_BEFORE_CHECKSUM = struct.Struct("<4sBBBBQQQQI")


def heads_of(records: Sequence[torch.Tensor]) -> Copies[list[bytes]]:
    """The first bytes of each 1-D uint8 record of one device; one copy for all of them."""
    heads = [record[:HEADER_BYTES] for record in records]
    read = yield from on_cpu(torch.cat(heads))
    return [head.numpy().tobytes() for head in read.split([head.numel() for head in heads])]


def check_fields(rank: int | None, *fields: tuple[str, object, object]) -> None:
    """Refuses a record whose fields do not have their expected values.

    Args:
        rank: the sender, for the error's text, if the caller knows it.
        fields: for each field its name, the expected value and the record's value.

    Raises:
        WireFormatError: names the first field that is wrong.
    """
    for field, expected, got in fields:
        if expected != got:
            raise wrong_field(rank, field, expected, got)


@dataclass(frozen=True)
class Header:
    """The header, which precedes a record's sections.

    Attributes:
        format: one of the `FORMAT_*` codes.
        dtype: of the values: 0 fp32, 1 bf16, 2 fp16; of Rice also 3 q8, 4 q4, 5 q3, 6 q2.
        numel: elements of the segment.
        nnz: non-zero elements.
        payload_bytes: bytes of all sections, padding included.
        offset: the segment's first element in the bucket.
        step: the optimizer step, taken modulo 2^32.
        flags: of Pici `FLAG_PICI_LINEAR` or 0; of moves the coder; of quantised differences the
            bits of a code; else 0.

    Example:
        >>> h = Header(FORMAT_COO, 0, numel=8, nnz=1, payload_bytes=32, offset=0, step=7)
        >>> Header.unpack(h.pack(), rank=0) == h
        True
    """

    format: int
    dtype: int
    numel: int
    nnz: int
    payload_bytes: int
    offset: int
    step: int
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
            self.step % 2**32,
        )
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes, rank: int | None, payload_sum: int | None = 0) -> Header:
        """Parses a header; checks only its magic, version and checksum.

        Args:
            data: the record's first bytes, 48 at least.
            rank: the sender, for the error's text; None if the caller does not know it.
            payload_sum: what sealing added to the checksum (`cuda_ext.checksum_ops`), 0 if nothing;
                None skips the checksum, for records that this rank made or has checked.

        Raises:
            WireFormatError: too few bytes, or magic, version or checksum is wrong.
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
        if payload_sum is not None:
            wanted = (zlib.crc32(body) + payload_sum) % 2**32
            if checksum != wanted:
                raise wrong_field(rank, "checksum", hex(wanted), hex(checksum))
        record_format, dtype, flags, numel, nnz, payload, offset, step = fields
        return cls(record_format, dtype, numel, nnz, payload, offset, step, flags)

    def check(
        self,
        value_dtype: int,
        numel: int,
        offset: int,
        step: int,
        available: int,
        rank: int,
        formats: Sequence[int] = (FORMAT_DENSE, FORMAT_COO),
    ) -> None:
        """Compares every field with its expected value.

        Args:
            value_dtype: dtype code of the values.
            numel: elements of the segment.
            offset: the segment's first element in the bucket.
            step: the step.
            available: bytes from the header's first to the message's last.
            rank: the sender, for the error's text.
            formats: those of dense, COO, Pici, blocks and Rice that the caller can decode.

        The size of a blocks or Rice record depends on its sub-header, which the caller must check.
        This method checks only that the record has room for the sub-header.

        Raises:
            WireFormatError: names the rank and the first field that is wrong.
        """
        if self.format not in formats:
            raise wrong_field(rank, "format", " or ".join(map(str, formats)), self.format)
        known_flags = FLAG_PICI_LINEAR if self.format == FORMAT_PICI else 0
        expected_flags = self.flags & known_flags  # known flags may be set; all others must be 0
        self.check_segment(value_dtype, numel, offset, step, rank, expected_flags)
        if self.nnz > numel:
            raise wrong_field(rank, "nnz", f"at most {numel}", self.nnz)
        if self.format in (FORMAT_BLOCKS, FORMAT_RICE):
            # Accepts the record's own size, if it has room for the sub-header.
            demanded = max(self.payload_bytes, SUBHEADER_BYTES)
        else:
            demanded = payload_bytes(self.format, numel, self.nnz, value_dtype)
        if self.payload_bytes != demanded:
            raise wrong_field(rank, "payload_bytes", demanded, self.payload_bytes)
        if HEADER_BYTES + demanded > available:
            raise wrong_field(rank, "size", f"{HEADER_BYTES + demanded} bytes", available)

    def check_segment(
        self, value_dtype: int, numel: int, offset: int, step: int, rank: int | None, flags: int = 0
    ) -> None:
        """Compares the fields that say which values the record holds; arguments as of `check`.

        Raises:
            WireFormatError: names the first field that is wrong.
        """
        check_fields(
            rank,
            ("dtype", value_dtype, self.dtype),
            ("flags", flags, self.flags),
            ("step", step % 2**32, self.step),
            ("offset", offset, self.offset),
            ("numel", numel, self.numel),
        )

    def check_whole(
        self, numel: int, value_dtype: int, epoch: int, record_bytes: int, rank: int | None
    ) -> None:
        """Checks the header of a record with all numbers of a shard (`moves`, `quantised`).

        Such a record has nnz 0. Its size is a multiple of 16, and at least 16 more than the header.
        The caller checks the flags.

        Args:
            numel: how many numbers the shard has.
            value_dtype: their dtype code.
            epoch: the sender's number of the step, expected in the field step.
            record_bytes: bytes received for the record, header included.
            rank: the sender, for the error's text, if the caller knows it.

        Raises:
            WireFormatError: names the first field that is wrong.
        """
        self.check_segment(value_dtype, numel, 0, epoch, rank, self.flags)
        least = HEADER_BYTES + RECORD_ALIGNMENT
        check_fields(
            rank,
            ("nnz", 0, self.nnz),
            ("size", max(pad16(record_bytes), least), record_bytes),
            ("payload_bytes", record_bytes - HEADER_BYTES, self.payload_bytes),
        )


def read_head(
    record: torch.Tensor, nbytes: int, rank: int | None, *, sealed: bool = False
) -> tuple[Header, bytes]:
    """Reads a record's header; returns it and the first `nbytes` bytes. On CUDA the CPU waits.

    Args:
        record: uint8, exactly one record, not trusted.
        nbytes: length of header and sub-header together.
        rank: as in `Header.unpack`.
        sealed: the header's checksum covers the payload too.

    Raises:
        WireFormatError: as in `Header.unpack`, or the record is shorter than `nbytes`.
    """
    head = record[:nbytes].cpu().numpy().tobytes()
    payload_sum = int(payload_sums([record], records=1)) if sealed else 0
    header = Header.unpack(head, rank, payload_sum)
    if len(head) < nbytes:
        raise wrong_field(rank, "size", f"{nbytes} bytes and more", len(head))
    return header, head
