"""Non-zero blocks (OmniReduce) one block at a time: the oracle of the blocks codec.

Sections of a record: a sub-header {u32 block_size, u32 n_blocks, u64 zero}, the indices of the
blocks that hold something (uint32, ascending), and their values, zeros included; a block that
reaches past the segment is filled up with zeros.
"""

from __future__ import annotations

import struct

import torch

from megatron_sparse.reference import padded
from megatron_sparse.wire import pad16

_SUBHEADER = struct.Struct("<IIQ")


def encode(values_N: torch.Tensor, kept_N: torch.Tensor, block_size: int) -> bytes:
    """The sections of one segment.

    Args:
        values_N: the segment's elements, in the wire's dtype; elements not kept are sent as 0.
        kept_N: bool, which of them travel.
        block_size: elements of a block.
    """
    sent_N = values_N.clone()
    sent_N[~kept_N] = 0
    indices, blocks = [], []
    for index in range(-(-values_N.numel() // block_size)):
        inside = slice(index * block_size, (index + 1) * block_size)
        if kept_N[inside].any():
            indices.append(index)
            block = torch.zeros(block_size, dtype=values_N.dtype)
            block[: sent_N[inside].numel()] = sent_N[inside]
            blocks.append(block.view(torch.uint8).numpy().tobytes())
    index_bytes = struct.pack(f"<{len(indices)}I", *indices)
    values = b"".join(blocks)
    return _SUBHEADER.pack(block_size, len(indices), 0) + padded(index_bytes) + padded(values)


def decode(payload: bytes, numel: int, dtype: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """The elements of a well-formed payload's blocks, ascending, and their values.

    Raises:
        ValueError: indices do not ascend, or one lies beyond the segment.
    """
    block_size, n_blocks, _ = _SUBHEADER.unpack_from(payload)
    indices = struct.unpack_from(f"<{n_blocks}I", payload, _SUBHEADER.size)
    at = _SUBHEADER.size + pad16(4 * n_blocks)
    elements, chosen = [], []
    for position, index in enumerate(indices):
        if index * block_size >= numel or (position and index <= indices[position - 1]):
            raise ValueError(f"block indices {indices} are not ascending below {numel} elements")
        for inside in range(min(block_size, numel - index * block_size)):
            elements.append(index * block_size + inside)
            chosen.append(position * block_size + inside)
    if not chosen:
        return [], torch.empty(0, dtype=dtype)
    data = bytearray(payload[at : at + n_blocks * block_size * dtype.itemsize])
    return elements, torch.frombuffer(data, dtype=dtype)[chosen]
