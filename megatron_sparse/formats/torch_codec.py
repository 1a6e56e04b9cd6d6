"""The message codec in plain torch operations, on any device.

For CUDA tensors that the compiled codec does not serve (`codec_choice`), and for comparison in the
benchmarks. Dense and COO records only, byte for byte those of the compiled codec. The host waits
for the device once for each record that it encodes or decodes: it writes and reads the headers.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.arguments import GRAD_DTYPES
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.rounding import round_into
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    HEADER_BYTES,
    pad16,
    payload_bytes,
    wrong_field,
)


def encode(
    grad_N: torch.Tensor,
    segments: Segments,
    nnz_S: torch.Tensor,
    spec: RecordSpec,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes one record for each segment into `out`, which has room; see `cuda_ext.ops.encode`.

    With `FORMAT_ADAPTIVE` the choice is between dense and COO.

    Returns:
        int64 record sizes on the CPU.

    Raises:
        ExtensionError: another format is asked for.
    """
    value_dtype, record_format = spec.value_dtype, spec.record_format
    if record_format not in (FORMAT_ADAPTIVE, FORMAT_DENSE, FORMAT_COO):
        raise ExtensionError(
            "encode: torch operations do not write this format",
            expected="-1 (adaptive), 0 (dense) or 1 (COO)",
            got=record_format,
            remedy="set scheme.format to auto, coo or dense, or build the extension's CUDA part",
        )
    dtype, sizes, position = GRAD_DTYPES[value_dtype], [], 0
    for (first, last), keep, nnz in zip(
        pairwise(segments.offsets.tolist()), segments.dense.tolist(), nnz_S.tolist(), strict=True
    ):
        values, numel = grad_N[first:last], last - first
        chosen, payload = FORMAT_DENSE, payload_bytes(FORMAT_DENSE, numel, nnz, value_dtype)
        coo_payload = payload_bytes(FORMAT_COO, numel, nnz, value_dtype)
        may_be_coo = record_format != FORMAT_DENSE and not keep
        if may_be_coo and coo_payload < payload:
            chosen, payload = FORMAT_COO, coo_payload
        header = Header(chosen, value_dtype, numel, nnz, payload, first, spec.step)
        sizes.append(HEADER_BYTES + payload)
        record = out[position : position + sizes[-1]].zero_()  # the padding of sections
        position += sizes[-1]
        record[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        values_at = HEADER_BYTES
        if chosen == FORMAT_COO:  # the indices come before the values
            index_K = torch.nonzero_static(values, size=nnz).squeeze(1)
            record[values_at : values_at + 4 * nnz].view(torch.int32).copy_(index_K)
            values_at, values = HEADER_BYTES + pad16(4 * nnz), values[index_K]
        value_bytes = values.numel() * dtype.itemsize
        round_into(record[values_at : values_at + value_bytes].view(dtype), values)
    return torch.tensor(sizes, dtype=torch.int64)


def decode_add_(
    acc_M: torch.Tensor,
    message: torch.Tensor,
    expected: Expected,
    *,
    fresh: bool = False,
) -> None:
    """Checks every record and index of a peer's message, then adds its values to `acc_M`.

    Args:
        acc_M: fp32; element 0 is the first element of the first segment. Mutated.
        message: uint8, the records of all segments, back to back; not trusted.
        expected: the facts that the records must state, the segments among them.
        fresh: treat the segments' part of `acc_M` as zero and ignore its content.

    Raises:
        WireFormatError: names the rank and the field; `acc_M` is untouched.
    """
    offsets, rank = expected.segment_offsets.tolist(), expected.rank
    base = offsets[0]
    dtype = GRAD_DTYPES[expected.value_dtype]
    # A piece: its begin and end in `acc_M`, its indices (None if it is dense), and its values.
    position, pieces = 0, []
    # On the device, so that one wait at the end tells about the indices of all records.
    indices_fit = torch.ones((), dtype=torch.bool, device=acc_M.device)
    for first, last in pairwise(offsets):
        header = Header.unpack(bytes(message[position : position + HEADER_BYTES].cpu()), rank)
        header.check(
            expected.value_dtype,
            last - first,
            first,
            expected.step,
            message.numel() - position,
            rank,
        )
        sections_at = position + HEADER_BYTES
        if header.format == FORMAT_COO:
            values_at = sections_at + pad16(4 * header.nnz)
            index_K = message[sections_at : sections_at + 4 * header.nnz].view(torch.int32).long()
            if header.nnz:
                ascending = (index_K[1:] > index_K[:-1]).all()
                inside = (index_K[0] >= 0) & (index_K[-1] < last - first)  # if they ascend
                indices_fit &= ascending & inside
            values_K = message[values_at : values_at + header.nnz * dtype.itemsize].view(dtype)
            pieces.append((first - base, last - base, index_K, values_K))
        else:
            value_bytes = (last - first) * dtype.itemsize
            values = message[sections_at : sections_at + value_bytes].view(dtype)
            pieces.append((first - base, last - base, None, values))
        position += HEADER_BYTES + header.payload_bytes
    if position != message.numel():
        raise wrong_field(rank, "size", f"{position} bytes", message.numel())
    if not indices_fit:
        raise wrong_field(
            rank, "indices", "strictly ascending indices inside the segment", "others"
        )
    if fresh:
        acc_M[: offsets[-1] - base].zero_()
    for first, last, index_K, values in pieces:
        if index_K is None:
            acc_M[first:last].add_(values)
        else:
            acc_M[first:last].index_add_(0, index_K, values.float())
