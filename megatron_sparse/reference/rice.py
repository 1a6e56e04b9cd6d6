"""Records of the format Rice, chunk by chunk: the oracle of the codec.

docs/wire-format.md specifies the record. A chunk is 2^log2_span elements of the segment, the last
one may be shorter. Its words are the values of its entries, in element order, then the gaps between
them in Rice's code. Cost: docs/wire-format.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import padded
from megatron_sparse.reference.rice_chunk import (
    RiceForm,
    WrongWords,
    index_words,
    read_chunk,
    value_words,
    whole_words,
)
from megatron_sparse.wire import FORMAT_RICE, HEADER_BYTES, RICE_SPANS, pad16, wrong_field

WITHOUT_INDICES = (3, 4)
"""Dtype codes that a record without indices may have: 8 and 4 bits."""
SUB_HEADER = struct.Struct("<BBHIQ")
"""Whether there are indices, log2 of a chunk's elements, zero, chunks, words of all chunks."""


@dataclass(frozen=True)
class SegmentPlace:
    """The segment that a record holds, as its header has it."""

    numel: int
    offset: int
    step: int


@dataclass(frozen=True)
class Encoded:
    """A record, and what its entries lose.

    Attributes:
        record: header and sections.
        residual_K: fp32, x less what every decoder adds; 0 where that is infinite or NaN.
    """

    record: bytes
    residual_K: torch.Tensor


def encode(
    x_K: torch.Tensor,
    index_K: torch.Tensor | None,
    place: SegmentPlace,
    form: RiceForm,
    nnz: int | None = None,
) -> Encoded:
    """The record of K entries.

    Args:
        x_K: values of the entries, fp32 where they are to be quantised.
        index_K: int64, their elements in the segment, ascending; None for all elements.
        place: the segment.
        form: how they are written.
        nnz: the header's, in a record without indices; None counts those of x_K.
    """
    span = 1 << form.log2_span
    index = np.arange(place.numel) if index_K is None else index_K.numpy()
    table, chunks, sent = [(0, 0)], [np.zeros(0, "<u4")], [np.zeros(0, np.float32)]
    for begin in range(0, place.numel, span):
        first, last = np.searchsorted(index, (begin, begin + span))
        words, chunk_sent = value_words(x_K[first:last], form)
        chunks.append(words)
        sent.append(chunk_sent)
        if form.indices:
            numel = min(span, place.numel - begin)
            chunks.append(index_words(index[first:last] - begin, numel))
        table.append((int(last), sum(map(len, chunks))))
    words = np.concatenate(chunks)
    sub_header = SUB_HEADER.pack(form.indices, form.log2_span, 0, len(table) - 1, len(words))
    rows = b"".join(struct.pack("<II", *row) for row in table) if form.indices else b""
    payload = sub_header + padded(rows) + padded(words.tobytes())
    if form.indices:
        nnz = len(index)
    elif nnz is None:
        nnz = int(x_K.count_nonzero())
    header = Header(
        FORMAT_RICE, form.value_dtype, place.numel, nnz, len(payload), place.offset, place.step
    )
    sent_K = torch.from_numpy(np.concatenate(sent))
    residual_K = torch.where(sent_K.isfinite(), x_K.float() - sent_K, 0)
    return Encoded(header.pack() + payload, residual_K)


