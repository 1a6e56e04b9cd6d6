"""The message of an encoded bucket: one record for each of its segments, in one buffer.

A record is a 48-byte header and 16-byte aligned sections (`formats/header.py`). Records of one
shard are adjacent, so a bucket is encoded once and each shard's bytes can be sent apart.

The native ops of `cuda_ext` encode and decode, with the same bytes on the CPU and on CUDA. On CUDA
each call waits once for the device: a sender must know record sizes before it can send, and a
receiver must find a bad record before it uses the sum. In capacity mode each segment sends at most
a given number of elements and records lie in slots of fixed size (`cuda_ext.slots`): the calls of a
bucket collect their status in the message's `Reports`, which are read once at the end.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import (
    DEFAULT_BLOCK_SIZE,
    Expected,
    Pruning,
    RecordSpec,
    Segments,
)
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.wire import FORMAT_ADAPTIVE, FORMAT_NAMES, FORMAT_RICE, RICE_BITS, rice_span

VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in VALUE_DTYPES.items()}
QUANTISED = {bits: f"q{bits}" for bits in RICE_BITS.values()}
"""Names of the dtypes of quantised values, by their bits."""
WIRE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2} | {QUANTISED[b]: c for c, b in RICE_BITS.items()}
_NAME_OF_CODE = tuple(WIRE_CODES)
FORMAT_CODES = {"auto": FORMAT_ADAPTIVE} | {
    name: FORMAT_NAMES.index(name) for name in ("coo", "pici", "dense", "blocks", "rice")
}
"""The names that `scheme.format` accepts, and the blocks of `scheme.name=omnireduce`."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype of values: fp32, bf16 or fp16."""
    return _NAME_OF[dtype]


def wire_dtype_of(grad_dtype: torch.dtype, wire_dtype: str | None) -> str:
    """The dtype in which values are sent: the configured one, never wider than the gradient."""
    own = name_of(grad_dtype)
    return own if wire_dtype is None or own != "fp32" else wire_dtype


ALL = slice(0, None)
"""Of segments: all of them."""


