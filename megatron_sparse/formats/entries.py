"""The entries of a message that this rank made, as indices and values.

On CUDA the host waits for a copy of all headers, and for each dense record.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import VALUE_DTYPES, Message
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, HEADER_BYTES, pad16


def entries(message: Message) -> tuple[torch.Tensor, torch.Tensor]:
    """The non-zero elements of a message; `-0.0` is zero, NaN is not.

    Args:
        message: of COO and dense records, as `scheme.format=coo` makes them; made by this rank.

    Returns:
        int64 ascending elements of the bucket, and their values in the wire's dtype, on the
        message's device.

    Example:
        A segment at offset 4 whose COO record holds index 1 gives element 5.
    """
    dtype = VALUE_DTYPES[message.value_dtype]
    offsets = message.layout.segment_offsets.tolist()
    indices, values = [], []
    parts = message.buffer[: message.nbytes].split(message.segment_bytes)
    if not parts or not message.segment_bytes:
        nothing = message.buffer.new_empty(0, dtype=torch.int64)
        return nothing, nothing.to(dtype)
    heads = torch.stack([record[:HEADER_BYTES] for record in parts]).cpu().numpy()
    for record, head, (start, stop) in zip(parts, heads, pairwise(offsets), strict=True):
        header = Header.unpack(head.tobytes(), rank=0, payload_sum=None)
        sections = record[HEADER_BYTES:]
        if header.format == FORMAT_DENSE:
            dense = sections[: (stop - start) * dtype.itemsize].view(dtype)
            index_K = dense.nonzero().squeeze(1)
            value_K = dense[index_K]
        else:
            assert header.format == FORMAT_COO, "the scheme asks for COO"
            index_K = sections[: 4 * header.nnz].view(torch.int32).long()
            at = pad16(4 * header.nnz)
            value_K = sections[at : at + header.nnz * dtype.itemsize].view(dtype)
        indices.append(index_K + start)
        values.append(value_K)
    return torch.cat(indices), torch.cat(values)
