"""Cuts of messages, and the exchange of records whose sizes are checked first.

A message is a sequence of *records*, one for each segment of the bucket. A *cut* is a range of
segments. In *capacity mode* (`scheme.capacity`) records lie in slots of fixed size. Codec calls
then write errors to device memory (`Message.reports`), which the CPU reads at the end.

Records of sums count their offsets from the first element of their cut, not from the bucket's
start. In the step's field they carry a number made from the step and that element (`sum_step`). So
a sum is never mistaken for that of another shard or for a rank's own message.
"""

import zlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from itertools import pairwise

import torch

from megatron_sparse.bucket import Cuts, Layout
from megatron_sparse.collectives.base import (
    QUEUED,
    Exchange,
    Identity,
    SparseCollective,
    Steps,
    Subgroup,
    Yielded,
    whole_group,
)
from megatron_sparse.collectives.checksummed import checksummed_size, verified_size
from megatron_sparse.cuda_ext.ops import message_capacity
from megatron_sparse.formats.message import WIRE_CODES, Message
from megatron_sparse.transport import Transport
from megatron_sparse.wire import RECORD_ALIGNMENT, wrong_field

CUTS = 1024
"""Number of layouts whose cuts are cached; a bucket has one layout for each kind of scheme."""


class Cut:
    """Some consecutive segments of a bucket: a shard of it, or all of it, or another part.

    Attributes:
        elements: where they lie in the bucket.
        offsets: of the segments in the bucket; a message's records have these.
        own_offsets: of the segments from the cut's start; records of sums have these.
        keep: uint8, segments that are always dense.
        segments: their numbers in the bucket's layout: `first` to `last` - 1.
    """

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        self.segments = slice(first, last)
        self.offsets = layout.segment_offsets[first : last + 1]
        self.own_offsets = self.offsets - self.offsets[0]
        self.keep = layout.segment_keep[first:last]
        self.elements = slice(int(self.offsets[0]), int(self.offsets[-1]))

    @property
    def numel(self) -> int:
        """Elements of all segments."""
        return self.elements.stop - self.elements.start

    def capacity(self, *value_dtypes: str) -> int:
        """The most bytes that records of these segments take, in any of these dtypes.

        The widest dtype may not need the most: a Rice record of a few quantised values is longer
        than a record of these values in fp32.
        """
        return max(message_capacity(self.own_offsets, WIRE_CODES[name]) for name in value_dtypes)


@lru_cache(CUTS)
def shard_cuts(layout: Layout) -> tuple[Cut, ...]:
    """The cut of each shard, by rank; cached for later steps."""
    return tuple(Cut(layout, *ends) for ends in pairwise(layout.shard_segments))


@lru_cache(CUTS)
def cuts_at(layout: Layout, offsets: Cuts) -> tuple[Cut, ...]:
    """The cuts between these elements, at which the layout is cut; cached for later steps."""
    borders = torch.searchsorted(layout.segment_offsets, torch.tensor(offsets)).tolist()
    return tuple(Cut(layout, *ends) for ends in pairwise(borders))


@lru_cache(CUTS)
def whole_cut(layout: Layout) -> Cut:
    """One cut of the whole bucket; cached for later steps."""
    return Cut(layout, 0, layout.segment_keep.numel())


def group_of(identity: Identity, message: Message, transport: Transport) -> Subgroup:
    """The group of all ranks, with the collective's tag.

    In capacity mode the messages' sizes are part of the tag, because ranks do not agree on sizes
    then: nothing else detects a rank with another capacity.
    """
    if message.slots is not None:
        sized = f"{identity.scheme} in {message.slots.sizes} bytes"
        identity = replace(identity, scheme=sized)
    return whole_group(transport, identity.tag)


