"""Non-zero blocks (OmniReduce) one block at a time: the oracle of the blocks codec.

Sections of a record: a sub-header {u32 block_size, u32 n_blocks, u64 zero}, the indices of the
blocks that hold something (uint32, ascending), and their values, zeros included; a block that
reaches past the segment is filled up with zeros.
"""

import struct

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import numbers_at, padded
from megatron_sparse.reference.prune import DTYPES
from megatron_sparse.wire import BLOCKS_SUBHEADER, blocks_payload_bytes, pad16, wrong_field


def encode(values_N: torch.Tensor, kept_N: torch.Tensor, block_size: int) -> bytes:
    """Encodes one segment; returns the sections of its record.

    Args:
        values_N: the segment's elements, in the record's dtype.
        kept_N: bool, the elements to send; the others of a block are sent as 0.
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
    return BLOCKS_SUBHEADER.pack(block_size, len(indices), 0) + padded(index_bytes) + padded(values)


def decode(header: Header, payload: bytes, rank: int) -> tuple[list[int], torch.Tensor]:
    """Decodes the sections of a record; returns the elements of its blocks, and their values.

    The elements ascend, and include those that are 0.

    Raises:
        WireFormatError: names the field that is wrong.
    """
    block_size, n_blocks, zero = BLOCKS_SUBHEADER.unpack_from(payload)
    if not block_size or zero:
        raise wrong_field(rank, "block_size", "above 0, then zeros", (block_size, zero))
    if n_blocks > -(-header.numel // block_size) or header.nnz > n_blocks * block_size:
        raise wrong_field(rank, "n_blocks", f"those of {header.numel} elements", n_blocks)
    demanded = blocks_payload_bytes(n_blocks, block_size, header.dtype)
    if header.payload_bytes != demanded:
        raise wrong_field(rank, "payload_bytes", demanded, header.payload_bytes)
    indices = struct.unpack_from(f"<{n_blocks}I", payload, BLOCKS_SUBHEADER.size)
    elements: list[int] = []
    for position, index in enumerate(indices):
        begin = index * block_size
        ascends = position == 0 or index > indices[position - 1]
        if begin >= header.numel or not ascends:
            raise wrong_field(rank, "indices", f"ascending below {header.numel} elements", indices)
        elements += range(begin, min(begin + block_size, header.numel))
    # Only the last block may reach past the segment's end.
    dtype, values_at = DTYPES[header.dtype], BLOCKS_SUBHEADER.size + pad16(4 * n_blocks)
    end = values_at + n_blocks * block_size * dtype.itemsize
    if any(payload[values_at + len(elements) * dtype.itemsize : end]):
        raise wrong_field(rank, "block padding", "zeros after the segment", "others")
    return elements, numbers_at(payload, values_at, len(elements), dtype)
