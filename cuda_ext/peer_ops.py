"""Sparse collectives over peer memory: the kernels' arguments (`csrc/peer.cu`), and errors.

Every rank of an NVLink domain has a *window*: memory that all ranks reach by pointer, with the same
layout on every rank (`csrc/peer_launch.h`). It begins with 4096 bytes of control (flags, counters,
the error words), which are zeroed before use; two areas for messages follow, then two for sums. A
slot of an area has room for its segment's dense record, so nothing overflows and the host needs no
size.

Nothing here waits for the device. Errors on the device are left in the error words; `look_at` turns
them into a typed error once they have been copied to the host.

The module is longer than 400 lines because layout, domain, call and errors together are the Python
side of one header, `csrc/peer_launch.h`.

Shape suffixes: N elements of the bucket, S segments, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import (
    GRAD_DTYPES,
    call,
    check_code,
    check_flat,
    check_offsets,
    refusal,
)
from megatron_sparse.cuda_ext.decode_ops import MESSAGE_FIELDS, refuse_message
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    HEADER_BYTES,
    payload_bytes,
)

OP = "peer_collective"
MAX_PEERS = 72
CONTROL_BYTES = 4096
AREA_ALIGNMENT = 256
EPOCHS_AT = 2 * 8 * MAX_PEERS
ARRIVED_AT = EPOCHS_AT + 16
ERROR_AT = ARRIVED_AT + 8 * MAX_PEERS
"""Bytes from a window's begin: the part that only its own rank writes."""
ERROR_WORDS = 9
_MISSING, _RECORD, _BUFFER = 1, 2, 3  # PeerError of peer_launch.h


class Operation(IntEnum):
    """A collective; `PeerOperation` of `csrc/peer_launch.h`."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2

    @property
    def phases(self) -> tuple[int, ...]:
        """What the ranks exchange: 0 messages, 1 sums."""
        return ((0, 1), (0,), (1,))[self]

    def __str__(self) -> str:
        return f"peer-memory {self.name.lower().replace('_', '-')}"


@dataclass(frozen=True)
class PeerLayout:
    """How a bucket is cut into shards and segments, and where records lie in a window.

    Made once for each bucket; its copies on the device are cached (`codec_cuda.on_device`).

    Attributes:
        segment_offsets: int64, S+1 elements at which segments begin.
        segment_kinds: uint8, the requested `RecordKind` (`csrc/record.h`) of each segment.
        slots: int64, S+1 bytes at which records of a message begin in their area.
        shard_segments: int64, W+1, the first segment of each shard.
        shard_offsets: int64, S+W: shard after shard, its segments' offsets from its first element,
            the last one's end included.
        shard_slots: int64, S+W, likewise of slots.
        shard_begins: int64, W+1 elements.
        value_dtype: dtype code of values in records.
    """

    segment_offsets: torch.Tensor
    segment_kinds: torch.Tensor
    slots: torch.Tensor
    shard_segments: torch.Tensor
    shard_offsets: torch.Tensor
    shard_slots: torch.Tensor
    shard_begins: torch.Tensor
    value_dtype: int

    @classmethod
    def of(
        cls,
        segment_offsets: torch.Tensor,
        segment_dense: torch.Tensor,
        shard_segments: Sequence[int],
        value_dtype: int,
        record_format: int = FORMAT_ADAPTIVE,
    ) -> PeerLayout:
        """The layout of a bucket whose shard i is segments [i] to [i+1].

        Args:
            segment_offsets: int64 on the CPU, S+1 ascending offsets from 0 to N.
            segment_dense: uint8 on the CPU, 1 for segments that are dense whatever they hold.
            shard_segments: W+1 ascending numbers from 0 to S; a shard may be empty.
            value_dtype: dtype code of the values.
            record_format: of sparse segments: adaptive, COO, Pici or dense.

        Raises:
            ExtensionError: invalid cuts, or an unknown dtype or format.

        Example:
            >>> cut = torch.tensor([0, 8, 12])
            >>> PeerLayout.of(cut, torch.zeros(2, dtype=torch.uint8), (0, 1, 2), 0).slots
            tensor([  0,  80, 144])
        """
        op, count = OP, segment_dense.numel()
        check_offsets(op, "segment_offsets", segment_offsets, int(segment_offsets[-1]))
        check_flat(op, "segment_dense", segment_dense, (torch.uint8,), segment_offsets.numel() - 1)
        cuts = torch.tensor(shard_segments)
        if cuts[0] != 0 or cuts[-1] != count or bool((cuts.diff() < 0).any()):
            expected = f"ascending numbers from 0 to {count}"
            raise refusal(op, "shard_segments does not cut the segments", expected, shard_segments)
        if not 1 < cuts.numel() <= MAX_PEERS + 1:
            expected = f"1 to {MAX_PEERS}"
            raise refusal(op, "there are too many ranks", expected, cuts.numel() - 1)
        if record_format not in (FORMAT_ADAPTIVE, FORMAT_COO, FORMAT_PICI, FORMAT_DENSE):
            raise refusal(
                op, "the format is unknown", "adaptive, COO, Pici or dense", record_format
            )
        check_code(op, "value_dtype", value_dtype)
        numel_S = segment_offsets.diff()
        room_S = HEADER_BYTES + payload_bytes(FORMAT_DENSE, numel_S, numel_S, value_dtype)
        slots = torch.cat([room_S.new_zeros(1), room_S.cumsum(0)])
        kinds = torch.full_like(segment_dense, record_format & 0xFF)
        return cls(
            segment_offsets,
            kinds.masked_fill_(segment_dense != 0, FORMAT_DENSE),
            slots,
            cuts,
            _of_shards(segment_offsets, cuts),
            _of_shards(slots, cuts),
            segment_offsets[cuts],
            value_dtype,
        )

    @property
    def world_size(self) -> int:
        """Ranks, and shards."""
        return self.shard_segments.numel() - 1

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return int(self.segment_offsets[-1])

    @property
    def message_room(self) -> int:
        """Bytes that a message area must have."""
        return _aligned(int(self.slots[-1]))

    @property
    def sum_room(self) -> int:
        """Bytes that an area for sums must have."""
        return _aligned(int(self.slots[self.shard_segments].diff().max()))

    def window_bytes(self) -> int:
        """Bytes of a window for this bucket: about 2 (1 + 1 / W) times the dense bucket."""
        return window_bytes(self.message_room, self.sum_room)

    def shard(self, rank: int) -> slice:
        """The elements that a rank owns."""
        return slice(int(self.shard_begins[rank]), int(self.shard_begins[rank + 1]))


@dataclass(frozen=True)
class PeerDomain:
    """The ranks that take part, and where their windows are.

    Attributes:
        pointers: the address of every rank's window, as this process sees it.
        first_rank: of the ranks that this process runs.
        local_ranks: how many those are; more than one are virtual ranks on one GPU.
        message_room: bytes of an area for messages, the same on every rank.
        sum_room: bytes of an area for sums.
        deadline_s: seconds for each wait for messages. Waits for sums have twice as many, because
            a peer may have to wait for messages first.
    """

    pointers: tuple[int, ...]
    first_rank: int
    local_ranks: int
    message_room: int
    sum_room: int
    deadline_s: float

    def words(self, buffers: tuple[int, int]) -> torch.Tensor:
        """The op's argument."""
        return torch.tensor(
            [
                len(self.pointers),
                self.first_rank,
                self.local_ranks,
                self.message_room,
                self.sum_room,
                round(self.deadline_s * 1e9),
                *buffers,
                *self.pointers,
            ]
        )


