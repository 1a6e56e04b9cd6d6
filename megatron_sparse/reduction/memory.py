"""The account of the plugin's memory: its bytes on a rank, item by item, before a run starts.

The sizes are computed from the buckets' shapes and the configuration, with the functions that the
run itself takes its buffers by. They are those of the run's largest step, the ramp included:
buffers grow and never shrink. Where ranks exchange message sizes, the expected ones are taken, and
thresholds that come from samples change them by a few percent.

Not counted: Megatron's own memory, the communicators' of NCCL and gloo, the caches of torch's
allocator, and a few words for each bucket and step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Layout
from megatron_sparse.collectives import AUTO, SCHEMES, Input
from megatron_sparse.collectives.buffer_sizes import FP32_BYTES, BufferSizes, MessagePlaces
from megatron_sparse.compression.residual import RESIDUAL_DTYPES, ResidualStore
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import CompressionConfig, SparseConfig
from megatron_sparse.cuda_ext import ops, workspace
from megatron_sparse.cuda_ext.slots import TABLES
from megatron_sparse.formats.message import TURNS, wire_dtype_of
from megatron_sparse.formats.message_sizes import scratch_capacity, segment_capacity
from megatron_sparse.planner import Plan, Planner
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.reduction.straggler_policy import AWARE
from megatron_sparse.wire import FORMAT_RICE


class Item(NamedTuple):
    """An item of the account.

    Attributes:
        purpose: why the plugin holds it.
        without: how to do with less of it.
    """

    purpose: str
    without: str


ITEMS = {
    "residual": Item(
        "the part of gradients that was not sent yet", "compression.residual_dtype=bf16 halves it"
    ),
    "undo": Item(
        "a copy of the residual, to undo a step that is skipped or repeated",
        "megatron.rerun_mode=disabled, in runs without fp16 and without a loss per token",
    ),
    "messages": Item(
        "this rank's encoded selection; values in a narrower dtype; on a GPU for two buckets",
        "scheme.capacity: buffers as large as the density needs, not as the bucket",
    ),
    "received": Item(
        "records that peers have sent; on a GPU for one bucket at a time",
        "scheme=direct: one shard of each peer's message, not all of it",
    ),
    "sums": Item(
        "encoded sums; the fp32 sum of narrower gradients; on a GPU for one bucket at a time",
        "training.use_distributed_optimizer=true: a rank gets its own shard only",
    ),
    "workspace": Item(
        "scratch memory of the encoders, shared by all buckets",
        "training.overlap_grad_reduce=true: smaller buckets",
    ),
    "parameters": Item(
        "this rank's shards of the parameters once more, for exact and lossy gathers",
        "parameters.method=raw",
    ),
    "tables": Item("offsets of segments, shards and slots", "a shorter compression.ramp_iters"),
}
"""Every item that an account or a report may have, in the order in which they are shown."""

_ITEM_OF = {
    **dict.fromkeys(("message", "narrow", "shuffled", "lanes"), "messages"),
    **dict.fromkeys(("received", "incoming", "parts", "late", "given"), "received"),
    **dict.fromkeys(
        (
            *("gathered", "encoded", "outgoing", "sum", "piece", "partition", "early"),
            *("node_sum", "node_rest"),
        ),
        "sums",
    ),
    **dict.fromkeys(("scratch", "profile"), "workspace"),
}
"""The item of each purpose of `MessageBuffers`."""


def item_of(purpose: str) -> str:
    """The item that a buffer belongs to; `messages` for those of other packages' schemes."""
    return _ITEM_OF.get(purpose, "messages")


RAMP_STEPS = 16
"""Steps of the ramp that are looked at, its first one included."""
ALLOCATION = 512
"""Bytes: torch's allocator on CUDA rounds up to a multiple of it."""
_BEFORE_GATE = frozenset({"message", "narrow"})
"""Purposes of a bucket's own buffers. On a GPU, buckets take them in turn and share all others."""