@dataclass
class Message:
    """One rank's encoded bucket.

    Attributes:
        buffer: uint8, the records (`records`) and workspace.
        layout: how the bucket was cut.
        segment_bytes: bytes of each record, or of its slot in capacity mode; 0 if not yet encoded.
        value_dtype: fp32, bf16, fp16, or one of `QUANTISED`.
        step: the training step, checked by the receiver.
        counted: the value of `nnz`; None until the reports have been read.
        slots: the byte ranges of the records in capacity mode; None: records lie back to back.
        reports: in capacity mode, those of all codec calls on the bucket; None where each call
            checks its own.
        log2_span: of records of format Rice (`RecordSpec`); None for other formats.
        residual_N: the residual after pruning, to which the rounding errors of quantised sums are
            added; None for a message without pruning.
        unquantised: for quantised values: fp32, bf16 or fp16, the dtype of their complete sums.
        checksum: the records are sealed, as those of its sums are to be.
        by_shard: the collective asks for one shard's records after the other, and announces each
            size by itself (`direct.split`).
        encode_later: encodes some segments, from a byte of `buffer` on, and returns the bytes and
            counts of their records; None once the records lie back to back.
    """

    buffer: torch.Tensor
    layout: Layout
    segment_bytes: list[int]
    value_dtype: str
    step: int
    counted: int | None
    slots: Slots | None = None
    reports: Reports | None = None
    log2_span: int | None = None
    unquantised: str | None = None
    residual_N: torch.Tensor | None = None
    checksum: bool = False
    by_shard: bool = False
    encode_later: Callable[[slice, int], tuple[torch.Tensor, torch.Tensor]] | None = None

    def records(self, segments: slice = ALL) -> torch.Tensor:
        """The records of all segments, or of a shard's, in `buffer`; encodes them if need be.

        Where shards are asked for first, each lies where the longest records before it would end.
        """
        if self.encode_later is None:
            at = sum(self.segment_bytes[: segments.start])
        else:
            # Shards that were asked for one by one do not lie back to back.
            assert segments != ALL or not self.nbytes, "some shards have been asked for"
            before = self.layout.segment_offsets[: segments.start + 1]
            at = ops.message_capacity(before, WIRE_CODES[self.value_dtype])
            if not any(self.segment_bytes[segments]):
                sizes_S, nnz_S = self.encode_later(segments, at)
                self.segment_bytes[segments] = sizes_S.tolist()
                self.take_counts(nnz_S)
            if segments == ALL:
                self.encode_later = None
        return self.buffer[at : at + sum(self.segment_bytes[segments])]

    @property
    def sum_dtype(self) -> str:
        """The dtype in which complete sums of such messages are sent: fp32, bf16 or fp16."""
        return self.unquantised or self.value_dtype

    @property
    def nnz(self) -> int:
        """How many non-zero elements the message has, also in segments that are sent whole.

        In capacity mode the count is in the reports: reads them, unless they have been read.
        """
        if self.counted is None:
            assert self.reports is not None, "without reports the count is known at once"
            self.reports.read()  # calls `take_counts`
        assert self.counted is not None, "the encoder's count is one of the reports"
        return self.counted

    def take_counts(self, nnz_S: torch.Tensor) -> None:
        """Adds the counts of segments' non-zero elements, which are on the CPU, to `counted`."""
        self.counted = (self.counted or 0) + int(nnz_S.numpy().sum())

    def tensors(self) -> list[torch.Tensor]:
        """All device memory that the message holds: its buffer, and the words of its reports."""
        return [self.buffer, *(() if self.reports is None else self.reports.words())]

    @property
    def nbytes(self) -> int:
        """Bytes of all records that have been encoded."""
        return sum(self.segment_bytes)

    def expected(
        self, segment_offsets: torch.Tensor, rank: int, slots: torch.Tensor | None = None
    ) -> Expected:
        """The header values that another rank's records must have to fit those of this message."""
        code = WIRE_CODES[self.value_dtype]
        return Expected(segment_offsets, code, self.step, rank, slots, self.checksum)


TURNS = 2
"""Buckets whose messages may be under way on a GPU: one is exchanged, and one is selected."""