def window_bytes(message_room: int, sum_room: int) -> int:
    """Bytes of a window whose areas have this room."""
    return CONTROL_BYTES + 2 * (message_room + sum_room)


@dataclass(frozen=True)
class PeerCall:
    """One collective of the ranks of this process.

    Attributes:
        operation: what to do.
        buffers: which of the two areas messages go to, and which sums: the number of earlier
            operations with such a phase, plus one, modulo 2.
        inputs: for each local rank its gradient (all-gather: that of its shard), contiguous, only
            read; or, as uint8, the records of its message, back to back or at `message_slots`.
        outs: for each local rank the tensor that receives the result: N elements; for a
            reduce-scatter those of the shard. May be the inputs. Mutated; undefined after an error.
        step: the training step, in the records' headers; modulo 2^32.
        message_slots: int64 on the CPU, S+1 bytes, where messages are in capacity mode.
    """

    operation: Operation
    buffers: tuple[int, int]
    inputs: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]
    step: int
    message_slots: torch.Tensor | None = None


def peer_collective(
    domain: PeerDomain,
    layout: PeerLayout,
    collective: PeerCall,
    *,
    message_density: float = 1.0,
    sum_density: float = 1.0,
    in_order_of_coming: bool = False,
) -> None:
    """Launches all of a collective on the current stream, for each rank of this process.

    Sums are made in fp32 in rank order, on one rank, and rounded to the record's dtype once; a
    reduce-scatter rounds only to the outputs' dtype. All ranks hold the same bits, whichever rank
    arrives first. Costs are in `csrc/peer.cu`. Returns at once, reads nothing on the host, and may
    be captured in a CUDA graph that holds an even number of the operations on a domain.

    Args:
        domain: the same on every rank, except for the ranks that the process runs.
        layout: the same on every rank, and no larger than the windows' areas.
        collective: what to do, with which tensors.
        message_density: at or above this density a shard of a message travels dense. The density
            is that of non-zero elements in the shard's sparse segments.
        sum_density: the same for the sum of a shard.
        in_order_of_coming: an owner fetches each rank's part as soon as that rank has arrived, and
            adds the parts in rank order when it has all of them. Otherwise it waits for all ranks
            before it reads any part. Takes memory for the parts: N elements for each local rank.

    Raises:
        ExtensionError: arguments that do not fit together.
        DependencyError: the CUDA part of the extension cannot be built.
    """
    _check_rooms(domain, layout)
    _check_tensors(domain, layout, collective)
    outs, device = collective.outs, collective.outs[0].device
    tables = [
        codec_cuda.on_device(table, device)
        for table in (
            layout.segment_offsets,
            layout.segment_kinds,
            layout.slots,
            layout.shard_segments,
            layout.shard_offsets,
            layout.shard_slots,
        )
    ]
    cuts = torch.stack([layout.shard_segments, layout.shard_begins])
    call(
        OP,
        outs[0],
        list(outs[1:]),
        list(collective.inputs),
        int(collective.operation),
        domain.words(collective.buffers),
        tables,
        cuts,
        codec_cuda.on_device(collective.message_slots, device),
        layout.value_dtype,
        collective.step % 2**32,
        message_density,
        sum_density,
        in_order_of_coming,
    )


