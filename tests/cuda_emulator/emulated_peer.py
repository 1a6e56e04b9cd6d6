"""Peer collectives in the emulator: windows, tables and the call, as the binding makes them.

Ranks run in one launch (virtual ranks, one after the other on the grid's y axis) or each in a
thread of its own, as processes would: then they really wait for one another, in the operating
system's schedule.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch

from megatron_sparse.cuda_ext.peer_ops import (
    ARRIVED_AT,
    CONTROL_BYTES,
    EPOCHS_AT,
    ERROR_AT,
    ERROR_WORDS,
    MAX_PEERS,
    Operation,
    PeerLayout,
)
from tests.cuda_emulator.arguments import Buffer
from tests.cuda_emulator.emulated import DTYPE_CODES, Codecs, EmulatorError


class PeerDomain(ctypes.Structure):
    """Mirrors the struct of peer_launch.h."""

    _fields_ = (
        ("windows", ctypes.c_void_p * MAX_PEERS),
        ("world", ctypes.c_int),
        ("first_rank", ctypes.c_int),
        ("local_ranks", ctypes.c_int),
        ("message_room", ctypes.c_int64),
        ("sum_room", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
    )


class PeerTables(ctypes.Structure):
    """Mirrors the struct of peer_launch.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "segment_offsets",
            "segment_kinds",
            "slots",
            "shard_segments",
            "shard_offsets",
            "shard_slots",
        )
    )


class PeerRank(ctypes.Structure):
    """Mirrors the struct of peer_launch.h."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_int64),
        ("message_slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class PeerCall(ctypes.Structure):
    """Mirrors the struct of peer_launch.h."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("domain", PeerDomain),
        ("tables", PeerTables),
        ("segment_count", ctypes.c_int64),
        ("shard_segments", ctypes.c_void_p),
        ("shard_begins", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("value_dtype", ctypes.c_int),
        ("step", ctypes.c_uint32),
        ("message_density", ctypes.c_double),
        ("sum_density", ctypes.c_double),
        ("in_order_of_coming", ctypes.c_bool),
        ("buffers", ctypes.c_int * 2),
        ("workspace", ctypes.c_void_p),
    )


