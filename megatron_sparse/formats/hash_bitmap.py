"""The hash bitmap (ZEN, Algorithm 2): one server's partition of a segment, for the Pull.

A server holds the sums of its partition by position; one bit says whether a position is zero, and
the values of those that are not follow in order. With partition size P = numel / n this costs
P / 8 bytes and the values, so the bitmaps of all n servers together cost numel / 8 bytes (the
paper's |G| / 32 fp32 values), whatever n is; headers and padding add under 112 bytes each.
Where the values of all positions are not larger, they travel without a bitmap: the dense form.

Layout: docs/wire-format.md. Decoding needs the partition hash that encoded: with `PermutationHash`
elements are computed, with `IndexSetHash` (the paper's way) looked up. CPU tensors only.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.hash_partition import PartitionHash
from megatron_sparse.formats.header import (
    FORMAT_HASH_BITMAP,
    HEADER_BYTES,
    VALUE_BYTES,
    Header,
    pad16,
    wrong_field,
)
from megatron_sparse.formats.torch_codec import DTYPE_OF_CODE

SUB_HEADER_BYTES = 32
FORM_BITMAP, FORM_DENSE = range(2)

_SUB_HEADER = struct.Struct("<IIQIIQ")
_SUB_HEADER_FIELDS = ("partition", "partitions", "seed", "hash", "form", "positions")
_SECTIONS_AT = HEADER_BYTES + SUB_HEADER_BYTES
_CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


class _Sections(NamedTuple):
    """What a record holds; the bitmap is not compared with nnz yet."""

    words: torch.Tensor
    values: torch.Tensor
    nnz: int


def record_bytes(positions: int, nnz: int, value_dtype: torch.dtype) -> int:
    """Bytes of a record: the smaller of its two forms.

    Args:
        positions: elements of the partition.
        nnz: how many of them are not zero.
        value_dtype: fp32, bf16 or fp16.

    Example:
        >>> record_bytes(1000, 10, torch.float32)  # 48 + 32 + 128 (16 words) + 48 (40, padded)
        256
    """
    bitmap, dense = _payload_sizes(positions, nnz, VALUE_BYTES[_code_of(value_dtype)])
    return _SECTIONS_AT + min(bitmap, dense)


def encode(
    values_P: torch.Tensor,
    partition_hash: PartitionHash,
    partition: int,
    *,
    offset: int,
    epoch: int,
) -> torch.Tensor:
    """Writes the record of one partition.

    Args:
        values_P: fp32, bf16 or fp16, by position; travel bit for bit, except that in the bitmap
            form `-0.0` is zero and is not sent. Only read.
        partition_hash: h0, the same on all ranks.
        partition: whose values they are.
        offset: the segment's first element in the bucket.
        epoch: the step; its lower 32 bits travel.

    Returns:
        uint8; a view of a buffer that would have room for all values.

    Raises:
        ExtensionError: the values are not one for each position, have another dtype, or are not
            contiguous on the CPU.

    Example:
        >>> from megatron_sparse.formats.hash_partition import PermutationHash
        >>> h = PermutationHash(numel=8, partitions=2, seed=0)
        >>> record = encode(torch.tensor([0.0, 2.0, 0.0, 0.0]), h, 1, offset=0, epoch=3)
        >>> element = h.element_at(1, torch.tensor([1]))
        >>> got, values = decode(record, h, 1, torch.float32, offset=0, epoch=3, rank=0)
        >>> bool(got == element), values
        (True, tensor([2.]))
    """
    code = _code_of(values_P.dtype)
    positions = partition_hash.partition_numel(partition)
    if values_P.numel() != positions:
        raise ExtensionError(
            f"encode: partition {partition} has another size",
            expected=f"{positions} values",
            got=values_P.numel(),
        )
    word_bytes, value_bytes = 8 * -(-positions // 64), VALUE_BYTES[code]
    values_at = _SECTIONS_AT + pad16(word_bytes)
    out = torch.empty(values_at + pad16(positions * value_bytes), dtype=torch.uint8)
    nnz = hash_ops.bitmap_pack(
        values_P,
        out[_SECTIONS_AT : _SECTIONS_AT + word_bytes],
        out[values_at : values_at + positions * value_bytes],
    )
    bitmap, dense = _payload_sizes(positions, nnz, value_bytes)
    if bitmap < dense:
        form, size = FORM_BITMAP, _SECTIONS_AT + bitmap
        out[_SECTIONS_AT + word_bytes : values_at] = 0
        out[values_at + nnz * value_bytes : size] = 0
    else:
        form, size = FORM_DENSE, _SECTIONS_AT + dense
        end = _SECTIONS_AT + positions * value_bytes
        out[_SECTIONS_AT:end] = values_P.view(torch.uint8)
        out[end:size] = 0
    header = Header(
        format=FORMAT_HASH_BITMAP, dtype=code, numel=partition_hash.numel, nnz=nnz,
        payload_bytes=size - HEADER_BYTES, offset=offset, epoch=epoch,
    )  # fmt: skip
    sub_header = _SUB_HEADER.pack(
        partition, partition_hash.partitions, partition_hash.seed, partition_hash.code, form,
        positions,
    )  # fmt: skip
    head = bytearray(header.pack() + sub_header)
    out[:_SECTIONS_AT] = torch.frombuffer(head, dtype=torch.uint8)
    return out[:size]


def decode(
    record: torch.Tensor,
    partition_hash: PartitionHash,
    partition: int,
    value_dtype: torch.dtype,
    *,
    offset: int,
    epoch: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and values of a record, in the order of their positions.

    Args:
        record: uint8, exactly one record, not trusted.
        partition_hash: h0.
        partition: the one that is expected.
        value_dtype: fp32, bf16 or fp16.
        offset: the segment's first element in the bucket.
        epoch: the step.
        rank: the sender, for the error's text.

    Returns:
        int64 elements of the segment, different from one another but not ascending; and their
        values, possibly a view of the record.

    Raises:
        WireFormatError: names the rank and the field that is wrong.
        ExtensionError: `record` is not a 1-D uint8 CPU tensor, or the dtype has no code.
    """
    code = _code_of(value_dtype)
    words, values, nnz = _read(record, partition_hash, partition, code, offset, epoch, rank)
    elements, field, found = hash_ops.bitmap_elements(
        words, nnz, partition_hash.numel, partition, partition_hash.partitions,
        partition_hash.seed, partition_hash.index_set(partition),
    )  # fmt: skip
    _refuse(field, found, nnz, rank)
    return elements, _as_values(values, value_dtype)