def decode(
    record: bytes, place: SegmentPlace, value_dtype: int, rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements that a record holds, int64 and ascending, and their fp32 values.

    Args:
        record: from its header to the message's end.
        place: the segment that it must hold.
        value_dtype: dtype code that the values must have.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the first field that is wrong.
    """
    header = Header.unpack(record[:HEADER_BYTES], rank)
    _check_header(header, place, value_dtype, len(record), rank)
    payload = record[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    form, total_words = _read_sub_header(header, payload, rank)
    table, words_at = _read_table(header, payload, form, total_words, rank)
    words = np.frombuffer(payload, "<u4", total_words, words_at)
    index, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for chunk, begin in enumerate(range(0, place.numel, 1 << form.log2_span)):
        (entries, at), (entries_end, end) = table[chunk], table[chunk + 1]
        numel = min(1 << form.log2_span, place.numel - begin)
        try:
            found = read_chunk(words[at:end], entries_end - entries, numel, form)
        except WrongWords as error:
            raise wrong_field(rank, "rice", f"those of chunk {chunk}", error) from error
        index.append(found[0] + begin)
        values.append(found[1])
    return torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(values))


def _check_header(
    header: Header, place: SegmentPlace, value_dtype: int, available: int, rank: int | None
) -> None:
    if header.format != FORMAT_RICE:
        raise wrong_field(rank, "format", FORMAT_RICE, header.format)
    for field, expected, got in (
        ("dtype", value_dtype, header.dtype),
        ("flags", 0, header.flags),
        ("step", place.step % 2**32, header.step),
        ("offset", place.offset, header.offset),
        ("numel", place.numel, header.numel),
    ):
        if expected != got:
            raise wrong_field(rank, field, expected, got)
    if header.nnz > place.numel:
        raise wrong_field(rank, "nnz", f"at most {place.numel}", header.nnz)
    if header.payload_bytes < SUB_HEADER.size:
        raise wrong_field(rank, "payload_bytes", SUB_HEADER.size, header.payload_bytes)
    if HEADER_BYTES + header.payload_bytes > available:
        needed = HEADER_BYTES + header.payload_bytes
        raise wrong_field(rank, "size", f"{needed} bytes", available)


def _read_sub_header(header: Header, payload: bytes, rank: int | None) -> tuple[RiceForm, int]:
    """How the record is written, and the words of all chunks."""
    indices, log2_span, zero, chunks, total_words = SUB_HEADER.unpack_from(payload)
    if indices > 1 or log2_span not in RICE_SPANS or zero:
        expected = f"0 or 1, {RICE_SPANS[0]} to {RICE_SPANS[-1]}, 0"
        raise wrong_field(rank, "chunk", expected, (indices, log2_span, zero))
    demanded = -(-header.numel // (1 << log2_span))
    if chunks != demanded:
        raise wrong_field(rank, "chunk", f"{demanded} chunks", chunks)
    if not indices and header.dtype not in WITHOUT_INDICES:
        expected = " or ".join(map(str, WITHOUT_INDICES))
        raise wrong_field(rank, "chunk", f"dtype {expected} without indices", header.dtype)
    form = RiceForm(header.dtype, log2_span, bool(indices))
    if not indices and total_words != (whole := whole_words(header.numel, form)):
        raise wrong_field(rank, "table", f"{whole} words", total_words)
    table_bytes = pad16(8 * (chunks + 1)) if indices else 0
    payload_bytes = SUB_HEADER.size + table_bytes + pad16(4 * total_words)
    if header.payload_bytes != payload_bytes:
        raise wrong_field(rank, "payload_bytes", payload_bytes, header.payload_bytes)
    return form, total_words


def _read_table(
    header: Header, payload: bytes, form: RiceForm, total_words: int, rank: int | None
) -> tuple[list[tuple[int, int]], int]:
    """Entries and words before each chunk and in all of them, and where the words begin."""
    span = 1 << form.log2_span
    chunks = -(-header.numel // span)
    if not form.indices:
        ends = [min(span * chunk, header.numel) for chunk in range(chunks + 1)]
        return [(end, whole_words(end, form)) for end in ends], SUB_HEADER.size
    numbers = struct.unpack_from(f"<{2 * (chunks + 1)}I", payload, SUB_HEADER.size)
    table = list(zip(numbers[::2], numbers[1::2], strict=True))
    if table[0] != (0, 0) or table[-1] != (header.nnz, total_words):
        expected = f"(0, 0) to {header.nnz, total_words}"
        raise wrong_field(rank, "table", expected, (table[0], table[-1]))
    for chunk in range(chunks):
        numel = min(span, header.numel - span * chunk)
        entries = table[chunk + 1][0] - table[chunk][0]
        words = table[chunk + 1][1] - table[chunk][1]
        if not 0 <= entries <= numel or words < 0:
            raise wrong_field(rank, "table", f"rows that ascend to {numel}", (entries, words))
    return table, SUB_HEADER.size + pad16(8 * (chunks + 1))
