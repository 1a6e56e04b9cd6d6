"""The message codec, record by record: the oracle of `encode` and `decode_add_`."""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.formats.header import (
    FORMAT_COO,
    FORMAT_DENSE,
    HEADER_BYTES,
    Header,
    pad16,
    payload_bytes,
    wrong_field,
)
from megatron_sparse.reference.prune import with_one_nan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encode(
    grad_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz_S: torch.Tensor,
    value_dtype: int,
    epoch: int,
) -> list[bytes]:
    """The record of each segment; arguments as of `cuda_ext.ops.encode`."""
    records = []
    for (begin, end), keep, nnz in zip(
        pairwise(segment_offsets.tolist()), segment_dense.tolist(), nnz_S.tolist(), strict=True
    ):
        numel = end - begin
        sizes = {
            form: payload_bytes(form, numel, nnz, value_dtype)
            for form in (FORMAT_DENSE, FORMAT_COO)
        }
        sparse = not keep and sizes[FORMAT_COO] < sizes[FORMAT_DENSE]
        form = FORMAT_COO if sparse else FORMAT_DENSE
        header = Header(form, value_dtype, numel, nnz, sizes[form], begin, epoch)
        values = grad_N[begin:end]
        sections = []
        if sparse:
            index = values.ne(0).nonzero().squeeze(1)
            sections.append(index.int())
            values = values[index]
        if values.dtype != DTYPES[value_dtype]:
            values = with_one_nan(values, DTYPES[value_dtype])
        sections.append(values)
        records.append(header.pack() + b"".join(map(_padded, sections)))
    return records


def decode_add_(
    acc_M: torch.Tensor,
    message: bytes,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    epoch: int,
    base: int,
    *,
    rank: int,
) -> None:
    """Adds the records to fp32 `acc_M`; arguments as of `cuda_ext.ops.decode_add_`.

    Raises:
        WireFormatError: names the rank and the field; `acc_M` may be partly changed.
    """
    dtype, position = DTYPES[value_dtype], 0
    for begin, end in pairwise(segment_offsets.tolist()):
        header = Header.unpack(message[position : position + HEADER_BYTES], rank)
        header.check(value_dtype, end - begin, begin, epoch, len(message) - position, rank)
        at = position + HEADER_BYTES
        target = acc_M[begin - base : end - base]
        if header.format == FORMAT_DENSE:
            target += _read(message, at, end - begin, dtype).float()
        else:
            index = _read(message, at, header.nnz, torch.int32).tolist()
            for before, after in pairwise([-1, *index, end - begin]):
                if before >= after:
                    raise wrong_field(rank, "indices", f"above {before}", after)
            values = _read(message, at + pad16(4 * header.nnz), header.nnz, dtype)
            target[index] += values.float()
        position += HEADER_BYTES + header.payload_bytes
    if position != len(message):
        raise wrong_field(rank, "size", f"{position} bytes", len(message))


def _padded(section: torch.Tensor) -> bytes:
    data = section.contiguous().view(torch.uint8).numpy().tobytes()
    return data.ljust(pad16(len(data)), b"\0")


def _read(message: bytes, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(message[at : at + numel * dtype.itemsize]), dtype=dtype)
