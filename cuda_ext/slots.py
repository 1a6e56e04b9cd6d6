"""Capacity mode: how many elements each segment may send, and in which slot its record lies.

A pruned segment of m elements sends at most its capacity of non-zero ones, c = min(ceil(factor *
density * m), m); a kept segment sends all of its elements. A slot is a range of a message's bytes
with room for the largest record of c elements: 48 bytes and min(dense, sparse(c)). Every rank
computes the same slots beforehand, so ranks exchange no sizes and read none from the device. A rank
sends whole slots, not only the records. A sum of n ranks' segments has at most min(n c, m) non-zero
elements, which also fixes the slot of its record: sums cannot overflow.
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
    """Capacities and slots of consecutive segments' records. Cached: do not write to them.

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
        """Computes the slots, back to back, of records of at most `capacity_S` non-zero elements.

        Recent results are cached, because a bucket asks for the same slots in each step. Offsets
        and flags are those of `Segments`; capacities are clamped to the segments' elements. `spec`
        is not of blocks.

        Example:
            >>> cut, no = torch.tensor([0, 100, 108]), torch.zeros(2, dtype=torch.uint8)
            >>> coo = RecordSpec(0, step=0)
            >>> Slots.of(cut, no, torch.tensor([5, 8]), coo).offsets  # 48 + 64, 48 + 32
            tensor([  0, 112, 192])
        """
        tables = (segment_offsets, segment_dense, capacity_S)
        every_step = replace(spec, step=0)  # the step does not change slots: one cache entry
        return _slots(*(table.numpy().tobytes() for table in tables), every_step)

    def part(self, segments: slice) -> torch.Tensor:
        """The slots of some of the records, from the first one's begin."""
        return _part(self, segments.start, segments.stop)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each record's slot takes."""
        return tuple(self.offsets.diff().tolist())


@lru_cache(TABLES)
def _part(slots: Slots, first: int, last: int) -> torch.Tensor:
    offsets = slots.offsets[first : last + 1]
    return offsets - offsets[0]


@lru_cache(TABLES)
def _slots(offsets: bytes, dense: bytes, capacity: bytes, spec: RecordSpec) -> Slots:
    """Computes `Slots.of`; the tables are bytes, which the cache can use as a key.

    A kept segment's slot has room for its dense record; any other slot has room for a record of
    `capacity` elements in the smallest of the formats between which the encoder chooses.
    """
    numel_S = torch.frombuffer(bytearray(offsets), dtype=torch.int64).diff()
    begin = numel_S.new_zeros(1)
    if not dense:  # no segments: `frombuffer` would refuse the empty tables
        return Slots(begin[:0], begin)
    is_kept_S = torch.frombuffer(bytearray(dense), dtype=torch.uint8) != 0
    capacity_S = torch.frombuffer(bytearray(capacity), dtype=torch.int64).minimum(numel_S)
    # Where values are quantised, kept segments are sent in bf16.
    dense_dtype = _BF16 if spec.value_dtype in RICE_BITS else spec.value_dtype
    dense_bytes_S = payload_bytes(FORMAT_DENSE, numel_S, capacity_S, dense_dtype)
    if spec.record_format == FORMAT_RICE:
        most_S = _most_rice_bytes(numel_S, capacity_S, spec)
        if spec.value_dtype not in RICE_BITS:  # not quantised: dense unless Rice is smaller
            most_S = most_S.minimum(dense_bytes_S)
    else:
        is_adaptive = spec.record_format == FORMAT_ADAPTIVE
        formats = (FORMAT_COO, FORMAT_PICI) if is_adaptive else (spec.record_format,)
        most_S = dense_bytes_S
        for sparse in formats:
            most_S = most_S.minimum(payload_bytes(sparse, numel_S, capacity_S, spec.value_dtype))
    slot_bytes_S = torch.where(is_kept_S, dense_bytes_S, most_S) + HEADER_BYTES
    return Slots(capacity_S, torch.cat([begin, slot_bytes_S.cumsum(0)]))


def _most_rice_bytes(
    numel_S: torch.Tensor, capacity_S: torch.Tensor, spec: RecordSpec
) -> torch.Tensor:
    """The most payload bytes of each segment's record in format Rice."""
    code, span = spec.value_dtype, spec.log2_span
    if spec.without_indices:
        most = [rice_whole_payload_bytes(numel, code, span) for numel in numel_S.tolist()]
    else:
        pieces = zip(numel_S.tolist(), capacity_S.tolist(), strict=True)
        most = [rice_payload_bytes(numel, nnz, code, span) for numel, nnz in pieces]
    return torch.tensor(most)
