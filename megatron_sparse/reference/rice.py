"""Records of the format Rice, chunk by chunk in NumPy: the oracle of the codec.

docs/wire-format.md specifies the record. A chunk is 2^log2_span elements of the segment, the last
one may be shorter. An entry is an element that is sent. A chunk's words (32 bits) are the values of
its entries, in element order, then the gaps between their elements in Rice's code: the lower r bits
of each as a remainder, the rest as a quotient in unary. Numbers of few bits are stored as planes:
word p of 32 numbers has bit p of number i as its bit i. The table has, for each chunk, the entries
and words before it.
"""

import struct
from itertools import accumulate, pairwise

import numpy as np
import torch

from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import padded
from megatron_sparse.reference.prune import DTYPES, with_one_nan
from megatron_sparse.reference.rice_values import GROUP, dequantise, quantise
from megatron_sparse.wire import (
    FORMAT_RICE,
    RICE_BITS,
    RICE_SPANS,
    pad16,
    rice_parameter,
    rice_value_words,
    wrong_field,
)

PLANE = 32
WITHOUT_INDICES = (3, 4)
"""Dtype codes that a record without indices may have: 8 and 4 bits."""
SUB_HEADER = struct.Struct("<BBHIQ")
"""Whether there are indices, log2 of a chunk's elements, zero, chunks, words of all chunks."""


def encode(
    x_K: torch.Tensor, index_K: torch.Tensor, place: range, spec: RecordSpec, nnz: int | None = None
) -> tuple[bytes, torch.Tensor]:
    """Encodes K entries of a segment; returns the record, and the residual of each entry.

    Args:
        x_K: values of the entries, fp32 where they are to be quantised.
        index_K: int64, their elements in the segment, ascending; all if `spec.without_indices`.
        place: the range of the segment's elements in the bucket.
        spec: dtype, chunk size and step of the record.
        nnz: how many values are not zero, for the header; None for K.

    Returns:
        Header and sections; and fp32 residual_K, x minus the value that decoders add, 0 where that
        value is infinite or NaN.
    """
    numel, span, index = len(place), 1 << spec.log2_span, index_K.numpy()
    # The empty arrays are for a segment without chunks: `np.concatenate` needs at least one.
    table, word_arrays, sent = [(0, 0)], [np.zeros(0, "<u4")], [np.zeros(0, np.float32)]
    for begin in range(0, numel, span):
        first, last = np.searchsorted(index, (begin, begin + span))
        words, chunk_sent = value_words(x_K[first:last], spec)
        word_arrays.append(words)
        sent.append(chunk_sent)
        if not spec.without_indices:
            word_arrays.append(index_words(index[first:last] - begin, min(span, numel - begin)))
        table.append((int(last), sum(map(len, word_arrays))))
    words = np.concatenate(word_arrays)
    sub_header = SUB_HEADER.pack(
        not spec.without_indices, spec.log2_span, 0, len(table) - 1, len(words)
    )
    rows = b"" if spec.without_indices else b"".join(struct.pack("<II", *row) for row in table)
    payload = sub_header + padded(rows) + padded(words.tobytes())
    header = Header(
        FORMAT_RICE,
        spec.value_dtype,
        numel,
        len(index) if nnz is None else nnz,
        len(payload),
        place.start,
        spec.step,
    )
    sent_K = torch.from_numpy(np.concatenate(sent))
    residual_K = torch.where(sent_K.isfinite(), x_K.float() - sent_K, 0)
    return header.pack() + payload, residual_K