def _check_rooms(domain: PeerDomain, layout: PeerLayout) -> None:
    """Refuses a layout that does not fit the domain and its windows."""
    world = layout.world_size
    if len(domain.pointers) != world:
        raise refusal(OP, "the layout is of another domain", len(domain.pointers), world)
    if layout.message_room > domain.message_room or layout.sum_room > domain.sum_room:
        there = f"areas of {domain.message_room} and {domain.sum_room}"
        needed = f"{layout.message_room} and {layout.sum_room} bytes"
        raise refusal(OP, "the windows are too small", needed, there)


def _check_tensors(domain: PeerDomain, layout: PeerLayout, collective: PeerCall) -> None:
    """Refuses inputs and outputs that do not fit the layout."""
    operation, inputs, outs = collective.operation, collective.inputs, collective.outs
    for name, tensors in (("inputs", inputs), ("outs", outs)):
        if len(tensors) != domain.local_ranks:
            raise refusal(OP, f"{name} are missing", domain.local_ranks, len(tensors))
    local = range(domain.first_rank, domain.first_rank + domain.local_ranks)
    dtype, device = outs[0].dtype, outs[0].device
    if device.type != "cuda":
        raise refusal(OP, "outs are on the wrong device", "cuda: windows are GPU memory", device)
    for rank, given, out in zip(local, inputs, outs, strict=True):
        shard = layout.shard(rank)
        shard_numel = shard.stop - shard.start
        taken = shard_numel if operation is Operation.ALL_GATHER else layout.numel
        left = shard_numel if operation is Operation.REDUCE_SCATTER else layout.numel
        is_message = given.dtype == torch.uint8
        check_flat(
            OP,
            "inputs",
            given,
            (inputs[0].dtype,) if is_message else (dtype,),
            None if is_message else taken,
            device,
        )
        check_flat(OP, "outs", out, GRAD_DTYPES if rank == local[0] else (dtype,), left, device)
        if is_message and operation is Operation.ALL_GATHER:
            raise refusal(OP, "inputs have the wrong dtype", "a gradient's", given.dtype)


def look_at(
    words: torch.Tensor, layout: PeerLayout, rank: int, deadline_s: float, bucket: str, step: int
) -> None:
    """Raises the error that a rank's error words, on the CPU, hold, if any.

    Args:
        words: int64, `ERROR_WORDS` of them.
        layout: of the bucket.
        rank: the rank of the window.
        deadline_s: of the domain.
        bucket: its name, for the text.
        step: the step that the records should carry.

    Raises:
        CommunicationError: a rank did not arrive.
        WireFormatError: a rank's records are wrong; this rank or another one has found it.
    """
    code, operation, phase, number, named, reporter, segment, field, value = words.tolist()
    if code == 0:
        return
    what = f"bucket {bucket}: {Operation(operation)} {number} ({('messages', 'sums')[phase]})"
    if code == _MISSING:
        seen_by = "" if reporter == rank else f" (found by rank {reporter})"
        raise CommunicationError(
            f"{what}: rank {named} did not come{seen_by}",
            expected=f"all {layout.world_size} ranks within {deadline_s * (1 + phase):g} s",
            got=f"no flag of rank {named}",
            remedy="look at that rank's log; raise scheme.timeout_s if it was only slow",
        )
    if code == _BUFFER:
        raise CommunicationError(
            f"{what}: the host counted other operations than the device",
            expected="an even number of operations of each kind in a captured CUDA graph",
            got=f"area {value} for operation {number}",
            remedy="capture two steps at a time",
        )
    assert code == _RECORD, f"peer.cu knows no error {code}"
    if reporter != rank:
        raise WireFormatError(
            f"{what}: rank {reporter} refused the records of rank {named}",
            expected="records that every rank can read",
            got="see that rank's error",
            remedy="run the same version with the same configuration on all ranks",
        )
    try:
        refuse_message(
            torch.tensor([1, segment, field, value]),
            Expected(layout.segment_offsets, layout.value_dtype, step, named),
            has_slots=True,
        )
    except MegatronSparseError as error:
        error.add_note(f"{what}, field {MESSAGE_FIELDS[field]}")
        raise


def _of_shards(table: torch.Tensor, shard_segments: torch.Tensor) -> torch.Tensor:
    """The part of each shard, counted from its begin, one after the other."""
    pairs = zip(shard_segments.tolist(), shard_segments[1:].tolist(), strict=False)
    return torch.cat([table[a : b + 1] - table[a] for a, b in pairs])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // AREA_ALIGNMENT) * AREA_ALIGNMENT