class PeerCluster:
    """The ranks of a domain, their windows, and how often each phase was run.

    Args:
        codecs: the emulated launchers.
        layout: of the bucket.
        dtype: of gradients and outputs.
        deadline_s: of each wait.
    """

    def __init__(
        self, codecs: Codecs, layout: PeerLayout, dtype: torch.dtype, deadline_s: float = 60
    ) -> None:
        self._library, self._codecs = codecs.library, codecs
        self._library.workspace_of_peer.restype = ctypes.c_int64
        self._library.peer_collective.restype = ctypes.c_char_p
        self._library.peer_fail_at_once.restype = ctypes.c_char_p
        self._library.peer_layout.restype = ctypes.c_int64
        self.layout, self.dtype, self.deadline_s = layout, dtype, deadline_s
        self.windows = [Buffer(layout.window_bytes()) for _ in range(layout.world_size)]
        for window in self.windows:
            window.data[:CONTROL_BYTES] = 0
        tables = (
            layout.segment_offsets,
            layout.segment_kinds,
            layout.slots,
            layout.shard_segments,
            layout.shard_offsets,
            layout.shard_slots,
        )
        self._tables = [Buffer.of(table) for table in tables]
        self.counts = [0, 0]

    def run(
        self,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        *,
        in_order_of_coming: bool = False,
        densities: tuple[float, float] = (1.0, 1.0),
        step: int = 7,
        message_slots: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        threads: Sequence[Callable[[], object]] | None = None,
        deadlines_s: Sequence[float] | None = None,
        shift: int = 0,
    ) -> list[torch.Tensor]:
        """Runs one collective; returns the outputs of the ranks that took part.

        Args:
            operation: what to do.
            inputs: the gradients or messages of all ranks.
            in_order_of_coming: whether owners take shards as ranks come.
            densities: from which messages and sums are dense.
            step: the headers'.
            message_slots: where a message's records lie.
            ranks: consecutive; the others are silent. None for all.
            threads: runs each rank in a thread of its own, which calls this first. None runs all in
                the same launches.
            deadlines_s: of ranks in threads, if they differ from the cluster's.
            shift: elements by which gradients and outputs miss a 256-byte border.
        """
        taking_part = list(range(self.layout.world_size)) if ranks is None else list(ranks)
        for phase in operation.phases:
            self.counts[phase] += 1
        groups = [taking_part] if threads is None else [[rank] for rank in taking_part]
        outs = [
            Buffer.of(torch.full((self._out_numel(operation, r),), 77.0, dtype=self.dtype), shift)
            for r in taking_part
        ]
        calls = [
            self._call(
                operation,
                [inputs[r] for r in group],
                [outs[taking_part.index(r)] for r in group],
                group[0],
                in_order_of_coming,
                densities,
                step,
                message_slots,
                shift,
            )
            for group in groups
        ]
        for (call, _), deadline_s in zip(calls, deadlines_s or (), strict=deadlines_s is not None):
            call.domain.deadline_ns = round(deadline_s * 1e9)
        if threads is None:
            call, buffers = calls[0]
            self._codecs.run(
                "peer_collective",
                [*self.windows, *self._tables, *outs, *buffers],
                ctypes.byref(call),
            )
        else:
            _in_threads(self._library, [call for call, _ in calls], threads)
        return [out.read(self.dtype) for out in outs]

    def error(self, rank: int) -> torch.Tensor:
        """A rank's error words."""
        return self._words(rank, ERROR_AT, ERROR_WORDS)

    def fail_at_once(self, rank: int, blocks: int, threads: int) -> list[int]:
        """Lets all threads of a launch fail for a reason each; the flags that they made of it."""
        flags = Buffer(8 * blocks * threads)
        self._codecs.run(
            "peer_fail_at_once",
            [self.windows[rank], flags],
            ctypes.c_void_p(self.windows[rank].pointer),
            ctypes.c_void_p(flags.pointer),
            blocks,
            threads,
        )
        return flags.read(torch.int64).tolist()

    def arrived(self, rank: int) -> list[int]:
        """In which order a rank took the others' shards."""
        return self._words(rank, ARRIVED_AT, self.layout.world_size).tolist()

    def epochs(self, rank: int) -> list[int]:
        """How many operations of each phase a rank has counted."""
        return self._words(rank, EPOCHS_AT, 2).tolist()

    def flag(self, owner: int, phase: int, peer: int) -> torch.Tensor:
        """The flag of a peer in a rank's window; writing to it changes it."""
        at = 8 * (phase * MAX_PEERS + peer)
        return self.windows[owner].data[at : at + 8].view(torch.int64)

    def message_area(self, rank: int, buffer: int) -> torch.Tensor:
        """The bytes of an area for messages."""
        at = CONTROL_BYTES + buffer * self.layout.message_room
        return self.windows[rank].data[at : at + self.layout.message_room]

    def sum_area(self, rank: int, buffer: int) -> torch.Tensor:
        """The bytes of an area for sums."""
        at = CONTROL_BYTES + 2 * self.layout.message_room + buffer * self.layout.sum_room
        return self.windows[rank].data[at : at + self.layout.sum_room]

    def library_layout(self, what: int) -> int:
        """Sizes from the C++ compiler: the size of a call, then offsets in the control block."""
        return self._library.peer_layout(what)

    def _words(self, rank: int, at: int, count: int) -> torch.Tensor:
        return self.windows[rank].data[at : at + 8 * count].view(torch.int64).clone()

    def _out_numel(self, operation: Operation, rank: int) -> int:
        if operation is not Operation.REDUCE_SCATTER:
            return self.layout.numel
        shard = self.layout.shard(rank)
        return shard.stop - shard.start

    def _call(
        self,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[Buffer],
        first_rank: int,
        in_order_of_coming: bool,
        densities: tuple[float, float],
        step: int,
        message_slots: Sequence[int] | None,
        shift: int,
    ) -> tuple[PeerCall, list[Buffer]]:
        layout = self.layout
        pointers = [window.pointer for window in self.windows]
        held = [Buffer.of(given, 0 if given.dtype == torch.uint8 else shift) for given in inputs]
        slots = None if message_slots is None else Buffer.of(torch.tensor(message_slots))
        ranks = (PeerRank * len(inputs))()
        for rank, given, buffer, out in zip(ranks, inputs, held, outs, strict=True):
            rank.out = out.pointer
            if given.dtype == torch.uint8:
                rank.message, rank.message_bytes = buffer.pointer, given.numel()
                rank.message_slots = None if slots is None else slots.pointer
            else:
                rank.grad = buffer.pointer
        call = PeerCall(
            operation,
            PeerDomain(
                (ctypes.c_void_p * MAX_PEERS)(*pointers),
                layout.world_size,
                first_rank,
                len(inputs),
                layout.message_room,
                layout.sum_room,
                round(self.deadline_s * 1e9),
            ),
            PeerTables(*(table.pointer for table in self._tables)),
            layout.segment_kinds.numel(),
            layout.shard_segments.data_ptr(),
            layout.shard_begins.data_ptr(),
            ctypes.addressof(ranks),
            DTYPE_CODES[self.dtype],
            layout.value_dtype,
            step,
            *densities,
            in_order_of_coming,
            (ctypes.c_int * 2)(*(n % 2 for n in self.counts)),
        )
        workspace = Buffer(self._library.workspace_of_peer(ctypes.byref(call)))
        call.workspace = workspace.pointer
        call.kept_alive = ranks
        return call, [*held, workspace, *([] if slots is None else [slots])]


def _in_threads(
    library: ctypes.CDLL, calls: Sequence[PeerCall], before: Sequence[Callable[[], object]]
) -> None:
    complaints: list[bytes] = []

    def run(call: PeerCall, first: Callable[[], object]) -> None:
        first()
        complaint = library.peer_collective(ctypes.byref(call))
        if complaint is not None:
            complaints.append(complaint)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(calls, before, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if complaints:
        raise EmulatorError(complaints[0].decode())