def decode(header: Header, payload: bytes, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes a record; returns its elements, int64 and ascending, and their fp32 values.

    Args:
        header: the record's, checked.
        payload: the bytes after the header.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the first field that is wrong.
    """
    spec, total_words = _read_sub_header(header, payload, rank)
    table, words_at = _read_table(header, payload, spec, total_words, rank)
    words = np.frombuffer(payload, "<u4", total_words, words_at)
    index, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for chunk, begin in enumerate(range(0, header.numel, 1 << spec.log2_span)):
        (entries_begin, words_begin), (entries_end, words_end) = table[chunk : chunk + 2]
        numel = min(1 << spec.log2_span, header.numel - begin)
        try:
            entries, chunk_words = entries_end - entries_begin, words[words_begin:words_end]
            chunk_index, chunk_values = read_chunk(chunk_words, entries, numel, spec)
        except WrongWords as error:
            raise wrong_field(rank, "rice", f"those of chunk {chunk}", error) from error
        index.append(chunk_index + begin)
        values.append(chunk_values)
    return torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(values))


def _read_sub_header(header: Header, payload: bytes, rank: int) -> tuple[RecordSpec, int]:
    """Checks the sub-header; returns the record's spec, and the number of words of all chunks."""
    has_indices, log2_span, zero, chunks, total_words = SUB_HEADER.unpack_from(payload)
    if has_indices > 1 or log2_span not in RICE_SPANS or zero:
        expected = f"0 or 1, {RICE_SPANS[0]} to {RICE_SPANS[-1]}, 0"
        raise wrong_field(rank, "chunk", expected, (has_indices, log2_span, zero))
    demanded = -(-header.numel // (1 << log2_span))
    if chunks != demanded:
        raise wrong_field(rank, "chunk", f"{demanded} chunks", chunks)
    if not has_indices and header.dtype not in WITHOUT_INDICES:
        expected = " or ".join(map(str, WITHOUT_INDICES))
        raise wrong_field(rank, "chunk", f"dtype {expected} without indices", header.dtype)
    spec = RecordSpec(
        header.dtype, header.step, FORMAT_RICE, log2_span=log2_span, without_indices=not has_indices
    )
    table_bytes = pad16(8 * (chunks + 1)) if has_indices else 0  # a row has 8 bytes
    payload_bytes = SUB_HEADER.size + table_bytes + pad16(4 * total_words)
    if header.payload_bytes != payload_bytes:
        raise wrong_field(rank, "payload_bytes", payload_bytes, header.payload_bytes)
    return spec, total_words


def _read_table(
    header: Header, payload: bytes, spec: RecordSpec, total_words: int, rank: int
) -> tuple[list[tuple[int, int]], int]:
    """Reads and checks the table, or computes it for a record without indices, which stores none.

    Returns:
        A row (entries, words) for each chunk, counting what is before it, and a last row with the
        totals; and the byte of the payload at which the words begin.
    """
    span = 1 << spec.log2_span
    chunks = -(-header.numel // span)
    if spec.without_indices:
        sizes = [min(span, header.numel - span * chunk) for chunk in range(chunks)]
        words = [rice_value_words(size, spec.value_dtype) for size in sizes]
        entries_before, words_before = accumulate(sizes, initial=0), accumulate(words, initial=0)
        total_entries, words_at = header.numel, SUB_HEADER.size
    else:
        numbers = struct.unpack_from(f"<{2 * (chunks + 1)}I", payload, SUB_HEADER.size)
        entries_before, words_before = numbers[::2], numbers[1::2]
        total_entries, words_at = header.nnz, SUB_HEADER.size + pad16(8 * (chunks + 1))
    table = list(zip(entries_before, words_before, strict=True))
    if table[0] != (0, 0) or table[-1] != (total_entries, total_words):
        expected = f"(0, 0) to {total_entries, total_words}"
        raise wrong_field(rank, "table", expected, (table[0], table[-1]))
    for chunk, ((entries_begin, words_begin), (entries_end, words_end)) in enumerate(
        pairwise(table)
    ):
        numel = min(span, header.numel - span * chunk)
        entries, words = entries_end - entries_begin, words_end - words_begin  # of this chunk
        if not 0 <= entries <= numel or words < 0:
            got = (entries, words)
            raise wrong_field(rank, "table", f"rows that ascend to {numel}", got)
    return table, words_at


class WrongWords(ValueError):
    """The words of a chunk are not those of any entries; becomes a `WireFormatError`."""


def index_words(index_K: np.ndarray, numel: int) -> np.ndarray:
    """Encodes the gaps between K ascending elements of a chunk of `numel` in Rice's code.

    Example:
        >>> words = index_words(np.array([1, 2, 9]), 16)  # gaps 1, 0, 6 and r = 2
        >>> [bin(word) for word in words]  # planes of remainders 1, 0, 2; then quotients 0, 0, 1
        ['0b1', '0b100', '0b1011']
    """
    if index_K.size == 0:
        return np.zeros(0, "<u4")
    r = rice_parameter(numel, index_K.size)
    gap_K = np.diff(index_K, prepend=-1) - 1
    # Rice's code of a gap: r bits of remainder, as planes, and the quotient in unary.
    ones_K = np.cumsum((gap_K >> r) + 1) - 1  # each quotient is as many 0 bits, then a 1
    bits = np.zeros(_plane_words(int(ones_K[-1]) + 1) * PLANE, np.uint8)  # whole words
    bits[ones_K] = 1
    unary = np.packbits(bits, bitorder="little").view("<u4")
    return np.concatenate([planes(gap_K & (1 << r) - 1, r), unary])


def planes(numbers_K: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers into bit planes: `bits` words for each 32 numbers, the last ones zero-padded.

    Example:
        >>> planes(np.array([1, 2, 3]), 2).tolist()
        [5, 6]
    """
    padded = np.zeros(_plane_words(numbers_K.size) * PLANE, np.uint32)
    padded[: numbers_K.size] = numbers_K
    # rows[g, p, i] is bit p of number i of the g-th 32.
    rows = padded.reshape(-1, 1, PLANE) >> np.arange(bits, dtype=np.uint32).reshape(1, -1, 1) & 1
    packed = np.packbits(rows.astype(np.uint8).reshape(-1, PLANE), axis=1, bitorder="little")
    return packed.view("<u4").reshape(-1)


def value_words(x_K: torch.Tensor, spec: RecordSpec) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a chunk's values; returns the words, and the fp32 values that a decoder reads there.

    Quantised values take a word for the scale of each group, then the planes of its codes.
    """
    if spec.value_dtype not in RICE_BITS:
        dtype = DTYPES[spec.value_dtype]
        values_K = x_K if x_K.dtype == dtype else with_one_nan(x_K, dtype)
        data = values_K.reshape(-1, 1).view(torch.uint8).numpy().tobytes()
        padded_bytes = -(-len(data) // 4) * 4  # rounded up
        words = np.frombuffer(data.ljust(padded_bytes, b"\0"), "<u4")
        return words, values_K.float().numpy()
    bits = RICE_BITS[spec.value_dtype]
    words, sent = [np.zeros(0, "<u4")], [np.zeros(0, np.float32)]
    for begin in range(0, x_K.numel(), GROUP):
        group = quantise(x_K[begin : begin + GROUP].numpy(), bits, indices=not spec.without_indices)
        words += [np.array([group.scale_word], "<u4"), planes(group.codes, bits)]
        sent.append(group.sent)
    return np.concatenate(words), np.concatenate(sent)


def read_chunk(
    words: np.ndarray, entries: int, numel: int, spec: RecordSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Decodes a chunk: its elements, counted from its begin, and their fp32 values.

    Args:
        words: those of the chunk: values, remainders of the gaps, their quotients in unary.
        entries: how many entries the chunk has.
        numel: elements of the chunk.
        spec: how the record is written.

    Raises:
        WrongWords: the words are not those of so many entries.
    """
    values_end = rice_value_words(entries, spec.value_dtype)
    if spec.without_indices:
        return np.arange(numel), _read_values(words, entries, spec.value_dtype)
    r = rice_parameter(numel, entries) if entries else 0
    unary_at = values_end + r * _plane_words(entries)
    # A chunk with entries has at least one word of unary code; one without entries has no words.
    fits = len(words) > unary_at if entries else len(words) == 0
    if not fits:
        raise WrongWords(f"{len(words)} words for {entries} entries")
    values = _read_values(words[:values_end], entries, spec.value_dtype)
    if entries == 0:
        return np.zeros(0, np.int64), values
    remainders = from_planes(words[values_end:unary_at], r).astype(np.int64)
    if remainders[entries:].any():
        raise WrongWords("the padding of remainders is not zero")
    unary = words[unary_at:]
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    if ones.size != entries or unary[-1] == 0:
        raise WrongWords(f"{ones.size} ones for {entries} entries, last word {unary[-1]:#x}")
    # The zero bits before each 1 bit are a gap's quotient.
    gaps = (np.diff(ones, prepend=-1) - 1 << r) + (remainders[:entries] if r else 0)
    index = np.cumsum(gaps + 1) - 1
    if index[-1] >= numel:
        raise WrongWords(f"element {index[-1]} of {numel}")
    return index, values


def _read_values(words: np.ndarray, count: int, value_dtype: int) -> np.ndarray:
    """Decodes the `count` values at the begin of a chunk's words, and converts them to fp32."""
    if count == 0:
        return np.zeros(0, np.float32)
    if value_dtype not in RICE_BITS:
        data = bytearray(words.tobytes())
        return torch.frombuffer(data, dtype=DTYPES[value_dtype], count=count).float().numpy()
    bits, values, scale_at = RICE_BITS[value_dtype], [], 0
    for begin in range(0, count, GROUP):
        size = min(GROUP, count - begin)
        end = scale_at + 1 + bits * _plane_words(size)
        codes = from_planes(words[scale_at + 1 : end], bits)[:size]
        values.append(dequantise(int(words[scale_at]), codes, bits))
        scale_at = end
    return np.concatenate(values)


def from_planes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `planes`: uint32 numbers, the zeros that pad the last 32 included."""
    if bits == 0:
        return np.zeros(0, np.uint32)
    rows = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, bits, PLANE)
    weights = np.uint32(1) << np.arange(bits, dtype=np.uint32).reshape(1, -1, 1)
    return (rows * weights).sum(axis=1, dtype=np.uint32).reshape(-1)


def _plane_words(count: int) -> int:
    return -(-count // PLANE)
