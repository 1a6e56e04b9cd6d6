"""The hash bitmap bit by bit (ZEN, Algorithm 2): the oracle of `formats.hash_bitmap`."""

import struct

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import padded
from megatron_sparse.wire import FORMAT_HASH_BITMAP


def encode(
    gradient: torch.Tensor,
    elements: list[int],
    hash_fields: tuple[int, int, int],
    offset: int,
    step: int,
) -> bytes:
    """Encodes one partition of a segment as a record.

    Its payload is a bitmap and the non-zero values, or all values where these are not larger.

    Args:
        gradient: the whole segment; `elements` are taken from it.
        elements: those of the partition, in the order of their positions.
        hash_fields: number of the partition, number of partitions, and seed of the hash.
        offset: the segment's first element in the bucket.
        step: the step.
    """
    values = gradient[torch.tensor(elements, dtype=torch.int64)]
    nonzero = [position for position, value in enumerate(values.tolist()) if value != 0]
    bits = bytearray(8 * -(-len(elements) // 64))  # whole words of 64 bits
    for position in nonzero:
        bits[position // 8] |= 1 << position % 8
    bitmap = padded(bytes(bits)) + padded(values[nonzero])
    dense = padded(values)
    form, sections = (0, bitmap) if len(bitmap) < len(dense) else (1, dense)  # 0 bitmap, 1 dense
    sub_header = struct.pack("<IIQIIQ", *hash_fields, 0, form, len(elements))  # hash 0: permutation
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