class MemoryShare(NamedTuple):
    """The buckets of one group of ranks, for an account.

    Attributes:
        rank: this rank's number in the group that exchanges selections.
        buckets: what this rank selects from: whole buckets, or its parts of them.
        wholes: the buckets themselves, at a level above `rank`; None: the same.
        is_virtual: the ranks of a node add up as a backend of a cluster would, not over gloo.
        nodes: of each rank of the group; None: all are on one node.
    """

    rank: int
    buckets: Sequence[Bucket]
    wholes: Sequence[Bucket] | None = None
    is_virtual: bool = False
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MemoryAccount:
    """What the plugin will hold on one rank.

    Attributes:
        parameters: elements of the parameters on this rank.
        nbytes: by item of `ITEMS`, in that order; items of no bytes are left out.
        notes: what the numbers leave out, in words.
    """

    parameters: int
    nbytes: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(self.nbytes.values())

    def of_parameter(self, nbytes: int) -> float:
        """Bytes for each parameter."""
        return nbytes / self.parameters if self.parameters else 0.0

    def line(self) -> str:
        """The account in one line.

        Example:
            >>> MemoryAccount(2**20, {"residual": 2**22}).line()
            'memory of the plugin: 4.00 bytes a parameter, 4.0 MiB on this rank (residual 4.00)'
        """
        parts = ", ".join(f"{item} {self.of_parameter(n):.2f}" for item, n in self.nbytes.items())
        return "; ".join(
            (
                f"memory of the plugin: {self.of_parameter(self.total):.2f} bytes a parameter, "
                f"{self.total / 2**20:,.1f} MiB on this rank" + (f" ({parts})" if parts else ""),
                *self.notes,
            )
        )


def account(
    config: SparseConfig,
    groups: Sequence[MemoryShare],
    *,
    undo: bool,
    parameter_dtype: torch.dtype | None = None,
) -> MemoryAccount:
    """Computes what the plugin will hold on a rank. Allocates nothing.

    Args:
        config: resolved: `scheme.capacity=auto` counts as 1.25 for buckets on CUDA.
        groups: for each group of ranks that synchronises buckets, this rank's share. Only the
            shapes, dtypes and devices of buckets are read.
        undo: whether steps can be skipped or repeated; `compression.undo=always` counts too.
        parameter_dtype: of the parameters in Megatron's buffers, if known: then the shards that
            `parameters.method=exact` or `lossy` keeps are counted.
    """
    undo = undo or config.compression.undo == "always"
    totals: Counter[str] = Counter()
    parameters, notes = 0, {}
    if config.scheme.name == AUTO and config.planner.cluster and not config.planner.pin:
        notes["planner.cluster may choose schemes that need other buffers"] = None
    method = config.parameters.method
    keeps = method in COMPRESSED
    if keeps and parameter_dtype is None:
        notes[f"without the shards that parameters.method={method} keeps"] = None
    for share in groups:
        wholes = share.buckets if share.wholes is None else share.wholes
        if keeps and parameter_dtype is not None:
            totals["parameters"] += sum(map(_shard_numel, wholes)) * parameter_dtype.itemsize
        group = _Group(config, share, undo=undo)
        for bucket, whole in zip(share.buckets, wholes, strict=True):
            group.add(bucket)
            group.add_inside(bucket, whole)
            parameters += sum(piece.numel for piece in whole.parameters)
        totals.update(group.nbytes())
        for name in sorted(group.unknown):
            notes[f"without the buffers of {name}, which are known when it has run"] = None
    nbytes = {item: totals[item] for item in ITEMS if totals[item]}
    return MemoryAccount(parameters, nbytes, tuple(notes))


def share_of(reducer: GradientReducer, buckets: Sequence[Bucket]) -> MemoryShare:
    """This rank's share of the buckets of a reducer."""
    across, parts = reducer.across, [reducer.part(bucket) for bucket in buckets]
    return MemoryShare(across.rank, parts, buckets, nodes=across.nodes)


def _shard_numel(bucket: Bucket) -> int:
    """The parameters that this rank owns, if they are gathered."""
    gathered = bucket.op is CollectiveOp.REDUCE_SCATTER and bucket.world_size > 1
    return bucket.numel // bucket.world_size if gathered else 0


def held(
    residuals: ResidualStore, reducers: Iterable[GradientReducer], parameters: int = 0
) -> dict[str, int]:
    """Bytes that a process holds now, by item of `ITEMS`; `residual`, `undo`, `messages` always.

    Without tables, and without memory that torch's allocator lends for one call.

    Args:
        residuals: of all groups.
        reducers: of all groups.
        parameters: bytes of the shards that exact and lossy gathers keep.
    """
    found: Counter[str] = Counter(undo=residuals.undo_nbytes, messages=0)
    found["residual"] = residuals.nbytes - residuals.undo_nbytes
    for reducer in reducers:
        for purpose, nbytes in reducer.buffers.by_purpose().items():
            found[item_of(purpose)] += nbytes
    if parameters:
        found["parameters"] = parameters
    return {item: found[item] for item in ITEMS if item in found}


