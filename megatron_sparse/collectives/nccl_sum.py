"""`direct` and `agsparse` in one call of C++ for each bucket, on NCCL (`scheme.nccl_engine`).

For messages of fixed size: each record has a *slot* of fixed size at a known offset. Then a *plan*
of all offsets is made once, and each step makes one call for each bucket. The result is bit for bit
that of the collectives of the same name, which call this module if their transport has an NCCL
communicator of its own. With many buckets and ranks, their many calls would take most of the CPU
time (docs/reading-the-breakdown.md).

The kernels cannot raise: a call leaves a *report*, a few words in device memory that state what was
wrong with a record. The CPU reads it later.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from megatron_sparse.bucket import Layout
from megatron_sparse.collectives.base import POSTED, Steps
from megatron_sparse.collectives.records import Cut, shard_cuts, sum_step, whole_cut
from megatron_sparse.collectives.sparse_sum import SparseSum, sum_slots
from megatron_sparse.cuda_ext.nccl_ops import MARKED_STAGES, ShardPlan, SumCall, SumPlan
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.cuda_ext.slots import TABLES, Slots
from megatron_sparse.formats.message import WIRE_CODES
from megatron_sparse.transport.nccl_communicator import NcclCommunicator
from megatron_sparse.wire import FORMAT_ADAPTIVE


def sum_in_one_call(
    scheme: str, sums: SparseSum, communicator: NcclCommunicator, *, by_owners: bool
) -> Steps:
    """Writes the sum of all ranks' messages into the bucket, or this rank's shard of it.

    Args:
        scheme: its name, for errors.
        sums: receives the sum; its message is in slots. Mutated.
        communicator: of the group.
        by_owners: each rank adds up its own shard (`direct`); else every rank adds up the whole
            bucket (`agsparse`).

    Raises:
        CommunicationError: a rank did not come in time or is gone, or NCCL failed.
        WireFormatError: a peer's records are wrong; when the message's reports are read.
    """
    exchange, message = sums.exchange, sums.message
    reports, slots = message.reports, message.slots
    assert slots is not None, "callers pass messages of fixed size"
    assert reports is not None, "messages of fixed size have reports"
    bucket, timer, scatters = exchange.bucket, exchange.timer, exchange.scatters
    rank, n = communicator.rank, communicator.world_size
    gathers = by_owners and not scatters
    cuts = _cuts(message.layout, by_owners=by_owners)
    code = WIRE_CODES[message.value_dtype]
    plan = _plan(message.layout, slots, code, (rank, n), by_owners, gathers)
    sum_steps = torch.tensor([sum_step(message.step, cut) for cut in cuts])
    # CUDA events for C++ to time its stages with. Without a gather only the first two stages run;
    # 0 stands for no event.
    events = timer.borders(MARKED_STAGES if gathers else MARKED_STAGES[:2])
    events += [0] * (len(MARKED_STAGES) + 1 - len(events))
    summed = SumCall(
        plan,
        sums.sum_N,
        message.records(),
        received=sums.take("received", plan.received_bytes),
        sums=sums.take("gathered", plan.sums_bytes),
        step=message.step,
        sum_steps=sum_steps,
        earlier=reports.statuses(bucket.grad_N.device),  # of the calls that made the message
        events=torch.tensor(events),
    )
    report = communicator.sparse_sum(f"{scheme} of bucket {bucket.name}", summed)
    yield POSTED

    def check(words: torch.Tensor) -> None:
        """Raises the error that the report states. Called when the CPU has read its words."""
        # An aborted communicator leaves buffers that look like damaged records: check it first.
        communicator.check()
        summed.check(words)

    reports.add(report, check)  # `reads_reports` reads it after the collective
    sums.write(cuts[rank].elements if scatters else slice(0, bucket.numel))
    return plan.sent_bytes


def _cuts(layout: Layout, *, by_owners: bool) -> Sequence[Cut]:
    return shard_cuts(layout) if by_owners else (whole_cut(layout),)


@lru_cache(TABLES)
def _plan(
    layout: Layout, slots: Slots, code: int, place: tuple[int, int], by_owners: bool, gathers: bool
) -> SumPlan:
    """The offsets of all records that a sum sends and receives, for C++; cached for later steps.

    `layout` and `slots` are the message's; `code` is the wire code of the values' dtype; `place` is
    (this rank, number of ranks); `gathers`: whether the owners' sums are all-gathered.
    """
    rank, world_size = place
    shards, spec = [], RecordSpec(code, step=0, record_format=FORMAT_ADAPTIVE)  # for slot sizes
    for cut in _cuts(layout, by_owners=by_owners):
        first, stop = cut.segments.start, cut.segments.stop
        message_offsets = slots.part(cut.segments)
        sum_offsets = torch.zeros_like(message_offsets)  # without a gather no sum is encoded
        if gathers:
            sum_offsets = sum_slots(slots, cut, world_size, spec).offsets
        shards.append(
            ShardPlan(
                (first, stop - first),
                cut.offsets,
                message_begin=int(slots.offsets[first]),
                message_slots=message_offsets,
                sum_slots=sum_offsets,
            )
        )
    return SumPlan(
        layout.segment_offsets,
        layout.segment_keep,
        tuple(shards),
        rank,
        world_size,
        code,
        record_format=FORMAT_ADAPTIVE,
        gathers=gathers,
    )