def reads_reports(collective: SparseCollective) -> SparseCollective:
    """Decorator: reads the reports of a collective's codec calls at its end, raises their errors.

    Only messages in capacity mode have reports. The error is `WireFormatError` if a peer's records
    are not what was announced. After `QUEUED` the bucket may be used while the reports come in.
    """

    @wraps(collective)
    def checked(exchange: Exchange, message: Message) -> Steps:
        sent_bytes = yield from collective(exchange, message)
        if message.reports is not None:
            read = message.reports.begin_read()
            if not read.ready():
                yield QUEUED
                yield read
            read.finish()  # raises
        return sent_bytes

    return checked


def sum_step(step: int, cut: Cut) -> int:
    """The number that records of a sum carry in the step's field."""
    return zlib.crc32(f"{step}|{cut.elements.start}".encode())


def exchange_records(
    group: Subgroup,
    send: tuple[int, torch.Tensor] | None,
    receive: tuple[int, torch.Tensor] | None,
    *,
    known: tuple[bool, bool] = (False, False),
    last: bool = False,
) -> Generator[Yielded, None, torch.Tensor]:
    """Sends records to one peer and receives records from one peer, sizes first.

    Two rounds: 8 bytes with the size each way, then the records. On CUDA the CPU waits for the
    size.

    Args:
        group: peers are numbered in it.
        send: (peer, records); None to send nothing.
        receive: (peer, room for the most bytes that it may send); None to receive nothing.
        known: for `send` and for `receive`, whether both ends know the size, because dense values
            travel instead of records and fill the room exactly. The size is then not sent.
        last: this rank will post nothing more.

    Returns:
        The received records, a view of the given room; empty if `receive` is None.

    Raises:
        WireFormatError: the peer announces more than there is room for, or its size is damaged.
    """
    knows_sent, knows_received = known
    either = send or receive  # for its device
    assert either is not None, "there is something to send or to receive"
    size = torch.empty(1, dtype=torch.int64, device=either[1].device)
    # Round 1: sizes. The peer's lands in `size`.
    sizes_out, sizes_in = [], []
    if send is not None and not knows_sent:
        sizes_out = [(send[0], torch.full_like(size, checksummed_size(send[1].numel())))]
    if receive is not None and not knows_received:
        sizes_in = [(receive[0], size)]
    if sizes_out or sizes_in:
        yield from group.exchange(sizes_out, sizes_in)
    if receive is not None and sizes_in:
        peer, room = receive
        rank = group.ranks[peer]
        announced = verified_size(int(size), rank)
        check_sizes([announced], [room.numel()], [rank])
        receive = peer, room[:announced]
    # Round 2: records.
    sends, receives = ([] if each is None else [each] for each in (send, receive))
    yield from group.exchange(sends, receives, last=last)
    return size.new_empty(0, dtype=torch.uint8) if receive is None else receive[1]


def check_announced(
    sizes: Sequence[int], cuts: Sequence[Cut], value_dtype: str, ranks: Sequence[int] | None = None
) -> None:
    """Refuses announced sizes, one for each cut, that no valid records of that cut can have.

    Call it before allocating memory of these sizes. `ranks`: who announced each size, for the
    error; None: rank i announced size i.

    Raises:
        WireFormatError: names the rank.
    """
    check_sizes(sizes, [cut.capacity(value_dtype) for cut in cuts], ranks or range(len(sizes)))


def check_sizes(sizes: Sequence[int], most: Sequence[int], ranks: Sequence[int]) -> None:
    """Refuses sizes above `most` or below 0, or that are no multiple of a record's alignment.

    The arguments are by announcing rank, in bytes.

    Raises:
        WireFormatError: names the rank.
    """
    for size, limit, rank in zip(sizes, most, ranks, strict=True):
        if not 0 <= size <= limit or size % RECORD_ALIGNMENT:
            possible = f"0 to {limit} bytes, a multiple of {RECORD_ALIGNMENT}"
            raise wrong_field(rank, "announced size", possible, size)


def message_parts(message: Message, cuts: Sequence[Cut]) -> list[torch.Tensor]:
    """The records of each cut, as views."""
    return [message.records(cut.segments) for cut in cuts]
