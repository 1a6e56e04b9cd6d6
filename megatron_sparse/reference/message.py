"""Messages, record by record: the oracle of `encode` and `decode_add_` of `cuda_ext.ops`."""

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import blocks, numbers_at, padded, pici, rice
from megatron_sparse.reference.checksum import opened, sealed
from megatron_sparse.reference.prune import BF16, DTYPES, with_one_nan
from megatron_sparse.wire import (
    FLAG_PICI_LINEAR,
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
    pad16,
    wrong_field,
)

_DECODERS = {FORMAT_PICI: pici.decode, FORMAT_BLOCKS: blocks.decode, FORMAT_RICE: rice.decode}
_FORMATS = (FORMAT_DENSE, FORMAT_COO, *_DECODERS)


def encode(
    grad_N: torch.Tensor, segments: Segments, nnz_S: torch.Tensor, spec: RecordSpec
) -> list[bytes]:
    """Encodes each segment as a record: dense, unless a sparse format of `spec` is smaller.

    Arguments as of `cuda_ext.ops.encode`. Of two sparse formats of equal size the first is taken.
    """
    value_dtype, wanted_format = spec.value_dtype, spec.record_format
    records = []
    for (begin, end), is_always_dense, nnz in zip(
        pairwise(segments.offsets.tolist()), segments.dense.tolist(), nnz_S.tolist(), strict=True
    ):
        grad = grad_N[begin:end]
        kept = grad.ne(0)  # includes elements that the rounding below makes zero
        values = grad
        if values.dtype != DTYPES[value_dtype]:
            values = with_one_nan(values, DTYPES[value_dtype])
        chosen, payload = FORMAT_DENSE, padded(values)
        wanted = (FORMAT_COO, FORMAT_PICI) if wanted_format == FORMAT_ADAPTIVE else (wanted_format,)
        for sparse in () if is_always_dense else wanted:
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
    """Adds a message's records to fp32 `acc_M`; arguments as of `cuda_ext.ops.decode_add_`.

    Raises:
        WireFormatError: names the rank and the field; `acc_M` may be partly changed.
    """
    rank, position = expected.rank, 0
    if expected.checksum:
        message = opened(message)
    for begin, end in pairwise(expected.segment_offsets.tolist()):
        header = Header.unpack(message[position : position + HEADER_BYTES], rank)
        dtype, formats = expected.value_dtype, _FORMATS
        if dtype in RICE_BITS and header.format != FORMAT_RICE:
            # A kept segment's record is dense in bf16 where the other records are quantised.
            dtype, formats = BF16, (FORMAT_DENSE,)
        available = len(message) - position
        header.check(dtype, end - begin, begin, expected.step, available, rank, formats)
        payload_at = position + HEADER_BYTES
        position = payload_at + header.payload_bytes
        index, values = _entries(header, message[payload_at:position], rank)
        acc_M[begin - base : end - base][index] += values.float()
    if position != len(message):
        raise wrong_field(rank, "size", f"{position} bytes", len(message))


def _sections(
    record_format: int, values: torch.Tensor, kept: torch.Tensor, spec: RecordSpec
) -> bytes:
    """The payload of one segment's record, of values that are not quantised (see `rice_message`).

    Args:
        record_format: Pici, blocks, dense, Rice, or else COO: all kept positions, then all values.
        values: the segment's elements, in the record's dtype.
        kept: bool, the elements to send; ignored by a dense record.
        spec: the order inside a tile of Pici, the size of a block, the chunk size of Rice.
    """
    if record_format == FORMAT_PICI:
        return pici.encode(values, kept, linear=not spec.paper_order)
    if record_format == FORMAT_BLOCKS:
        return blocks.encode(values, kept, spec.block_size)
    if record_format == FORMAT_DENSE:
        return padded(values)
    index = kept.nonzero().squeeze(1)
    if record_format == FORMAT_RICE:
        record, _ = rice.encode(values[index], index, range(values.numel()), spec)
        return record[HEADER_BYTES:]
    return padded(index.int()) + padded(values[index])  # COO


def _entries(
    header: Header, payload: bytes, rank: int
) -> tuple[list[int] | slice | torch.Tensor, torch.Tensor]:
    """Decodes a record's payload: its elements in the segment, each once, and their values.

    Raises:
        WireFormatError: names the rank and the field that is wrong.
    """
    if header.format in _DECODERS:
        return _DECODERS[header.format](header, payload, rank)
    dtype = DTYPES[header.dtype]
    if header.format == FORMAT_DENSE:
        return slice(None), numbers_at(payload, 0, header.numel, dtype)
    index = numbers_at(payload, 0, header.nnz, torch.int32).tolist()
    # COO's indices ascend strictly, inside the segment.
    for before, after in pairwise([-1, *index, header.numel]):
        if before >= after:
            raise wrong_field(rank, "indices", f"above {before}", after)
    return index, numbers_at(payload, pad16(4 * header.nnz), header.nnz, dtype)
