"""The record in which a rank sends a server its entries of one partition (ZEN's Push).

Entries are the non-zero elements. A position is an element's number in its partition, in order of
the hash (`hash_partition`). For a partition with P elements, K of them non-zero, pairs of index and
value take 4 K bytes and the values (the paper's COO). Deviation: where another form is smaller, the
record is a hash bitmap (P / 8 bytes and the values, from a density of 1/32 on), or dense. So it
never exceeds the dense size by more than the headers, and its reader accepts all three forms.
Layout: docs/wire-format.md. On CUDA every check of a received record waits for the device.
"""

import torch

from megatron_sparse.cuda_ext.hash_ops import BitmapPlace
from megatron_sparse.formats import hash_bitmap
from megatron_sparse.formats.hash_record import (
    ALL_FORMS,
    FORM_PAIRS,
    SECTIONS_AT,
    PartitionRecord,
    as_dtype,
)
from megatron_sparse.wire import pad16, wrong_field


def encode(indices_K: torch.Tensor, values_K: torch.Tensor, place: PartitionRecord) -> torch.Tensor:
    """Writes the record that a rank pushes to the server of a partition.

    Args:
        indices_K: int64 elements of the segment that are in the partition, strictly ascending.
        values_K: their values in the record's dtype, none of them zero; sent bit for bit.
        place: which partition, segment and step the record is for.

    Returns:
        uint8.

    Example:
        >>> from megatron_sparse.formats.hash_partition import PermutationHash
        >>> place = PartitionRecord(PermutationHash(8, 1, 0), 0, torch.float32, 0, step=3)
        >>> record = encode(torch.tensor([5]), torch.tensor([2.0]), place)
        >>> acc = torch.zeros(8)
        >>> accumulate_(acc, record, place, rank=0)
        >>> float(acc[place.partition_hash.locate(0, torch.tensor([5]))])
        2.0
    """
    nnz = indices_K.numel()
    if place.smallest(nnz, ALL_FORMS) != FORM_PAIRS:
        # `hash_bitmap` chooses between the two other forms.
        values_P = values_K.new_zeros(place.positions)
        values_P.index_copy_(0, place.partition_hash.locate(place.partition, indices_K), values_K)
        return hash_bitmap.encode(values_P, place)
    size = SECTIONS_AT + place.section_bytes(FORM_PAIRS, nnz)
    out = torch.empty(size, dtype=torch.uint8, device=values_K.device)
    place.write_head(out, FORM_PAIRS, nnz)
    values_at = SECTIONS_AT + pad16(4 * nnz)
    # Indices, then values; each section is padded with zeros up to `stop`.
    for start, stop, numbers in (
        (SECTIONS_AT, values_at, indices_K.to(torch.int32)),
        (values_at, out.numel(), values_K),
    ):
        end = start + numbers.nbytes
        out[start:end] = numbers.contiguous().view(torch.uint8)
        out[end:stop] = 0
    return place.finish_(out)


def accumulate_(
    acc_P: torch.Tensor, record: torch.Tensor, place: PartitionRecord, rank: int
) -> None:
    """Adds a rank's record to a server's accumulator, which holds its partition by position.

    Args:
        acc_P: fp32, one for each position. Mutated.
        record: uint8, exactly one record, not trusted.
        place: the partition, segment and step that the record must be for.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field that is wrong; `acc_P` is untouched.
    """
    head = place.read_head(record, rank, ALL_FORMS)
    form, nnz = head
    if form != FORM_PAIRS:
        # `acc_P` is in the order of positions: bit i stands for its element i, not permuted.
        bits = BitmapPlace(partition=0, partitions=1, seed=0, permuted=False)
        hash_bitmap.add_(acc_P, record, place, rank, head, bits)
        return
    if not nnz:
        return
    values_at = SECTIONS_AT + pad16(4 * nnz)
    indices_K = as_dtype(record[SECTIONS_AT : SECTIONS_AT + 4 * nnz], torch.int32).long()
    value_bytes = record[values_at : values_at + nnz * place.value_dtype.itemsize]
    if bool((indices_K[1:] <= indices_K[:-1]).any()):
        raise wrong_field(rank, "indices", "strictly ascending elements", "others")
    h0, partition = place.partition_hash, place.partition
    low, high = int(indices_K[0]), int(indices_K[-1])  # the extremes, as they ascend
    if low < 0 or high >= h0.numel:
        raise wrong_field(rank, "indices", f"0 to {h0.numel - 1}", low if low < 0 else high)
    position_K = h0.locate(partition, indices_K)
    if int(position_K.min()) < 0:  # -1 for an element of another partition
        got = f"element {int(indices_K[position_K.argmin()])} of another"
        raise wrong_field(rank, "indices", f"elements of partition {partition}", got)
    acc_P.index_add_(0, position_K, as_dtype(value_bytes, place.value_dtype).float())