class MessageBuffers:
    """Reuses encode and receive buffers: fresh pages cost more than the copy that fills them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}
        self._turns: dict[str, int] = {}

    def give_turn(self, bucket: str, turn: int) -> None:
        """From now on the bucket shares its own buffers with all others of this turn."""
        self._turns[bucket] = turn

    def take_own(
        self, purpose: str, bucket: Bucket, numel: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """A buffer that no other bucket uses until this one's job ends; arguments as of `take`.

        Buckets of one turn (`give_turn`) run one after the other and share the buffer.
        """
        owner = self._turns.get(bucket.name, bucket.name)
        return self.take(f"{purpose}:{owner}", numel, bucket.grad_N.device, dtype)

    def take(
        self, purpose: str, numel: int, device: torch.device, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """A 1-D buffer of `numel` elements with undefined content, grown when needed."""
        key = (purpose, device, dtype)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            held = self._buffers[key] = torch.empty(numel, device=device, dtype=dtype)
        return held[:numel]

    def by_purpose(self) -> dict[str, int]:
        """Total bytes of the buffers for each purpose, over all buckets.

        In a key of `_buffers` the purpose ends at a colon; the owner's name follows (`take_own`).
        """
        held_bytes: Counter[str] = Counter()
        for (purpose, _, _), held in self._buffers.items():
            held_bytes[purpose.partition(":")[0]] += held.nbytes
        return dict(held_bytes)


def record_spec(
    value_dtype: str,
    step: int,
    record_format: str = "coo",
    block_size: int = DEFAULT_BLOCK_SIZE,
    density: float = 1.0,
    *,
    whole: bool = False,
    checksum: bool = False,
) -> RecordSpec:
    """Makes a `RecordSpec` from names of the configuration.

    Args:
        value_dtype: dtype of the values in the records, a key of `WIRE_CODES`.
        step: the training step.
        record_format: one of `FORMAT_CODES`.
        block_size: of blocks.
        density: part of the elements that are sent; determines the chunk size of `rice`.
        whole: of `rice`: every element is sent, without indices.
        checksum: seal the records.
    """
    return RecordSpec(
        WIRE_CODES[value_dtype],
        step,
        FORMAT_CODES[record_format],
        block_size=block_size,
        log2_span=rice_span(density),
        without_indices=whole,
        checksum=checksum,
    )


def encode(bucket: Bucket, layout: Layout, spec: RecordSpec, buffers: MessageBuffers) -> Message:
    """Encodes a pruned bucket; a record is dense where the requested format is not smaller.

    Args:
        bucket: its gradient is zero at all elements that are not sent; only read.
        layout: cuts it into segments.
        spec: the format of the records.
        buffers: where the message's memory comes from.
    """
    segments = Segments(layout.segment_offsets, layout.segment_keep)
    nnz_S = _count(bucket.grad_N, layout.segment_offsets).cpu()
    room = ops.message_capacity(layout.segment_offsets, spec.value_dtype)
    out = buffers.take_own("message", bucket, room)
    sizes = encode_segments(bucket.grad_N, segments, nnz_S, spec, out)
    return _message(out, bucket, layout, sizes.tolist(), spec, nnz_S)


def encode_segments(
    values_N: torch.Tensor,
    segments: Segments,
    nnz_S: torch.Tensor | None,
    spec: RecordSpec,
    out: torch.Tensor,
    reports: Reports | None = None,
    *,
    residual_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encodes any pruned vector; `ops.encode` describes the arguments.

    Args:
        values_N: only read.
        segments: its pieces, and where their records begin.
        nnz_S: int64 counts of non-zero elements, on any device; None: the call counts them.
        spec: the format of the records.
        out: uint8 of `ops.message_capacity` bytes. Mutated.
        reports: takes the report of the call, which then does not wait.
        residual_N: of quantised values, see `ops.encode`. Mutated.

    Returns:
        int64 bytes of each record or, with slots, of each slot; on the CPU, except for records on
        CUDA with `reports`.

    Raises:
        ExtensionError: slots are too small.
    """
    # The encoders of Rice and those on CUDA count by themselves.
    counts_itself = spec.record_format == FORMAT_RICE or values_N.device.type == "cuda"
    if nnz_S is None and not counts_itself:
        nnz_S = _count(values_N, segments.offsets)
    sizes = ops.encode(values_N, segments, nnz_S, spec, out, residual_N, reports=reports)
    return sizes if segments.slots is None else segments.slots.diff()


def prune_encode(
    bucket: Bucket,
    layout: Layout,
    pruning: Pruning,
    spec: RecordSpec,
    buffers: MessageBuffers,
    *,
    by_shard: bool = False,
) -> Message:
    """Selects elements of a bucket by their thresholds and encodes them, in one pass.

    Args:
        bucket: its gradient is only read.
        layout: cuts the bucket into segments, and into the ranges of the thresholds.
        pruning: what to select. Its residual is mutated. With a capacity, records lie in slots and
            the message's size is fixed.
        spec: the format of the records.
        buffers: where the message's memory comes from.
        by_shard: on a CPU and without a capacity: `Message.records` prunes and encodes each shard
            when the collective asks for it. Until then the gradient must stay as it is.
    """
    grad_N, offsets, keep_S = bucket.grad_N, layout.segment_offsets, layout.segment_keep
    if pruning.capacity_S is None:
        room = ops.message_capacity(offsets, spec.value_dtype)
        out = buffers.take_own("message", bucket, room)
        message = _message(out, bucket, layout, [0] * keep_S.numel(), spec)

        def encode_later(segments: slice, at: int) -> tuple[torch.Tensor, torch.Tensor]:
            keep = keep_S[segments]
            some = Segments(offsets[segments.start :][: keep.numel() + 1], keep)
            return ops.prune_encode(grad_N, pruning, some, spec, out[at:])

        message.encode_later, message.by_shard = encode_later, by_shard
        if not by_shard:
            message.records()
        return message
    # In capacity mode the CPU does not wait: `take_counts` is called when the reports are read.
    reports, slots = Reports(), Slots.of(offsets, keep_S, pruning.capacity_S, spec)
    out = buffers.take_own("message", bucket, sum(slots.sizes))
    segments = Segments(offsets, keep_S, slots.offsets)
    _, nnz_S = ops.prune_encode(grad_N, pruning, segments, spec, out, reports=reports)
    message = _message(out, bucket, layout, list(slots.sizes), spec)
    message.slots, message.reports = slots, reports
    reports.add(nnz_S, message.take_counts, is_status=False)
    return message


