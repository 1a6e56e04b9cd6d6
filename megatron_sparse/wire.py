"""Constants and sizes of the wire format, as docs/wire-format.md specifies them.

For everything that writes or reads records: the kernels' wrappers (`cuda_ext`) and the messages
(`formats`). C++ has its own copy (`cuda_ext/csrc/header.h`, `record.h`).

A *record* encodes a segment of a bucket: a header, then *sections* such as indices and values, each
padded to 16 bytes. *Entries* are the elements that it holds. A *word* is 4 bytes. A Rice record
cuts its segment into *chunks* of 2^span elements. A *plane* is a word with one bit of each of 32
numbers, and a *group* is 128 quantised values that share a *scale* of one word.
"""

import struct

import torch

from megatron_sparse.errors import WireFormatError

HEADER_BYTES = 48
RECORD_ALIGNMENT = 16
"""Alignment of records and of their sections, in bytes."""
MAGIC = b"MSPG"
VERSION = 2

FORMAT_DENSE, FORMAT_COO, FORMAT_PICI, FORMAT_BLOCKS, FORMAT_HASH_BITMAP = range(5)
FORMAT_ROW_SPARSE = 5
FORMAT_MOVES = 6
FORMAT_QUANTISED = 7
FORMAT_RICE = 8
FORMAT_ADAPTIVE = -1
"""Not a record format: the encoder chooses the smallest of dense, COO and Pici."""
FORMAT_NAMES = (
    "dense",
    "coo",
    "pici",
    "blocks",
    "hash_bitmap",
    "row_sparse",
    "moves",
    "quantised",
    "rice",
)
FLAG_PICI_LINEAR = 1
MOVES_CODERS = ("raw", "rans")
"""Coders of a record of moves, by the header's flags."""
QUANTISED_BITS = (4, 8)
"""Bits of a code in a record of quantised differences; the header's flags."""
PICI_TILE = 4096
BLOCKS_SUBHEADER = struct.Struct("<IIQ")
"""Sub-header of a blocks record: block size, number of blocks, zero."""
VALUE_BYTES = (4, 2, 2)
"""Bytes of a value, by dtype code: fp32, bf16, fp16."""
RICE_BITS = {3: 8, 4: 4, 5: 3, 6: 2}
"""Bits of a quantised value's code, by dtype code; only records of format Rice have such values."""
RICE_SPANS = range(12, 25)
"""Allowed values of the span, the binary logarithm of a chunk's elements."""
RICE_CHUNK_ENTRIES = 1024
"""Entries that a chunk should have at least: its table row and paddings then take 2 % of it."""
SUBHEADER_BYTES = 16
"""Of the sub-header of a blocks or a Rice record."""
_RICE_GROUP, _RICE_PLANE = 128, 32
"""Quantised values in a group; numbers in a plane."""


