"""Capacity mode: how many elements each segment may send, and where its record lies.

A pruned segment of m elements sends at most c = min(ceil(factor * density * m), m) non-zero ones; a
kept segment sends all of its elements. Its record begins at a fixed place and has room for the
largest record of c elements in the chosen format: 48 bytes and min(dense, sparse(c)). Every rank
computes the same places from the plan, so ranks exchange no sizes and the host reads none. A rank
sends the whole room, not only the record. A sum of n ranks' segments has at most min(n c, m)
non-zero elements, which also fixes the room of its record: sums cannot overflow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
    payload_bytes,
    rice_payload_bytes,
    rice_whole_payload_bytes,
)

_BF16 = 1
"""The dtype code of kept segments where values are quantised."""
TABLES = 2**14
"""Number of cached slots, and of tables whose copies on the device are kept: a bucket has those of
its message and of each shard's sum, and in a density ramp different ones in each step."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Capacities and places of consecutive segments' records. Cached: do not write to them.

    Attributes:
        capacity_S: int64, the most non-zero elements of each record.
        offsets: int64, S+1 bytes from the first record's begin: multiples of 16 from 0 on.
    """

    capacity_S: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(
        cls,
        segment_offsets: torch.Tensor,
        segment_dense: torch.Tensor,
        capacity_S: torch.Tensor,
        spec: RecordSpec,
    ) -> Slots:
        """Places for records of at most `capacity_S` elements, back to back.

        Recent results are cached, because a bucket asks for the same slots in each step.

        Args:
            segment_offsets: S+1 offsets.
            segment_dense: uint8, 1 for segments that are always dense.
            capacity_S: int64; clamped to the segments' elements.
            spec: how the records are written; not in blocks.

        Example:
            >>> cut, no = torch.tensor([0, 100, 108]), torch.zeros(2, dtype=torch.uint8)
            >>> coo = RecordSpec(0, step=0)
            >>> Slots.of(cut, no, torch.tensor([5, 8]), coo).offsets  # 48 + 64, 48 + 32
            tensor([  0, 112, 192])
        """
        tables = (segment_offsets, segment_dense, capacity_S)
        every_step = replace(spec, step=0)  # places do not depend on it
        return _slots(*(table.numpy().tobytes() for table in tables), every_step)

    def part(self, segments: slice) -> torch.Tensor:
        """The places of some of the records, from the first one's begin."""
        return _part(self, segments.start, segments.stop)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each record's place takes."""
        return tuple(self.offsets.diff().tolist())


@lru_cache(TABLES)
def _part(slots: Slots, first: int, last: int) -> torch.Tensor:
    offsets = slots.offsets[first : last + 1]
    return offsets - offsets[0]


@lru_cache(TABLES)
def _slots(offsets: bytes, dense: bytes, capacity: bytes, spec: RecordSpec) -> Slots:
    """`Slots.of`, with the tables' content as arguments: a cache can compare them.

    A kept segment has room for its dense record, another one for a record of `capacity` elements
    in the smallest of the forms that the format allows.
    """
    numel_S = torch.frombuffer(bytearray(offsets), dtype=torch.int64).diff()
    begin = numel_S.new_zeros(1)
    if not dense:
        return Slots(begin[:0], begin)
    dense_S = torch.frombuffer(bytearray(dense), dtype=torch.uint8) != 0
    capacity_S = torch.frombuffer(bytearray(capacity), dtype=torch.int64).minimum(numel_S)
    # A dense record, of a kept segment or where sparse ones are not smaller.
    whole_dtype = _BF16 if spec.value_dtype in RICE_BITS else spec.value_dtype
    whole_S = payload_bytes(FORMAT_DENSE, numel_S, capacity_S, whole_dtype)
    if spec.record_format == FORMAT_RICE:
        most_S = _most_rice_bytes(numel_S, capacity_S, spec)
        if spec.value_dtype not in RICE_BITS:  # else no record but those of kept segments is dense
            most_S = most_S.minimum(whole_S)
    else:
        is_adaptive = spec.record_format == FORMAT_ADAPTIVE
        formats = (FORMAT_COO, FORMAT_PICI) if is_adaptive else (spec.record_format,)
        most_S = whole_S
        for sparse in formats:
            most_S = most_S.minimum(payload_bytes(sparse, numel_S, capacity_S, spec.value_dtype))
    room_S = torch.where(dense_S, whole_S, most_S) + HEADER_BYTES
    return Slots(capacity_S, torch.cat([begin, room_S.cumsum(0)]))


def _most_rice_bytes(
    numel_S: torch.Tensor, capacity_S: torch.Tensor, spec: RecordSpec
) -> torch.Tensor:
    """The most bytes of the sections of segments that are written in format Rice."""
    code, span = spec.value_dtype, spec.log2_span
    if spec.without_indices:
        most = [rice_whole_payload_bytes(numel, code, span) for numel in numel_S.tolist()]
    else:
        pieces = zip(numel_S.tolist(), capacity_S.tolist(), strict=True)
        most = [rice_payload_bytes(numel, nnz, code, span) for numel, nnz in pieces]
    return torch.tensor(most)
