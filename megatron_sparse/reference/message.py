"""The message codec, record by record: the oracle of `encode` and `decode_add_`."""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import blocks, padded, pici, rice
from megatron_sparse.reference.checksum import opened, sealed
from megatron_sparse.reference.prune import BF16, DTYPES, with_one_nan
from megatron_sparse.wire import (
    BLOCKS_SUBHEADER,
    FLAG_PICI_LINEAR,
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
    blocks_payload_bytes,
    pad16,
    wrong_field,
)


def encode(
    grad_N: torch.Tensor, segments: Segments, nnz_S: torch.Tensor, spec: RecordSpec
) -> list[bytes]:
    """The record of each segment; arguments as of `cuda_ext.ops.encode`."""
    value_dtype, wanted_format = spec.value_dtype, spec.record_format
    records = []
    for (begin, end), keep, nnz in zip(
        pairwise(segments.offsets.tolist()), segments.dense.tolist(), nnz_S.tolist(), strict=True
    ):
        grad = grad_N[begin:end]
        values, kept = grad, grad.ne(0)
        if values.dtype != DTYPES[value_dtype]:
            values = with_one_nan(values, DTYPES[value_dtype])
        chosen, payload = FORMAT_DENSE, padded(values)
        wanted = (FORMAT_COO, FORMAT_PICI) if wanted_format == FORMAT_ADAPTIVE else (wanted_format,)
        for sparse in wanted if not keep else ():
            candidate = _sections(sparse, values, kept, spec)
            if len(candidate) < len(payload):
                chosen, payload = sparse, candidate
        flags = FLAG_PICI_LINEAR if chosen == FORMAT_PICI and not spec.paper_order else 0
        header = Header(
            chosen, value_dtype, end - begin, nnz, len(payload), begin, spec.step, flags
        )
        record = header.pack() + payload
        records.append(sealed(record) if spec.checksum else record)
    return records


def decode_add_(acc_M: torch.Tensor, message: bytes, expected: Expected, base: int) -> None:
    """Adds the records to fp32 `acc_M`; arguments as of `cuda_ext.ops.decode_add_`.

    Raises:
        WireFormatError: names the rank and the field; `acc_M` may be partly changed.
    """
    value_dtype, rank, position = expected.value_dtype, expected.rank, 0
    if expected.checksum:
        message = opened(message)
    plain_dtype = value_dtype
    plain_formats = (FORMAT_DENSE, FORMAT_COO, FORMAT_PICI, FORMAT_BLOCKS)
    if value_dtype in RICE_BITS:  # beside Rice records there are only those of kept segments
        plain_dtype, plain_formats = BF16, (FORMAT_DENSE,)
    dtype = DTYPES[plain_dtype]
    for begin, end in pairwise(expected.segment_offsets.tolist()):
        header = Header.unpack(message[position : position + HEADER_BYTES], rank)
        target = acc_M[begin - base : end - base]
        if header.format == FORMAT_RICE:
            place = rice.SegmentPlace(end - begin, begin, expected.step)
            index_K, values_K = rice.decode(message[position:], place, value_dtype, rank)
            target[index_K] += values_K
            position += HEADER_BYTES + header.payload_bytes
            continue
        available, numel = len(message) - position, end - begin
        header.check(plain_dtype, numel, begin, expected.step, available, rank, plain_formats)
        at = position + HEADER_BYTES
        position = at + header.payload_bytes
        payload = message[at:position]
        if header.format == FORMAT_DENSE:
            target += _read(payload, 0, numel, dtype).float()
        else:
            index, values = _entries(header, payload, dtype, rank)
            target[index] += values.float()
    if position != len(message):
        raise wrong_field(rank, "size", f"{position} bytes", len(message))


def _sections(
    record_format: int, values: torch.Tensor, kept: torch.Tensor, spec: RecordSpec
) -> bytes:
    if record_format == FORMAT_PICI:
        return pici.encode(values, kept, linear=not spec.paper_order)
    if record_format == FORMAT_BLOCKS:
        return blocks.encode(values, kept, spec.block_size)
    if record_format == FORMAT_DENSE:
        return padded(values)
    index = kept.nonzero().squeeze(1)
    return padded(index.int()) + padded(values[index])


def _entries(
    header: Header, payload: bytes, dtype: torch.dtype, rank: int
) -> tuple[list[int], torch.Tensor]:
    """The elements that a sparse record holds, each once, and their values."""
    if header.format == FORMAT_PICI:
        linear = bool(header.flags & FLAG_PICI_LINEAR)
        try:
            return pici.decode(payload, header.numel, header.nnz, dtype, linear=linear)
        except ValueError as error:
            raise wrong_field(rank, "prefix or words", "those of its bits", error) from error
    if header.format == FORMAT_BLOCKS:
        return _blocks_entries(header, payload, dtype, rank)
    index = _read(payload, 0, header.nnz, torch.int32).tolist()
    for before, after in pairwise([-1, *index, header.numel]):
        if before >= after:
            raise wrong_field(rank, "indices", f"above {before}", after)
    return index, _read(payload, pad16(4 * header.nnz), header.nnz, dtype)


def _blocks_entries(
    header: Header, payload: bytes, dtype: torch.dtype, rank: int
) -> tuple[list[int], torch.Tensor]:
    block_size, n_blocks, zero = BLOCKS_SUBHEADER.unpack_from(payload)
    if not block_size or zero:
        raise wrong_field(rank, "block_size", "above 0, then zeros", (block_size, zero))
    if n_blocks > -(-header.numel // block_size) or header.nnz > n_blocks * block_size:
        raise wrong_field(rank, "n_blocks", f"those of {header.numel} elements", n_blocks)
    demanded = blocks_payload_bytes(n_blocks, block_size, header.dtype)
    if header.payload_bytes != demanded:
        raise wrong_field(rank, "payload_bytes", demanded, header.payload_bytes)
    try:
        index, values = blocks.decode(payload, header.numel, dtype)
    except ValueError as error:
        raise wrong_field(rank, "indices", "ascending, in range", error) from error
    end = BLOCKS_SUBHEADER.size + pad16(4 * n_blocks) + n_blocks * block_size * dtype.itemsize
    behind = n_blocks * block_size - len(index)
    if any(payload[end - behind * dtype.itemsize : end]):
        raise wrong_field(rank, "block padding", "zeros behind the segment", "others")
    return index, values


def _read(data: bytes, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data[at : at + numel * dtype.itemsize]), dtype=dtype)
