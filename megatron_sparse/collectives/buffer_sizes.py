"""The sizes of a scheme's buffers, computed before anything is sent.

A scheme declares its buffers as a function of `BufferSizes` (`Scheme.buffers`), beside the code
that takes them. The plugin's account of its memory (`reduction.memory`) adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Layout
from megatron_sparse.collectives.accumulator import partial_name
from megatron_sparse.collectives.records import Cut, shard_cuts, whole_cut
from megatron_sparse.collectives.sparse_sum import sum_slots, sum_span
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.formats.message import VALUE_DTYPES, WIRE_CODES
from megatron_sparse.formats.message_sizes import slots_of
from megatron_sparse.wire import FORMAT_ADAPTIVE, FORMAT_BLOCKS, FORMAT_DENSE, FORMAT_RICE

FP32_BYTES = 4


@dataclass(frozen=True)
class MessagePlaces:
    """Where the records of a rank's message lie.

    Attributes:
        layout: how the message is cut.
        slots: their places. Where sizes are exchanged these are the expected ones.
        fixed: whether the sizes are fixed, as in capacity mode.
        records: their kind.
    """

    layout: Layout
    slots: Slots
    fixed: bool
    records: RecordSpec

    @classmethod
    def of(
        cls, layout: Layout, most_S: torch.Tensor, records: RecordSpec, *, fixed: bool
    ) -> MessagePlaces:
        """Of records of at most `most_S` elements; blocks take at most the dense size."""
        if records.record_format == FORMAT_BLOCKS:
            records = replace(records, record_format=FORMAT_DENSE)
        slots = slots_of(layout.segment_offsets, layout.segment_keep, most_S, records)
        return cls(layout, slots, fixed, records)


@dataclass(frozen=True)
class BufferSizes:
    """Facts from which a scheme computes its buffers' bytes for one bucket. Of every rank alike.

    Attributes:
        bucket: only its shape is read.
        rank: of this process in the group.
        nodes: of each rank, as `Transport.nodes`.
        options: `scheme` of the configuration.
        value_dtype: of values on the wire that are not quantised: fp32, bf16 or fp16.
        message: of a sparse scheme; None for a dense one.
    """

    bucket: Bucket
    rank: int
    nodes: tuple[int, ...]
    options: SchemeConfig
    value_dtype: str
    message: MessagePlaces | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.bucket.world_size

    @property
    def scatters(self) -> bool:
        """Whether each rank gets its own shard of the sum only."""
        return self.bucket.op is CollectiveOp.REDUCE_SCATTER

    @property
    def partial_dtype(self) -> str:
        """The dtype in which partial sums travel."""
        return partial_name(self.bucket, self.value_dtype)

    @property
    def partial_bytes(self) -> int:
        """Bytes of an element of a partial sum on its way."""
        return VALUE_DTYPES[self.partial_dtype].itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes of an element on its way."""
        return VALUE_DTYPES[self.value_dtype].itemsize

    @property
    def places(self) -> MessagePlaces:
        """The message's, of a sparse scheme."""
        assert self.message is not None, "asked by sparse schemes only"
        return self.message

    @property
    def shards(self) -> Sequence[Cut]:
        """The cuts of the ranks' shards."""
        return shard_cuts(self.places.layout, self.ranks)

    @property
    def whole(self) -> Cut:
        """All of the bucket."""
        return whole_cut(self.places.layout)

    def message_bytes(self, cut: Cut) -> int:
        """Bytes of the records of some segments of one rank's message."""
        return int(self.places.slots.part(cut.segments)[-1])

    def sums_bytes(self) -> int:
        """Room for the records of the complete sums of all shards."""
        if not self.places.fixed:
            return sum(cut.capacity(self.value_dtype) for cut in self.shards)
        records = self.places.records
        spec = RecordSpec(WIRE_CODES[self.value_dtype], 0, FORMAT_ADAPTIVE)
        if records.without_indices:
            spec = replace(spec, record_format=FORMAT_DENSE)
        elif records.record_format == FORMAT_RICE:
            span = sum_span(records.log2_span, self.ranks)
            spec = replace(spec, record_format=FORMAT_RICE, log2_span=span)
        places = [sum_slots(self.places.slots, cut, self.ranks, spec) for cut in self.shards]
        return sum(int(place.offsets[-1]) for place in places)

    def scratch(self, cuts: Sequence[Cut]) -> dict[str, int]:
        """The CPU encoder's scratch memory where partial sums of these cuts are encoded."""
        if self.bucket.grad_N.is_cuda:
            return {}
        code = WIRE_CODES[self.partial_dtype]
        return {"scratch": max(ops.scratch_capacity(cut.own_offsets, code) for cut in cuts)}

    def of_sparse_sum(self, buffers: dict[str, int]) -> dict[str, int]:
        """Adds the fp32 sum of a narrower gradient (`SparseSum`)."""
        if self.bucket.grad_N.dtype == torch.float32:
            return buffers
        return buffers | {"sum": FP32_BYTES * self.bucket.numel}

    def of_accumulator(self, incoming: int, outgoing: int) -> dict[str, int]:
        """The buffers of an `Accumulator`.

        Args:
            incoming: elements of the largest part that it receives at once.
            outgoing: elements of the largest part that it sends at once.
        """
        buffers = {"incoming": incoming * self.partial_bytes}
        if self.value_dtype != "fp32":
            buffers["sum"] = FP32_BYTES * self.bucket.numel
        if self.partial_dtype != "fp32":
            buffers["outgoing"] = outgoing * self.partial_bytes
        return buffers
