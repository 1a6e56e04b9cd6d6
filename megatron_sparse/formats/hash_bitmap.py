"""The hash bitmap (ZEN, Algorithm 2): one server's partition of a segment, for the Pull.

A server holds the sums of its partition by position. One bit for each position says whether its
value is zero, and the non-zero values follow in order. With partition size P = numel / n this costs
P / 8 bytes and the values. So the bitmaps of all n servers together cost numel / 8 bytes (the
paper's |G| / 32 fp32 values) for any n; headers and padding add under 112 bytes each. Where the
values of all positions are not larger, they travel without a bitmap: the dense form.

Layout: docs/wire-format.md. Decoding needs the same partition hash as encoding: `PermutationHash`
computes the elements, `IndexSetHash` (the paper's way) looks them up.

On the CPU or a CUDA device, with the same bytes. On CUDA encoding waits for the device once, for
nnz, and decoding twice: for the record's head, and for the check of its bitmap.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.cuda_ext.hash_ops import BitmapPlace
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.hash_record import (
    BY_POSITION,
    FORM_BITMAP,
    SECTIONS_AT,
    PartitionRecord,
    as_dtype,
)
from megatron_sparse.formats.header import check_fields
from megatron_sparse.wire import pad16, wrong_field


def encode(values_P: torch.Tensor, place: PartitionRecord) -> torch.Tensor:
    """Writes the record of one partition.

    Args:
        values_P: one for each position, in the record's dtype; travel bit for bit, except that in
            the bitmap form `-0.0` is zero and is not sent. Only read.
        place: which partition, segment and step the record is for.

    Returns:
        uint8 beside the values; a view of a buffer that would have room for all of them.

    Example:
        >>> from megatron_sparse.formats.hash_partition import PermutationHash
        >>> h = PermutationHash(numel=8, partitions=2, seed=0)
        >>> place = PartitionRecord(h, 1, torch.float32, offset=0, step=3)
        >>> record = encode(torch.tensor([0.0, 2.0, 0.0, 0.0]), place)
        >>> acc = torch.zeros(8)
        >>> decode_add_(acc, record, place, rank=0)
        >>> float(acc[h.element_at(1, torch.tensor([1]))])
        2.0
    """
    word_bytes = place.word_bytes
    values_at = SECTIONS_AT + pad16(word_bytes)
    room = values_at + pad16(values_P.nbytes)  # for a bitmap and all values
    out = torch.empty(room, dtype=torch.uint8, device=values_P.device)
    # As a bitmap first: that gives nnz, which decides about the form.
    nnz = hash_ops.bitmap_pack(
        values_P,
        out[SECTIONS_AT : SECTIONS_AT + word_bytes],
        out[values_at : values_at + values_P.nbytes],
    )
    form = place.smallest(nnz, BY_POSITION)
    size = place.write_head(out, form, nnz)
    if form == FORM_BITMAP:
        out[SECTIONS_AT + word_bytes : values_at] = 0
        out[values_at + nnz * values_P.element_size() : size] = 0
    else:  # dense, over the bitmap
        end = SECTIONS_AT + values_P.nbytes
        out[SECTIONS_AT:end] = values_P.view(torch.uint8)
        out[end:size] = 0
    return place.finish_(out[:size])


def decode_add_(
    acc_M: torch.Tensor, record: torch.Tensor, place: PartitionRecord, rank: int
) -> None:
    """Adds the values of a record to their elements; never materialises the indices.

    Args:
        acc_M: fp32, the whole segment. Mutated.
        record: uint8, exactly one record, not trusted.
        place: what the record must say.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field that is wrong; `acc_M` is untouched.
        ExtensionError: `acc_M` is not the whole segment, or not fp32.
    """
    _add_(acc_M, record, place, rank, place.partition_hash.numel, place.bits(acc_M.device))


def accumulate_(
    acc_P: torch.Tensor, record: torch.Tensor, place: PartitionRecord, rank: int
) -> None:
    """Adds the values of a record to a partition that is held by position, as its server does.

    Args:
        acc_P: fp32, one for each position. Mutated.
        record: uint8, exactly one record, not trusted.
        place: what the record must say.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field that is wrong; `acc_P` is untouched.
        ExtensionError: `acc_P` is not one fp32 value for each position.
    """
    # Here positions are the elements, as in a segment with one partition and no permutation.
    positions_P = torch.arange(place.positions, dtype=torch.int32, device=acc_P.device)
    bits = BitmapPlace(partition=0, partitions=1, seed=0, index_set_P=positions_P)
    _add_(acc_P, record, place, rank, place.positions, bits)


def _add_(
    acc: torch.Tensor,
    record: torch.Tensor,
    place: PartitionRecord,
    rank: int,
    numel: int,
    bits: BitmapPlace,
) -> None:
    """Adds the values of a record to a vector of `numel` elements; `bits` says which ones."""
    if acc.numel() != numel:
        raise ExtensionError("acc has the wrong length", expected=numel, got=acc.numel())
    words, values, nnz = _read(record, place, rank)
    # `found`: the set bits where nnz is wrong, the number of positions where a bit is beyond them.
    field, found = hash_ops.bitmap_add_(acc, words, values, place.code, nnz, bits)
    if field == "nnz":
        raise wrong_field(rank, "nnz", f"the bitmap's {found}", nnz)
    if field == "bitmap":
        raise wrong_field(rank, "bitmap", f"no bit beyond position {found - 1}", "some")


def _read(
    record: torch.Tensor, place: PartitionRecord, rank: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Checks a record's head; returns its bitmap, the bytes of its non-zero values, and nnz.

    The bitmap of a dense record is made here, from its values, whose count must be nnz. Another
    bitmap is not compared with nnz yet.
    """
    form, nnz = place.read_head(record, rank, BY_POSITION)
    word_bytes, value_bytes = place.word_bytes, place.value_dtype.itemsize
    if form == FORM_BITMAP:
        words = record[SECTIONS_AT : SECTIONS_AT + word_bytes]
        values_at = SECTIONS_AT + pad16(word_bytes)
        return words, record[values_at : values_at + nnz * value_bytes], nnz
    dense = record[SECTIONS_AT : SECTIONS_AT + place.positions * value_bytes]
    words = torch.empty(word_bytes, dtype=torch.uint8, device=record.device)
    packed = torch.empty_like(dense)
    found = hash_ops.bitmap_pack(as_dtype(dense, place.value_dtype), words, packed)
    check_fields(rank, ("nnz", found, nnz))
    return words, packed[: nnz * value_bytes], nnz
