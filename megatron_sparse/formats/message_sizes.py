"""The sizes of a message and of its encoder's memory, which follow from a plan alone."""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Layout
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.wire import FORMAT_RICE


def slots_of(layout: Layout, capacity_S: torch.Tensor, spec: RecordSpec) -> Slots:
    """The places of a message's records of at most `capacity_S` elements."""
    return Slots.of(
        layout.segment_offsets,
        layout.segment_keep,
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
