"""The op that adds up all ranks' messages of a bucket over NCCL without blocking the CPU.

The bucket is cut into shards of consecutive segments; the rank that sums a shard up is its owner.
Records lie in slots of fixed sizes (`cuda_ext.slots`), so all byte counts are known beforehand:
`SumPlan` has them, and is made once for each way to cut a bucket. One call queues everything on the
stream: sends and receives, the decoding of the received records, the encoding of the sum.

NCCL's functions are called by address, on a communicator that the caller made
(`transport.nccl_communicator`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import call
from megatron_sparse.cuda_ext.decode_ops import refuse_message
from megatron_sparse.cuda_ext.record_spec import Expected

MARKED_STAGES = ("network", "decode", "encode", "network", "decode")
"""The stages between the events that `nccl_sparse_sum` records."""


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Where one shard lies in the bucket, in every rank's message, and in the buffer of sums.

    Attributes:
        segments: (first, count) of its segments in the bucket.
        offsets: int64: the bucket's elements at which its segments begin and the last one ends.
        message_begin: byte of a message at which the shard's records begin.
        message_slots: int64: bytes from there to each record, and to the last one's end.
        sum_slots: int64: the same for the records of the shard's sum. Where sums are not sent, only
            the last number (their size) is used.
    """

    segments: tuple[int, int]
    offsets: torch.Tensor
    message_begin: int
    message_slots: torch.Tensor
    sum_slots: torch.Tensor

    @cached_property
    def own_offsets(self) -> torch.Tensor:
        """The segments' offsets from the shard's begin."""
        return self.offsets - self.offsets[0]

    @property
    def message_bytes(self) -> int:
        """Bytes of its records in a message."""
        return int(self.message_slots[-1])

    @property
    def sum_bytes(self) -> int:
        """Bytes of its sum's records."""
        return int(self.sum_slots[-1])


@dataclass(frozen=True, eq=False)
class SumPlan:
    """How one rank adds up a bucket with all others.

    Attributes:
        segment_offsets: int64 on the CPU, S+1 elements at which segments begin.
        segment_dense: uint8 on the CPU, 1 for segments whose records are dense in every sum.
        shards: one for each rank, which adds it up; or a single one, the whole bucket, which every
            rank adds up itself.
        rank: of this process.
        world_size: ranks.
        value_dtype: dtype code of all values in records.
        record_format: format code of the sums' records.
        gathers: the owners' sums go to everyone (an all-reduce); else each rank keeps its own.
    """

    segment_offsets: torch.Tensor
    segment_dense: torch.Tensor
    shards: tuple[ShardPlan, ...]
    rank: int
    world_size: int
    value_dtype: int
    record_format: int
    gathers: bool

    def shard_of(self, rank: int) -> ShardPlan:
        """The shard that a rank adds up."""
        return self.shards[0 if len(self.shards) == 1 else rank]

    @property
    def own(self) -> ShardPlan:
        """The shard that this rank adds up."""
        return self.shard_of(self.rank)

    @cached_property
    def received_bytes(self) -> int:
        """Room for the bytes from all ranks; this rank's own place stays empty."""
        return self.world_size * self.own.message_bytes

    @cached_property
    def sums_bytes(self) -> int:
        """Room for the sums of all shards."""
        return sum(shard.sum_bytes for shard in self.shards) if self.gathers else 0

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        messages = sum(self.shard_of(rank).message_bytes for rank in others)
        return messages + (len(others) * self.own.sum_bytes if self.gathers else 0)

    @cached_property
    def words(self) -> torch.Tensor:
        """A row of eight numbers for each shard: `NcclShard` of `csrc/nccl_sum_launch.h`.

        They are (begin, count) of its elements in the bucket, of its segments, of its bytes in a
        message and of its bytes in the buffer of sums.
        """
        numbers, sum_begin = [], 0
        for shard in self.shards:
            begin, end = int(shard.offsets[0]), int(shard.offsets[-1])
            numbers += [begin, end - begin, *shard.segments]
            numbers += [shard.message_begin, shard.message_bytes, sum_begin, shard.sum_bytes]
            sum_begin += shard.sum_bytes
        return torch.tensor(numbers)

    @cached_property
    def tables(self) -> torch.Tensor:
        """`NcclTables` of `csrc/nccl_sum_launch.h` in one tensor, without `segment_kinds`."""
        return torch.cat(
            [
                self.segment_offsets,
                *(shard.own_offsets for shard in self.shards),
                *(shard.message_slots for shard in self.shards),
                *(shard.sum_slots for shard in self.shards),
            ]
        )

    @cached_property
    def statuses_at(self) -> torch.Tensor:
        """Indices of the error codes (0: no error) in a call's report, which `SumCall.check` reads.

        Each is the first word of a status: one for each message, the encoder and each sum.
        """
        by_rank = torch.arange(self.world_size) * codec_cuda.STATUS_WORDS  # the messages' statuses
        if not self.gathers:
            return by_rank
        encoder = self.world_size * codec_cuda.STATUS_WORDS
        # After the encoder's status come the own segments' sizes, then their counts.
        sums = encoder + codec_cuda.STATUS_WORDS + 2 * self.own.segments[1] + by_rank
        return torch.cat([by_rank, torch.tensor([encoder]), sums])


