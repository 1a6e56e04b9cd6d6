"""Pici (SpCCL, section III) one element at a time: the oracle of the Pici codecs.

Tiles of 4096 elements, 64 rows of 64, row-major; the last one may be partial. Sections of a record:
64 words of 64 bits for each tile, exclusive prefix sums of the tiles' non-zero counts (uint32, one
more than tiles), values. In the paper's order bit r of word c is element 64 r + c of the tile, and
the values of a tile follow column by column; in linear order bit r of word c is element 64 c + r.
"""

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import numbers_at, padded
from megatron_sparse.reference.prune import DTYPES
from megatron_sparse.wire import FLAG_PICI_LINEAR, pad16, wrong_field

TILE, SIDE = 4096, 64


def encode(values_N: torch.Tensor, kept_N: torch.Tensor, *, linear: bool) -> bytes:
    """Encodes one segment; returns the sections of its record.

    Args:
        values_N: the segment's elements, in the record's dtype.
        kept_N: bool, the elements to send.
        linear: the order inside a tile; false is the paper's.
    """
    kept = kept_N.tolist()
    words, prefix, order = [], [0], []  # `order`: kept elements, in the record's order
    for begin in range(0, len(kept), TILE):
        for word in range(SIDE):
            bits = 0
            for bit in range(SIDE):
                element = begin + _element(word, bit, linear)
                if element < len(kept) and kept[element]:
                    bits |= 1 << bit
                    order.append(element)
            words.append(bits)
        prefix.append(len(order))
    return (
        b"".join(word.to_bytes(8, "little") for word in words)
        + padded(b"".join(count.to_bytes(4, "little") for count in prefix))
        + padded(values_N[order])
    )


def decode(header: Header, payload: bytes, rank: int) -> tuple[list[int], torch.Tensor]:
    """Decodes a record's sections; returns its elements, in the order of the values, and values.

    Raises:
        WireFormatError: prefix sums do not fit the words, or a bit lies beyond the segment's end.
    """
    numel, linear = header.numel, bool(header.flags & FLAG_PICI_LINEAR)
    tiles = -(-numel // TILE)
    elements, prefix = [], [0]
    for word in range(SIDE * tiles):
        bits = int.from_bytes(payload[8 * word : 8 * word + 8], "little")
        for bit in range(SIDE):
            if bits >> bit & 1:
                elements.append(word // SIDE * TILE + _element(word % SIDE, bit, linear))
        if word % SIDE == SIDE - 1:
            prefix.append(len(elements))
    prefix_at = 8 * SIDE * tiles  # after the words
    stored = []
    for begin in range(prefix_at, prefix_at + 4 * (tiles + 1), 4):
        stored.append(int.from_bytes(payload[begin : begin + 4], "little"))
    if stored != prefix or prefix[-1] != header.nnz:
        raise wrong_field(rank, "prefix", f"the words' {prefix}, to nnz {header.nnz}", stored)
    if any(element >= numel for element in elements):
        raise wrong_field(rank, "words", f"no bit beyond element {numel}", "some")
    values_at = prefix_at + pad16(4 * (tiles + 1))
    return elements, numbers_at(payload, values_at, header.nnz, DTYPES[header.dtype])


def _element(word: int, bit: int, linear: bool) -> int:
    return SIDE * word + bit if linear else SIDE * bit + word
