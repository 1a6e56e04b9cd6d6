"""The hash bitmap bit by bit (ZEN, Algorithm 2): the oracle of `formats.hash_bitmap`."""

from __future__ import annotations

import struct

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import padded
from megatron_sparse.wire import FORMAT_HASH_BITMAP, pad16


def encode(
    gradient: torch.Tensor,
    index_set: list[int],
    hash_fields: tuple[int, int, int, int],
    offset: int,
    step: int,
) -> bytes:
    """The record of the partition whose elements, in the order of their positions, are given.

    Args:
        gradient: the whole segment, as in the paper.
        index_set: elements of the partition.
        hash_fields: partition, partitions, seed and code of the hash.
        offset: the segment's first element in the bucket.
        step: the step.
    """
    local = gradient[torch.tensor(index_set, dtype=torch.int64)]
    nonzero = [position for position, value in enumerate(local.tolist()) if value != 0]
    bits = bytearray(8 * -(-len(index_set) // 64))
    for position in nonzero:
        bits[position // 8] |= 1 << position % 8
    bitmap = padded(bytes(bits)) + padded(local[nonzero])
    dense = padded(local)
    form, sections = (0, bitmap) if len(bitmap) < len(dense) else (1, dense)
    sub_header = struct.pack("<IIQIIQ", *hash_fields, form, len(index_set))
    dtype = (torch.float32, torch.bfloat16, torch.float16).index(gradient.dtype)
    header = Header(
        format=FORMAT_HASH_BITMAP,
        dtype=dtype,
        numel=gradient.numel(),
        nnz=len(nonzero),
        payload_bytes=len(sub_header) + len(sections),
        offset=offset,
        step=step,
    )
    return header.pack() + sub_header + sections


def decode(record: bytes, index_set: list[int], dtype: torch.dtype) -> list[tuple[int, float]]:
    """(element, value) of every set bit of a well-formed record, in the order of the positions."""
    header = Header.unpack(record, rank=0)
    form = struct.unpack_from("<IIQIIQ", record, 48)[4]
    at, positions = 80, len(index_set)
    if form == 0:
        bits = record[at : at + 8 * -(-positions // 64)]
        chosen = [p for p in range(positions) if bits[p // 8] >> p % 8 & 1]
        at += pad16(len(bits))
        count = header.nnz
    else:
        chosen, count = list(range(positions)), positions
    raw = bytearray(record[at : at + count * dtype.itemsize])
    values = torch.frombuffer(raw, dtype=dtype).tolist() if raw else []
    pairs = zip((index_set[p] for p in chosen), values, strict=True)
    return [(element, value) for element, value in pairs if value != 0]