@dataclass(frozen=True, eq=False)
class SumCall:
    """One bucket's sum in one step.

    Attributes:
        plan: the same on every rank, except for `rank`.
        acc_N: fp32 on a CUDA device, the bucket. Mutated: receives the sum, all of it or this
            rank's part; its old content is ignored. Undefined after an error.
        message: uint8, this rank's records in slots, aligned to 16 bytes.
        received: uint8, at least `plan.received_bytes`, aligned. Mutated.
        sums: uint8, at least `plan.sums_bytes`, aligned. Mutated.
        step: the step, in the messages' headers.
        sum_steps: int64 on the CPU, the value that the records of each shard's sum carry as step.
        earlier: int64 on the device, not 0 if making the message failed: then no rank gets a sum.
        events: int64 on the CPU, a `cudaEvent_t` for each border of `MARKED_STAGES`, or 0.
    """

    plan: SumPlan
    acc_N: torch.Tensor
    message: torch.Tensor
    received: torch.Tensor
    sums: torch.Tensor
    step: int
    sum_steps: torch.Tensor
    earlier: torch.Tensor
    events: torch.Tensor

    def check(self, report: torch.Tensor) -> None:
        """Raises the error that the call's report, on the CPU, holds, if any.

        The report is a status for each rank's message; where sums are gathered also the encoder's
        status, with sizes and counts of the own segments, and a status for each rank's sum.

        Raises:
            WireFormatError: names the rank whose records are wrong, and the field.
            ExtensionError: the plan does not fit the bucket.
        """
        if not report[self.plan.statuses_at].any():
            return
        # In the report's order. Records of a sum count their offsets from the shard's begin.
        plan, n, own = self.plan, self.plan.world_size, self.plan.own
        status_words = n * codec_cuda.STATUS_WORDS  # of n statuses: of the messages, or of the sums
        for rank, status in enumerate(report[:status_words].view(n, -1)):
            self._check_status(status, own.offsets, self.step, rank)
        if plan.gathers:
            codec_cuda.check_report("encode", report[status_words:], own.own_offsets)
            for rank, status in enumerate(report[-status_words:].view(n, -1)):
                offsets = plan.shard_of(rank).own_offsets
                self._check_status(status, offsets, int(self.sum_steps[rank]), rank)

    def _check_status(
        self, status: torch.Tensor, offsets: torch.Tensor, step: int, rank: int
    ) -> None:
        """Raises the error in a decoder's status about a rank's records of one shard, if any."""
        begin, end = int(offsets[0]), int(offsets[-1])
        codec_cuda.check_status(status, offsets, begin, end - begin)  # errors of the arguments
        expected = Expected(offsets, self.plan.value_dtype, step, rank)
        refuse_message(status, expected, has_slots=True)


def nccl_sparse_sum(communicator: torch.Tensor, summed: SumCall) -> tuple[torch.Tensor, int]:
    """Queues the sum of a bucket's messages on the current stream, NCCL's part included.

    The same bits as `collectives.direct` or `agsparse`: fp32 in rank order; a sum that is sent to
    all ranks is rounded once to the values' dtype. The CPU reads nothing back and waits for no
    kernel, but in the first call with a peer NCCL blocks it until that peer arrives.

    Args:
        communicator: int64 words of `NcclCommunicator.words`.
        summed: the messages and buffers. Mutated; see `SumCall`.

    Returns:
        The report, on the device, for `SumCall.check`; and NCCL's result code: unless it is 0
        (ncclSuccess), an NCCL call failed and not everything was queued.

    Raises:
        ExtensionError: tensors that do not fit together.
    """
    plan, device = summed.plan, summed.acc_N.device
    return call(
        "nccl_sparse_sum",
        summed.acc_N,
        summed.received,
        summed.sums,
        summed.message,
        communicator,
        plan.words,
        codec_cuda.on_device(plan.tables, device),
        codec_cuda.record_kinds(plan.segment_dense, plan.record_format, device),
        summed.earlier,
        summed.sum_steps,
        summed.events,
        plan.value_dtype,
        summed.step % 2**32,  # the bits that headers hold
        plan.gathers,
    )
