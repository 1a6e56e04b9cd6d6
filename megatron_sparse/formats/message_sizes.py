"""Sizes that follow from a plan alone: of a message, its segments and its encoder's memory."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from megatron_sparse.bucket import Layout
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.cuda_ext.slots import TABLES, Slots
from megatron_sparse.wire import FORMAT_RICE


def slots_of(
    offsets_S: torch.Tensor, keep_S: torch.Tensor, capacity_S: torch.Tensor, spec: RecordSpec
) -> Slots:
    """The places of records of at most `capacity_S` elements; the arguments are `Slots.of`'s."""
    return Slots.of(
        offsets_S,
        keep_S,
        capacity_S,
        spec.value_dtype,
        spec.record_format,
        spec.log2_span,
        without_indices=spec.without_indices,
    )


def scratch_capacity(segment_offsets: torch.Tensor, spec: RecordSpec) -> int:
    """Bytes of the scratch memory of an encoder on the CPU."""
    find = ops.rice_scratch_capacity if spec.record_format == FORMAT_RICE else ops.scratch_capacity
    return find(segment_offsets, spec.value_dtype)


@lru_cache(TABLES)
def segment_capacity(layout: Layout, density: float) -> torch.Tensor:
    """How many elements each segment may send: all of a kept one, this density of the others.

    For capacity mode (`cuda_ext/slots.py`). The result is cached for the next step; do not write to
    it.

    Returns:
        int64; the numbers are the same on every machine (one fp64 product, rounded up).
    """
    capacities = [
        numel if keep else min(math.ceil(density * numel), numel)
        for numel, keep in zip(
            layout.segment_offsets.diff().tolist(), layout.segment_keep.tolist(), strict=True
        )
    ]
    return torch.tensor(capacities, dtype=torch.int64)