def _message(
    out: torch.Tensor,
    bucket: Bucket,
    layout: Layout,
    segment_bytes: list[int],
    spec: RecordSpec,
    nnz_S: torch.Tensor | None = None,
) -> Message:
    """Makes the `Message` of the records in `out`; without `nnz_S` the reports bring the counts."""
    value_dtype = _NAME_OF_CODE[spec.value_dtype]
    message = Message(
        out, layout, segment_bytes, value_dtype, spec.step, counted=None, checksum=spec.checksum
    )
    if spec.record_format == FORMAT_RICE:
        message.log2_span = spec.log2_span
    if spec.value_dtype in RICE_BITS:
        message.unquantised = name_of(bucket.grad_N.dtype)
    if nnz_S is not None:
        message.take_counts(nnz_S)
    return message


def _count(values_N: torch.Tensor, segment_offsets: torch.Tensor) -> torch.Tensor:
    """int64 counts of the non-zero elements of each segment, on the values' device."""
    pieces = values_N.split(segment_offsets.diff().tolist())
    if values_N.device.type == "cpu":
        # On a CPU torch takes ten times as long as numpy where a third of the values is not zero.
        return torch.tensor([_nonzero(piece) for piece in pieces], dtype=torch.int64)
    counts = [piece.count_nonzero() for piece in pieces]
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)


def _nonzero(values_N: torch.Tensor) -> int:
    """Counts the elements of a CPU tensor that are not zero."""
    # As integers: numpy has no bf16, and a thread may flush denormals to zero. The shift removes
    # the sign bit: only 0.0 and -0.0 become 0.
    bits = torch.int32 if values_N.dtype == torch.float32 else torch.int16
    return int(np.count_nonzero(values_N.view(bits).numpy() << 1))


def decode_add_(
    acc_M: torch.Tensor,
    records: torch.Tensor,
    expected: Expected,
    *,
    fresh: bool = False,
    reports: Reports | None = None,
) -> None:
    """Adds one peer's records to `acc_M`. On CUDA this waits for the records' check.

    Args:
        acc_M: fp32; element 0 is the first element of the first segment. Mutated.
        records: uint8, exactly the records of `expected.segment_offsets`, or their slots.
        expected: the header values that the records must have.
        fresh: treat the segments' part of `acc_M` as zero and ignore its content.
        reports: takes the status of the call, which then does not wait; their `read` raises the
            error.

    Raises:
        WireFormatError: the records are not as expected; `acc_M` is as it was.
    """
    base = int(expected.segment_offsets[0])
    ops.decode_add_(acc_M, records, expected, base, fresh=fresh, reports=reports)


def decode_sum_(
    acc_M: torch.Tensor,
    records: Sequence[torch.Tensor],
    expected: Expected,
    ranks: Sequence[int],
    *,
    reports: Reports | None = None,
) -> None:
    """Writes the sum of several ranks' records into `acc_M`, in their order, in one pass.

    The bits are those of one `decode_add_` after the other. `ops.decode_sum_` says what an error
    leaves in `acc_M`.

    Args:
        acc_M: as of `decode_add_`; the content of the segments' part is ignored.
        records: of each rank, as in `decode_add_`.
        expected: the header values that all records must have; its rank is not read.
        ranks: the sender of each of `records`.
        reports: as of `decode_add_`.

    Raises:
        WireFormatError: a rank's records are not as expected.
    """
    base = int(expected.segment_offsets[0])
    ops.decode_sum_(acc_M, records, expected, base, ranks, reports=reports)
