"""The hash bitmap (ZEN, Algorithm 2): the record in which a server sends the sum of its partition.

ZEN hashes a segment's elements into n partitions; server i sums partition i up, and all ranks fetch
the sums (the Pull). Position p is the p-th element of a partition in the order of the hash. One bit
for each position says whether its sum is not zero, and the non-zero values follow in order. With
partition size P = numel / n this costs P / 8 bytes and the values, so the bitmaps of all servers
cost numel / 8 bytes (the paper's |G| / 32 fp32 values) for any n; headers and padding add under 112
bytes each. Where the values of all positions are not larger, these are sent alone: the dense form.

Layout: docs/wire-format.md. Decoding needs the same partition hash as encoding: it computes the
elements, which the paper looks up. The bytes do not depend on the device. On CUDA encoding waits
once, for nnz, and decoding twice: for the record's head, and for the check of its bitmap.
"""

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
    """Writes the record of one partition, in the smaller of the forms bitmap and dense.

    Args:
        values_P: one for each position, in the record's dtype. They are sent bit for bit, except
            that in the bitmap form `-0.0` counts as zero and is not sent. Only read.
        place: which partition, segment and step the record is for.

    Returns:
        uint8 on the values' device: a view of a buffer with room for a bitmap and all values.

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
    # The sections of a bitmap come first, because only packing them tells nnz, and nnz the form.
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
    else:  # the dense values overwrite the bitmap
        end = SECTIONS_AT + values_P.nbytes
        out[SECTIONS_AT:end] = values_P.view(torch.uint8)
        out[end:size] = 0
    return place.finish_(out[:size])


def decode_add_(
    acc_M: torch.Tensor, record: torch.Tensor, place: PartitionRecord, rank: int
) -> None:
    """Adds the values of a record to their elements of a segment, without listing the indices.

    Args:
        acc_M: fp32, the whole segment. Mutated.
        record: uint8, exactly one record, not trusted.
        place: the partition, segment and step that the record must be for.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field that is wrong; `acc_M` is untouched.
        ExtensionError: `acc_M` is not the whole segment, or not fp32.
    """
    numel = place.partition_hash.numel
    if acc_M.numel() != numel:
        raise ExtensionError("acc has the wrong length", expected=numel, got=acc_M.numel())
    head = place.read_head(record, rank, BY_POSITION)
    add_(acc_M, record, place, rank, head, place.bits)


def add_(
    acc: torch.Tensor,
    record: torch.Tensor,
    place: PartitionRecord,
    rank: int,
    head: tuple[int, int],
    bits: BitmapPlace,
) -> None:
    """Adds the values of a record whose head has been checked; raises errors as `decode_add_`.

    Args:
        acc: fp32, a segment, or a partition by position. Mutated.
        record: with a bitmap, or dense.
        place: the partition, segment and step that the record must be for.
        rank: the sender, for the error's text.
        head: the record's form and nnz.
        bits: which element of `acc` belongs to each position.
    """
    form, nnz = head
    word_bytes, value_bytes = place.word_bytes, place.value_dtype.itemsize
    if form == FORM_BITMAP:
        words = record[SECTIONS_AT : SECTIONS_AT + word_bytes]
        values_at = SECTIONS_AT + pad16(word_bytes)
        values = record[values_at : values_at + nnz * value_bytes]
    else:  # dense: the bitmap is made here, from values whose count must be nnz
        dense = record[SECTIONS_AT : SECTIONS_AT + place.positions * value_bytes]
        words = torch.empty(word_bytes, dtype=torch.uint8, device=record.device)
        values = torch.empty_like(dense)
        found = hash_ops.bitmap_pack(as_dtype(dense, place.value_dtype), words, values)
        check_fields(rank, ("nnz", found, nnz))
        values = values[: nnz * value_bytes]
    # "nnz": `found` bits are set, not nnz. "bitmap": a bit is set beyond the `found` positions.
    field, found = hash_ops.bitmap_add_(acc, words, values, place.code, nnz, bits)
    if field == "nnz":
        raise wrong_field(rank, "nnz", f"the bitmap's {found}", nnz)
    if field == "bitmap":
        raise wrong_field(rank, "bitmap", f"no bit beyond position {found - 1}", "some")