def decode_add_(
    acc_M: torch.Tensor,
    record: torch.Tensor,
    partition_hash: PartitionHash,
    partition: int,
    value_dtype: torch.dtype,
    *,
    offset: int,
    epoch: int,
    rank: int,
) -> None:
    """Adds the values of a record to their elements; never materialises the indices.

    Args:
        acc_M: fp32, the whole segment. Mutated.
        record: uint8, exactly one record, not trusted.
        partition_hash: h0.
        partition: the one that is expected.
        value_dtype: fp32, bf16 or fp16.
        offset: the segment's first element in the bucket.
        epoch: the step.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field that is wrong; `acc_M` is untouched.
        ExtensionError: `acc_M` is not the whole segment, or not fp32.
    """
    if acc_M.numel() != partition_hash.numel:
        raise ExtensionError(
            "decode_add_: acc has the wrong length",
            expected=partition_hash.numel,
            got=acc_M.numel(),
        )
    code = _code_of(value_dtype)
    words, values, nnz = _read(record, partition_hash, partition, code, offset, epoch, rank)
    field, found = hash_ops.bitmap_add_(
        acc_M, words, values, code, nnz, partition, partition_hash.partitions,
        partition_hash.seed, partition_hash.index_set(partition),
    )  # fmt: skip
    _refuse(field, found, nnz, rank)


