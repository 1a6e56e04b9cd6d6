"""The wire's constants and the sizes that follow from them; docs/wire-format.md specifies both.

Format codes, flags, alignments and section sizes, for everything that writes or reads records: the
kernels' wrappers (`cuda_ext`) and the messages (`formats`). C++ has its own copy
(`cuda_ext/csrc/header.h`, `record.h`).
"""

from __future__ import annotations

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
"""What the binary logarithm of a chunk's elements may be in a record of format Rice."""
RICE_CHUNK_ENTRIES = 1024
"""The expected entries of a chunk, at least: then its row and roundings take 2 % of its bits."""
SUBHEADER_BYTES = 16
"""Of the sub-header of a blocks or a Rice record."""
_RICE_GROUP, _RICE_PLANE = 128, 32
"""Quantised values that share a scale of one word; values of which one word holds one bit each."""


def payload_bytes[T: (int, torch.Tensor)](
    record_format: int, numel: T, nnz: T, value_dtype: int
) -> T:
    """Bytes of the sections of a dense, COO or Pici record, padding included.

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
        return tiles * PICI_TILE // 8 + pad16(4 * (tiles + 1)) + pad16(nnz * value_bytes)
    assert record_format == FORMAT_COO, f"the size of format {record_format} depends on more"
    return pad16(nnz * 4) + pad16(nnz * value_bytes)


def blocks_payload_bytes(n_blocks: int, block_size: int, value_dtype: int) -> int:
    """Bytes of the sections of a blocks record, padding included.

    Example:
        >>> blocks_payload_bytes(3, 64, 0)  # 16 of sub-header, 12 of indices, 768 of values
        800
    """
    values = n_blocks * block_size * VALUE_BYTES[value_dtype]
    return BLOCKS_SUBHEADER.size + pad16(4 * n_blocks) + pad16(values)


def rice_span(density: float) -> int:
    """The binary logarithm of the elements of a chunk of a Rice record of this density.

    Example:
        >>> rice_span(0.01)  # 131,072 elements, of which 1,311 have entries
        17
    """
    spans = [span for span in RICE_SPANS if density * 2**span >= RICE_CHUNK_ENTRIES]
    return spans[0] if spans else RICE_SPANS[-1]


def rice_parameter(numel: int, nnz: int) -> int:
    """Rice's parameter r of a chunk with `nnz` > 0 entries, the shortest in the worst case.

    Example:
        >>> rice_parameter(100, 1)
        6
    """
    # The binary logarithm, rounded down, of about the mean gap of entries; 0 at least.
    return max((max(numel - nnz - 1, 0) // nnz).bit_length() - 1, 0)


def rice_payload_bytes(numel: int, nnz: int, value_dtype: int, log2_span: int) -> int:
    """The most bytes of the sections of a Rice record with indices, wherever its entries lie.

    Args:
        numel: elements of the segment.
        nnz: its entries, at most.
        value_dtype: the dtype's code.
        log2_span: the binary logarithm of a chunk's elements.

    Example:
        >>> rice_payload_bytes(4096, 41, 0, 12)  # 16, 16 of table, 64 words
        288
    """
    entries = min(nnz, numel)
    chunks = -(-numel // 2**log2_span)
    words = 0
    if entries:
        filled, r = min(chunks, entries), rice_parameter(numel, entries)
        # r + 1 bits an entry, and the unary parts. With one r for all chunks; the worst case with a
        # chunk's own r is no longer.
        index_bits = entries * (r + 1) + ((numel - entries) >> r)
        # Each filled chunk rounds up at most log2_span - 1 planes of remainders and its unary
        # part, each by less than a word.
        words = index_bits // 32 + 1 + filled * log2_span
        words += _most_value_words(entries, filled, value_dtype)
    return SUBHEADER_BYTES + pad16(8 * (chunks + 1)) + pad16(4 * words)


def _most_value_words(nnz: int, chunks: int, value_dtype: int) -> int:
    """The most words (4 bytes each) that values take which lie in this many chunks.

    In each chunk the last group, plane or word may be filled in part.
    """
    if value_dtype in RICE_BITS:
        scales = nnz // _RICE_GROUP + chunks
        planes = nnz // _RICE_PLANE + chunks  # one word for each bit of a value
        return scales + RICE_BITS[value_dtype] * planes
    return nnz if VALUE_BYTES[value_dtype] == 4 else nnz // 2 + chunks


def rice_whole_payload_bytes(numel: int, value_dtype: int, log2_span: int) -> int:
    """Bytes of the sections of a Rice record without indices; `value_dtype` is a quantised one.

    Example:
        >>> rice_whole_payload_bytes(4096, 4, 12)  # 16, and 32 groups of 17 words
        2192
    """
    full, rest = divmod(numel, 2**log2_span)
    words = full * rice_value_words(2**log2_span, value_dtype) + rice_value_words(rest, value_dtype)
    return SUBHEADER_BYTES + pad16(4 * words)


def rice_value_words(entries: int, value_dtype: int) -> int:
    """Words of a chunk's values; quantised: one for each group, and the planes of their bits.

    Example:
        >>> rice_value_words(130, 4)  # two scales, 4 words for each of 5 times 32
        22
    """
    if value_dtype not in RICE_BITS:
        return -(-entries * VALUE_BYTES[value_dtype] // 4)
    planes = -(-entries // _RICE_PLANE)
    return -(-entries // _RICE_GROUP) + RICE_BITS[value_dtype] * planes


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
