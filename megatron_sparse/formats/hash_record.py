"""The head (header and sub-header) of every record of a hash partition, and the record's length.

In ZEN a rank sends a server its elements of a partition as pairs of index and value, and fetches
the partition's sum as a hash bitmap. Both are records of the format `hash bitmap`
(docs/wire-format.md) in one of three forms: bitmap, dense or pairs. `hash_bitmap` and `hash_pairs`
read and write the sections after the head. A position is an element's number in
its partition.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext.arguments import GRAD_DTYPES
from megatron_sparse.cuda_ext.checksum_ops import seal_
from megatron_sparse.cuda_ext.hash_ops import BitmapPlace
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.header import Header, check_fields, read_head
from megatron_sparse.wire import FORMAT_HASH_BITMAP, HEADER_BYTES, VALUE_BYTES, pad16, wrong_field

SUB_HEADER_BYTES = 32
SECTIONS_AT = HEADER_BYTES + SUB_HEADER_BYTES
HASH = 0
"""The code of the partition hash, of which there is one."""
FORM_BITMAP, FORM_DENSE, FORM_PAIRS = range(3)
FORM_NAMES = ("bitmap", "dense", "pairs")
BY_POSITION = (FORM_DENSE, FORM_BITMAP)
ALL_FORMS = (FORM_DENSE, FORM_BITMAP, FORM_PAIRS)
"""In a tie the first of these wins."""

_SUB_HEADER = struct.Struct("<IIQIIQ")
_SUB_HEADER_FIELDS = ("partition", "partitions", "seed", "hash", "form", "positions")


@dataclass(frozen=True)
class PartitionRecord:
    """Which partition, segment and step a record is for; known to sender and receiver beforehand.

    Attributes:
        partition_hash: h0, the same on all ranks.
        partition: the number of the partition whose elements the record holds.
        value_dtype: fp32, bf16 or fp16.
        offset: the segment's first element in the bucket.
        step: the training step; the header has its lower 32 bits.
        checksum: the record is sealed.

    Raises:
        ExtensionError: there is no such partition.
    """

    partition_hash: PermutationHash
    partition: int
    value_dtype: torch.dtype
    offset: int
    step: int
    checksum: bool = False

    def __post_init__(self) -> None:
        """Refuses a partition that does not exist."""
        self.partition_hash.partition_numel(self.partition)  # raises for one that does not exist

    @property
    def code(self) -> int:
        """The dtype's code on the wire."""
        return GRAD_DTYPES.index(self.value_dtype)

    @property
    def positions(self) -> int:
        """Elements of the partition."""
        return self.partition_hash.partition_numel(self.partition)

    @property
    def word_bytes(self) -> int:
        """Bytes of the bitmap, not padded."""
        return 8 * -(-self.positions // 64)

    @property
    def bits(self) -> BitmapPlace:
        """Which elements the bits of the record's bitmap stand for."""
        return BitmapPlace(self.partition, self.partition_hash.partitions, self.partition_hash.seed)

    def section_bytes(self, form: int, nnz: int) -> int:
        """Bytes after the sub-header, padding included.

        `form` is one of the `FORM_*` codes.
        """
        value_bytes = VALUE_BYTES[self.code]
        if form == FORM_DENSE:
            return pad16(self.positions * value_bytes)
        # The bitmap, or int32 indices.
        index_bytes = self.word_bytes if form == FORM_BITMAP else 4 * nnz
        return pad16(index_bytes) + pad16(nnz * value_bytes)

    def smallest(self, nnz: int, forms: Sequence[int]) -> int:
        """The form that takes the fewest bytes; the first one in a tie."""
        return min(forms, key=lambda form: self.section_bytes(form, nnz))

    @property
    def capacity(self) -> int:
        """The most bytes that a record takes: the dense form."""
        return SECTIONS_AT + self.section_bytes(FORM_DENSE, 0)

    def write_head(self, out: torch.Tensor, form: int, nnz: int) -> int:
        """Writes header and sub-header, the first `SECTIONS_AT` bytes; returns the record's length.

        `out` is the record's buffer, uint8 on any device; mutated. `form` is one of the `FORM_*`
        codes, of the sections that follow.
        """
        h0 = self.partition_hash
        payload_bytes = SUB_HEADER_BYTES + self.section_bytes(form, nnz)
        header = Header(
            format=FORMAT_HASH_BITMAP,
            dtype=self.code,
            numel=h0.numel,
            nnz=nnz,
            payload_bytes=payload_bytes,
            offset=self.offset,
            step=self.step,
        )
        sub_header = _SUB_HEADER.pack(
            self.partition, h0.partitions, h0.seed, HASH, form, self.positions
        )
        head = bytearray(header.pack() + sub_header)
        out[:SECTIONS_AT] = torch.frombuffer(head, dtype=torch.uint8)
        return HEADER_BYTES + payload_bytes

    def finish_(self, record: torch.Tensor) -> torch.Tensor:
        """Seals the record, in place, if records are to be sealed; returns it."""
        if self.checksum:
            seal_(record, records=1)
        return record

    def read_head(self, record: torch.Tensor, rank: int, forms: Sequence[int]) -> tuple[int, int]:
        """Reads header and sub-header and checks all fields, and the record's length against them.

        On CUDA this copies the 80 bytes to the CPU and waits for them.

        Args:
            record: uint8, exactly one record, not trusted.
            rank: the sender, for the error's text.
            forms: the `FORM_*` codes that the caller can decode.

        Returns:
            The form and nnz, which is at most the number of positions.

        Raises:
            WireFormatError: names the rank and the field that is wrong.
        """
        h0, positions = self.partition_hash, self.positions
        header, head = read_head(record, SECTIONS_AT, rank, sealed=self.checksum)
        check_fields(rank, ("format", FORMAT_HASH_BITMAP, header.format))
        header.check_segment(self.code, h0.numel, self.offset, self.step, rank)
        if header.nnz > positions:
            raise wrong_field(rank, "nnz", f"at most {positions}", header.nnz)
        sub_header = _SUB_HEADER.unpack_from(head, HEADER_BYTES)
        form = sub_header[_SUB_HEADER_FIELDS.index("form")]
        if form not in forms:
            known = " or ".join(f"{code} ({FORM_NAMES[code]})" for code in sorted(forms))
            raise wrong_field(rank, "form", known, form)
        wanted = (self.partition, h0.partitions, h0.seed, HASH, form, positions)
        payload_bytes = SUB_HEADER_BYTES + self.section_bytes(form, header.nnz)
        check_fields(
            rank,
            *zip(_SUB_HEADER_FIELDS, wanted, sub_header, strict=True),
            ("payload_bytes", payload_bytes, header.payload_bytes),
            ("size", HEADER_BYTES + payload_bytes, record.numel()),
        )
        return form, header.nnz


def as_dtype(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a view of the bytes as numbers, or of a copy if the bytes are unaligned."""
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