def _payload_sizes(positions: int, nnz: int, value_bytes: int) -> tuple[int, int]:
    """Bytes of the sections behind the sub-header, in bitmap and in dense form."""
    bitmap = pad16(8 * -(-positions // 64)) + pad16(nnz * value_bytes)
    return bitmap, pad16(positions * value_bytes)


def _read(
    record: torch.Tensor,
    partition_hash: PartitionHash,
    partition: int,
    code: int,
    offset: int,
    epoch: int,
    rank: int,
) -> _Sections:
    """Compares every field with what is expected; afterwards the sections lie in the record."""
    if record.dtype != torch.uint8 or record.dim() != 1 or record.device.type != "cpu":
        raise ExtensionError(
            "this is no record",
            expected="a 1-D uint8 tensor on the CPU",
            got=f"{record.dtype} {tuple(record.shape)} on {record.device}",
        )
    positions = partition_hash.partition_numel(partition)
    head = record[:_SECTIONS_AT].numpy().tobytes()
    header = Header.unpack(head, rank)
    _expect(rank, "format", FORMAT_HASH_BITMAP, header.format)
    _expect(rank, "dtype", code, header.dtype)
    _expect(rank, "flags", 0, header.flags)
    _expect(rank, "epoch", epoch % 2**32, header.epoch)
    _expect(rank, "offset", offset, header.offset)
    _expect(rank, "numel", partition_hash.numel, header.numel)
    if header.nnz > positions:
        raise wrong_field(rank, "nnz", f"at most {positions}", header.nnz)
    if len(head) < _SECTIONS_AT:
        raise wrong_field(rank, "size", f"{_SECTIONS_AT} bytes and more", len(head))
    sub_header = _SUB_HEADER.unpack_from(head, HEADER_BYTES)
    form = sub_header[_SUB_HEADER_FIELDS.index("form")]
    if form not in (FORM_BITMAP, FORM_DENSE):
        raise wrong_field(rank, "form", "0 (bitmap) or 1 (dense)", form)
    wanted = (
        partition, partition_hash.partitions, partition_hash.seed, partition_hash.code, form,
        positions,
    )  # fmt: skip
    for field, expected, got in zip(_SUB_HEADER_FIELDS, wanted, sub_header, strict=True):
        _expect(rank, field, expected, got)
    value_bytes, nnz = VALUE_BYTES[code], header.nnz
    sizes = _payload_sizes(positions, nnz, value_bytes)
    _expect(rank, "payload_bytes", SUB_HEADER_BYTES + sizes[form], header.payload_bytes)
    _expect(rank, "size", HEADER_BYTES + header.payload_bytes, record.numel())

    word_bytes = 8 * -(-positions // 64)
    if form == FORM_BITMAP:
        words = record[_SECTIONS_AT : _SECTIONS_AT + word_bytes]
        at = _SECTIONS_AT + pad16(word_bytes)
        return _Sections(words, record[at : at + nnz * value_bytes], nnz)
    raw = record[_SECTIONS_AT : _SECTIONS_AT + positions * value_bytes]
    words = torch.empty(word_bytes, dtype=torch.uint8)
    packed = torch.empty(positions * value_bytes, dtype=torch.uint8)
    found = hash_ops.bitmap_pack(_as_values(raw, DTYPE_OF_CODE[code]), words, packed)
    _expect(rank, "nnz", found, nnz)
    return _Sections(words, packed[: nnz * value_bytes], nnz)


def _code_of(dtype: torch.dtype) -> int:
    code = _CODE_OF_DTYPE.get(dtype)
    if code is None:
        raise ExtensionError(
            "values of this dtype have no code",
            expected="float32, bfloat16 or float16",
            got=dtype,
        )
    return code


def _as_values(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as values; copied where a caller's slice left them unaligned."""
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def _expect(rank: int, field: str, expected: object, got: object) -> None:
    if expected != got:
        raise wrong_field(rank, field, expected, got)


def _refuse(field: str, found: int, nnz: int, rank: int) -> None:
    if field == "nnz":
        raise wrong_field(rank, "nnz", f"the bitmap's {found}", nnz)
    if field == "bitmap":
        raise wrong_field(rank, "bitmap", f"no bit beyond position {found - 1}", "some")