def payload_bytes[T: (int, torch.Tensor)](
    record_format: int, numel: T, nnz: T, value_dtype: int
) -> T:
    """Bytes of the sections of a dense, COO or Pici record, padding included.

    `numel` counts the segment's elements, `nnz` the entries, `value_dtype` is the dtype's code.
    Tensors of `numel` and `nnz` give the bytes of many records.

    Example:
        >>> payload_bytes(FORMAT_COO, 1000, 3, 1)  # 12 bytes of indices, 6 of values
        32
    """
    value_bytes = VALUE_BYTES[value_dtype]
    if record_format == FORMAT_DENSE:
        return pad16(numel * value_bytes)
    if record_format == FORMAT_PICI:
        tiles = -(-numel // PICI_TILE)
        bitmap, prefix_sums = tiles * PICI_TILE // 8, pad16(4 * (tiles + 1))
        return bitmap + prefix_sums + pad16(nnz * value_bytes)
    assert record_format == FORMAT_COO, f"format {record_format} has a size function of its own"
    return pad16(nnz * 4) + pad16(nnz * value_bytes)


def blocks_payload_bytes(n_blocks: int, block_size: int, value_dtype: int) -> int:
    """Bytes of the sections of a blocks record: `n_blocks` blocks of `block_size` values, padded.

    Example:
        >>> blocks_payload_bytes(3, 64, 0)  # 16 of sub-header, 12 of indices, 768 of values
        800
    """
    values = n_blocks * block_size * VALUE_BYTES[value_dtype]
    return BLOCKS_SUBHEADER.size + pad16(4 * n_blocks) + pad16(values)


def rice_span(density: float) -> int:
    """The least span with which a chunk has `RICE_CHUNK_ENTRIES` at this density; else the largest.

    Example:
        >>> rice_span(0.01)  # 131,072 elements, of which 1,311 have entries
        17
    """
    spans = [span for span in RICE_SPANS if density * 2**span >= RICE_CHUNK_ENTRIES]
    return spans[0] if spans else RICE_SPANS[-1]


def rice_parameter(numel: int, nnz: int) -> int:
    """Rice's parameter r of a chunk: the number of low bits of a gap that are stored in planes.

    It makes the indices shortest in the worst case. `numel` counts the chunk's elements,
    `nnz` > 0 its entries.

    Example:
        >>> rice_parameter(100, 1)
        6
    """
    # The binary logarithm, rounded down, of about the mean gap between entries; at least 0.
    return max((max(numel - nnz - 1, 0) // nnz).bit_length() - 1, 0)


def rice_payload_bytes(numel: int, nnz: int, value_dtype: int, log2_span: int) -> int:
    """The most bytes that the sections of a Rice record with indices can take.

    Args:
        numel: elements of the segment.
        nnz: entries of the segment, at most; their positions may be the worst.
        value_dtype: the dtype's code.
        log2_span: the span.

    Example:
        >>> rice_payload_bytes(4096, 41, 0, 12)  # 16 of sub-header, 16 of table, 64 words
        288
    """
    entries = min(nnz, numel)
    chunks = -(-numel // 2**log2_span)
    words = 0
    if entries:
        filled = min(chunks, entries)  # chunks that have entries, at most
        # An entry's index is its gap to the entry before: the gap's r low bits are in planes, the
        # rest is in unary. Each chunk has its own r; at worst it takes no more bits than this.
        r = rice_parameter(numel, entries)
        index_bits = entries * (r + 1) + ((numel - entries) >> r)
        # A filled chunk pads the planes of each of r < log2_span bits and the unary part to words.
        words = index_bits // 32 + 1 + filled * log2_span
        words += _most_value_words(entries, filled, value_dtype)
    return SUBHEADER_BYTES + pad16(8 * (chunks + 1)) + pad16(4 * words)


def _most_value_words(nnz: int, chunks: int, value_dtype: int) -> int:
    """The most words that `nnz` values can take if they are spread over `chunks` chunks.

    In each chunk the last group, plane or word may be only partly filled.
    """
    if value_dtype in RICE_BITS:
        scales = nnz // _RICE_GROUP + chunks
        planes_of_a_bit = nnz // _RICE_PLANE + chunks
        return scales + RICE_BITS[value_dtype] * planes_of_a_bit
    return nnz if VALUE_BYTES[value_dtype] == 4 else nnz // 2 + chunks


def rice_whole_payload_bytes(numel: int, value_dtype: int, log2_span: int) -> int:
    """Bytes of the sections of a Rice record without indices: all `numel` elements are entries.

    `value_dtype` is the code of a quantised dtype, `log2_span` the span.

    Example:
        >>> rice_whole_payload_bytes(4096, 4, 12)  # 16 of sub-header, 32 groups of 17 words
        2192
    """
    full, rest = divmod(numel, 2**log2_span)  # full chunks, and elements of the last, partial one
    words = full * rice_value_words(2**log2_span, value_dtype) + rice_value_words(rest, value_dtype)
    return SUBHEADER_BYTES + pad16(4 * words)


def rice_value_words(entries: int, value_dtype: int) -> int:
    """Words of the values in a chunk with `entries` entries; quantised: scales and planes.

    Example:
        >>> rice_value_words(130, 4)  # 2 scales, and 5 planes for each of 4 bits
        22
    """
    if value_dtype not in RICE_BITS:
        return -(-entries * VALUE_BYTES[value_dtype] // 4)
    scales = -(-entries // _RICE_GROUP)
    planes_of_a_bit = -(-entries // _RICE_PLANE)
    return scales + RICE_BITS[value_dtype] * planes_of_a_bit


def pad16[T: (int, torch.Tensor)](nbytes: T) -> T:
    """The next multiple of `RECORD_ALIGNMENT`."""
    return -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def wrong_field(rank: int | None, field: str, expected: object, got: object) -> WireFormatError:
    """The error for a wrong field of a message; names the field and, if known, the sending rank."""
    return WireFormatError(
        f"field {field} is wrong" if rank is None else f"rank {rank}: field {field} is wrong",
        expected=expected,
        got=got,
        remedy="run the same version of megatron_sparse with the same configuration on all ranks; "
        "if they do, the message was damaged on its way",
    )