class _Group:
    """Adds up what one reducer will hold.

    Attributes:
        unknown: schemes that do not declare their buffers.
    """

    def __init__(self, config: SparseConfig, share: MemoryShare, *, undo: bool) -> None:
        self._config, self._share, self._undo = config, share, undo
        self._planner = Planner(config.compression, config.scheme)
        if config.planner.pin:
            self._planner = planner_of(config, logs=False)
        self._buffers: dict[tuple[str, str], int] = {}
        """Bytes by purpose and the bucket that owns the buffer; "" where all buckets share it."""
        self._residual_numel = 0
        self._codec_bytes = self._network_bytes = self._table_bytes = self._tables = 0
        self._largest_table = 0
        self.unknown: set[str] = set()

    def add(self, bucket: Bucket) -> None:
        """Counts a bucket."""
        keeps_residual = has_slots = False
        layouts: dict[Layout, None] = {}
        for step in _steps(self._config.compression):
            plan = self._planner.plan_for(bucket, step)
            sizes = self._sizes(bucket, plan)
            is_sparse = sizes.message is not None
            keeps_residual |= is_sparse or plan.narrows(bucket)
            self._add_buffers(sizes, plan)
            if is_sparse:
                layouts[sizes.places.layout] = None
                has_slots |= sizes.places.fixed
        if keeps_residual:
            self._residual_numel += bucket.numel
        for layout in layouts:
            self._count_tables(bucket, layout, has_slots=has_slots)

    def _add_buffer(self, purpose: str, owner: str, nbytes: int) -> None:
        """A buffer grows to the largest size that any step takes."""
        known = self._buffers.get((purpose, owner), 0)
        self._buffers[purpose, owner] = max(known, nbytes)

    def add_inside(self, part: Bucket, whole: Bucket) -> None:
        """Counts what a level above `rank` needs beside the part: see `reduction.level`."""
        if part is whole:
            return  # level `rank`
        members, element_bytes = part.lanes, whole.grad_N.element_size()
        found: dict[str, int] = {}
        if whole.op is CollectiveOp.ALL_REDUCE:
            # What no lane has: the last elements, of every member.
            found["node_rest"] = whole.numel % members * members * element_bytes
        elif part.op is whole.op:
            found["node_sum"] = part.numel * element_bytes  # at `instance` it is in the gradient
        scatters = whole.op is CollectiveOp.REDUCE_SCATTER
        over_gloo = not (self._share.is_virtual or whole.grad_N.is_cuda)
        if over_gloo or (scatters and whole.fp32_sums and element_bytes < FP32_BYTES):
            # What `dense_allpairs` adds up at a time.
            shard = whole.numel // (whole.world_size if scatters else members)
            found["parts"] = (members - 1) * shard * element_bytes
            if element_bytes < FP32_BYTES:
                found["piece"] = shard * FP32_BYTES
        owner = "" if whole.grad_N.is_cuda else f"{whole.name}.inside"
        for purpose, nbytes in found.items():
            self._add_buffer(purpose, owner, nbytes)

    def _sizes(self, bucket: Bucket, plan: Plan) -> BufferSizes:
        """What a scheme's buffers depend on; with the places of a message for a sparse scheme."""
        options = self._config.scheme
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, plan.wire_dtype)
        places = None
        if SCHEMES[plan.scheme].takes is Input.SPARSE:
            spec = plan.message_spec(bucket, options)
            layout = bucket.layout(spec.sharded, spec.extra_cuts)
            fixed = spec.capacity is not None
            most_S = segment_capacity(layout, (spec.capacity or 1.0) * spec.density)
            if not fixed:
                # Nothing is known about how many elements of lossless parameters are zero.
                most_S = torch.where(
                    layout.segment_lossless != 0, layout.segment_offsets.diff(), most_S
                )
            records = spec.record_spec(bucket.grad_N.dtype, step=0)
            places = MessagePlaces.of(layout, most_S, records, fixed=fixed)
        nodes = self._share.nodes or (0,) * bucket.world_size
        return BufferSizes(bucket, self._share.rank, nodes, options, value_dtype, places)

    def _add_buffers(self, sizes: BufferSizes, plan: Plan) -> None:
        """Counts the buffers of one step: the scheme's own, and those of this rank's message."""
        bucket, name = sizes.bucket, plan.scheme
        if self._config.straggler.leaves_behind:
            name = AWARE.get(name, name)
        declared = SCHEMES[name].buffers
        if declared is None:
            self.unknown.add(name)
        found = {} if declared is None else declared(sizes)
        if sizes.message is None:
            if plan.narrows(bucket):
                found["narrow"] = bucket.numel * sizes.value_bytes
        else:
            offsets = sizes.places.layout.segment_offsets
            message_bytes = ops.message_capacity(offsets, sizes.places.records.value_dtype)
            if sizes.places.fixed:
                message_bytes = int(sizes.places.slots.offsets[-1])
            found["message"] = found.get("message", 0) + message_bytes
            if bucket.grad_N.is_cuda:
                self._add_workspace(sizes, found)
            else:
                scratch = scratch_capacity(offsets, sizes.places.records)
                found["scratch"] = max(found.get("scratch", 0), scratch)
        for purpose, nbytes in found.items():
            is_shared = bucket.grad_N.is_cuda or purpose == "scratch"
            self._add_buffer(purpose, "" if is_shared else bucket.name, nbytes)

    def _add_workspace(self, sizes: BufferSizes, found: dict[str, int]) -> None:
        """The largest calls on both streams: selection, and encoding of this rank's sum."""
        layout, bucket = sizes.places.layout, sizes.bucket
        segments, ranges = layout.segment_keep.numel(), layout.range_piece.numel()
        records = sizes.places.records
        if records.record_format == FORMAT_RICE:
            selecting = workspace.rice_encode_bytes(
                bucket.numel, segments, records, found["message"]
            )
        else:
            selecting = workspace.encode_bytes(
                bucket.numel, segments, sizes.value_bytes, found["message"]
            )
        # Steps of a higher density sample less.
        compression = self._config.compression
        samples = compression.samples_at(compression.given_density)
        sampling = workspace.threshold_bytes(ranges, bucket.numel, samples)
        self._codec_bytes = max(self._codec_bytes, selecting, sampling)
        sum_bytes = max(found.get("gathered", 0), found.get("encoded", 0))
        if sum_bytes:
            # `gathered` holds the sums of all ranks, each of which encodes its own.
            parts = 1 if "encoded" in found else sizes.ranks
            encoding = workspace.encode_bytes(
                bucket.numel // parts, segments, sizes.value_bytes, sum_bytes // parts
            )
            self._network_bytes = max(self._network_bytes, encoding)

    def _count_tables(self, bucket: Bucket, layout: Layout, *, has_slots: bool) -> None:
        """Counts the tables of offsets that kernels read: on a GPU copies of them, rounded up."""
        tables = [each for each in vars(layout).values() if isinstance(each, torch.Tensor)]
        if not bucket.grad_N.is_cuda:
            self._table_bytes += sum(table.nbytes for table in tables)
            return
        # Of the layout, and in capacity mode of each density: a message's slots and its shards'.
        compression = self._config.compression
        densities = 1 + compression.ramp if has_slots else 0
        self._tables += len(tables) + densities * (2 + bucket.world_size)
        largest = max(table.nbytes for table in tables)
        self._largest_table = max(self._largest_table, -(-largest // ALLOCATION) * ALLOCATION)

    def nbytes(self) -> Counter[str]:
        """Bytes by item."""
        residual_dtype = RESIDUAL_DTYPES[self._config.compression.residual_dtype]
        found: Counter[str] = Counter()
        found["residual"] = self._residual_numel * residual_dtype.itemsize
        if self._undo:
            found["undo"] = found["residual"]
        for (purpose, owner), nbytes in self._buffers.items():
            takes_turns = purpose in _BEFORE_GATE and not owner
            copies = min(TURNS, len(self._share.buckets)) if takes_turns else 1
            found[item_of(purpose)] += copies * nbytes
        found["workspace"] += self._codec_bytes + self._network_bytes
        found["tables"] = self._table_bytes + min(self._tables, TABLES) * self._largest_table
        return found


def _steps(compression: CompressionConfig) -> list[int]:
    """Steps whose plans may differ: the first, some of the ramp, and one at the target."""
    start, ramp = compression.warmup, compression.ramp
    count = min(ramp, RAMP_STEPS)
    in_ramp = (start + ramp * i // count for i in range(count))
    return sorted({0, *in_ramp, start + ramp})
