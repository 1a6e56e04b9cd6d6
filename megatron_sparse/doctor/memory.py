"""`megatron-sparse doctor --memory OVERRIDE...`: what the plugin would hold in a run.

Takes the arguments of `train`, starts no training, and needs neither Megatron nor a GPU. The run's
own pipeline synchronises a short bucket on virtual ranks, with the run's settings, from the warm-up
to the target. Buffers grow to the size of the largest step and stay; their bytes for each element
are those of the run's buckets. On a GPU the buckets of a group share them; of the memory that
kernels take while they run there is an upper bound.

Thresholds come from samples, and records have headers: buffers are right to a few percent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import AUTO, SCHEMES
from megatron_sparse.collectives.base import without
from megatron_sparse.compression.residual import RESIDUAL_DTYPES, ResidualStore
from megatron_sparse.config.level import INSTANCE, RANK
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.run import RunConfig
from megatron_sparse.config.sparse import CompressionConfig, SparseConfig, StragglerConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import TURNS, VALUE_DTYPES
from megatron_sparse.planner import Planner
from megatron_sparse.planner.levels import shapes_of
from megatron_sparse.pricing.shape import FP32_BYTES
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.level_choice import LevelChoice, choose_level, virtual_groups
from megatron_sparse.reduction.level_parts import instance_part, node_part
from megatron_sparse.reduction.memory import ITEMS, item_of
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import NO_TIME, members_of
from megatron_sparse.transport.virtual import VirtualTransport

NUMEL, NUMEL_PER_RANK = 2**17, 2**10
"""Elements of the short bucket, whichever of the two is more."""
MOST_RANKS = 64
"""Virtual ranks, unless a node or an instance has more: 128 take a minute."""
RAMP_STEPS = 4
"""Steps of the ramp that are run, its first one included."""
BITMAPS = 0.4
"""Bytes an element, beside values, that an encoder takes for bitmaps, groups and offsets
(`csrc/encode_workspace.cuh`, `csrc/stage.h`): three bitmaps for Rice; for other formats two."""
OWN = frozenset({"message", "narrow"})
"""Purposes of a bucket's own buffers. On a GPU, buckets take them in turn and share all others."""


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
        return nbytes / self.parameters


def run(overrides: Sequence[str], json: Path | None = None) -> None:
    """Prints the account as a table and, if asked, as JSON lines.

    Args:
        overrides: as of `train`.
        json: file for one JSON object an item: `item`, `bytes`, `bytes_per_parameter`.

    Raises:
        ConfigError: the configuration is wrong, or it trains without the plugin.
        DatasetError: neither the model nor the data gives a vocabulary.
    """
    # Here, so that a machine without rich can compare the account with a GPU's memory.
    from rich.markup import escape

    from megatron_sparse.doctor.checks import console, table
    from megatron_sparse.run import composition
    from megatron_sparse.run.rows import write_rows
    from megatron_sparse.telemetry.quantities import size

    config = composition.compose(overrides)
    found = of_run(config)
    shown = table(
        f"memory of the plugin, of one of {config.cluster.world_size} ranks",
        *("item", "bytes a parameter", "in all", "what for", "how to do with less"),
    )
    for item, nbytes in found.nbytes.items():
        purpose, remedy = ITEMS[item]
        shown.add_row(
            item, f"{found.of_parameter(nbytes):.2f}", size(nbytes), purpose, escape(remedy)
        )
    total = f"{found.of_parameter(found.total):.2f}"
    shown.add_row("total", total, size(found.total), f"{found.parameters:,} parameters a rank", "")
    console().print(shown)
    for note in found.notes:
        console().print(escape(note))
    rows = [
        {"item": item, "bytes": nbytes, "bytes_per_parameter": found.of_parameter(nbytes)}
        for item, nbytes in [*found.nbytes.items(), ("total", found.total)]
    ]
    write_rows(json, rows)


def of_run(config: RunConfig) -> MemoryAccount:
    """Computes what the plugin will hold on a rank of a run's first pipeline stage.

    `cluster.device=cuda` needs no GPU here: the run may be meant for another machine.

    Raises:
        ConfigError: the run trains without the plugin, or settings contradict one another.
        DatasetError: neither the model nor the data gives a vocabulary.
    """
    from megatron_sparse.megatron import predicted_buckets, training
    from megatron_sparse.megatron.pieces import in_pieces
    from megatron_sparse.megatron.units import check_undo
    from megatron_sparse.planner.configured import with_swept_thresholds
    from megatron_sparse.run import preparation

    if not config.plugin:
        raise ConfigError(
            "the run trains without the plugin",
            expected="plugin=true",
            got="plugin=false",
            remedy="leave plugin out: plain Megatron has nothing to count",
        )
    if config.cluster.device == "auto":
        config = preparation.decide(config)
    config = preparation.with_precision(config)
    vocab_size = config.model.vocab_size or training.find_data(config)[0]
    sparse = with_swept_thresholds(config.sparse)
    predicted = predicted_buckets.predicted_buckets(config, vocab_size)
    # As in the run: the plugin cuts a large bucket on a GPU into pieces, each a bucket of its own.
    buckets = [piece for bucket in predicted for piece in in_pieces(bucket, sparse)]
    undo = predicted_buckets.may_undo(config)
    check_undo(config.compression, undo=undo)
    # Megatron numbers tensor-parallel ranks first: rank r of the group is the run's rank
    # r * tensor_parallel.
    nodes = tuple(
        rank * config.training.tensor_parallel // config.cluster.ranks_per_node
        for rank in range(buckets[0].world_size)
    )
    found = account(sparse, buckets, nodes, undo=undo)
    if sparse.parameters.method in COMPRESSED:
        shard_numel = sum(
            bucket.numel // bucket.world_size
            for bucket in buckets
            if bucket.op is CollectiveOp.REDUCE_SCATTER and bucket.world_size > 1
        )
        if shard_numel:
            element_bytes = VALUE_DTYPES[config.training.precision].itemsize
            found.nbytes["parameters"] = shard_numel * element_bytes
    return found


def account(
    config: SparseConfig, buckets: Sequence[Bucket], nodes: Sequence[int], *, undo: bool
) -> MemoryAccount:
    """Computes what the plugin will hold on one rank for the gradients of its group.

    Runs a short bucket on virtual ranks, and scales its buffers to the sizes of `buckets`.

    Args:
        config: resolved.
        buckets: of one rank; only their shapes, dtypes and devices are read.
        nodes: of each rank of the group.
        undo: whether steps can be skipped or repeated; `compression.undo=always` counts too.
    """
    largest = max(buckets, key=lambda bucket: bucket.numel)
    on_gpu = largest.grad_N.is_cuda
    choice = choose_level(config, nodes, largest.instances, shapes_of(buckets, config))
    notes: tuple[str, ...] = ()
    if config.scheme.name == AUTO and config.planner.cluster:
        notes = ("planner.cluster may choose schemes that need other buffers",)
    if config.scheme.capacity == "auto":
        # Decided here: the virtual ranks are on a CPU. A scheme that skips a rank has no slots.
        name = config.scheme.name
        scheme_takes_slots = name == AUTO or SCHEMES[name].takes_slots
        takes_slots = scheme_takes_slots and not config.straggler.leaves_behind
        capacity = config.scheme.capacity_on(largest.grad_N.device.type, takes_slots=takes_slots)
        config = replace(config, scheme=replace(config.scheme, capacity=capacity))
    ranks = largest.world_size
    if choice.level != INSTANCE and ranks > MOST_RANKS:
        # As many whole nodes as have `MOST_RANKS` ranks, but at least one.
        node_ranks = nodes.count(nodes[0])
        node_count = max(MOST_RANKS // node_ranks, 1)
        ranks = node_count * node_ranks
        nodes, choice = nodes[:ranks], replace(choice, nodes=choice.nodes[:node_count])
        notes += (f"as of {ranks} ranks: with scheme=agsparse more ranks receive more",)
    short = _short(buckets, largest, ranks)
    taken = taken_on_virtual_ranks(config, short, nodes, choice, undo=undo)
    is_narrow = short.grad_N.element_size() < FP32_BYTES
    if choice.level != RANK and not on_gpu and not (short.fp32_sums and is_narrow):
        # Over gloo ranks send pieces. Virtual ranks do so only for fp32 sums of narrow gradients;
        # otherwise their reduce-scatter stands for a backend's, which takes no buffers.
        taken.update(_sent_inside(short, choice))
    largest_ratio = largest.numel / short.numel
    total_ratio = sum(bucket.numel for bucket in buckets) / short.numel
    found: Counter[str] = Counter()
    # On a CPU every bucket has buffers of its own; on a GPU they share those of the largest one.
    never_shared = {"residual", "undo"} if on_gpu else taken.keys()
    for purpose, nbytes in taken.items():
        if purpose in never_shared:
            found[item_of(purpose)] += round(nbytes * total_ratio)
        else:
            copies = min(TURNS, len(buckets)) if purpose in OWN else 1
            found[item_of(purpose)] += round(nbytes * largest_ratio) * copies
    message, gathered, encoded = (
        round(taken[purpose] * largest_ratio) for purpose in ("message", "gathered", "encoded")
    )
    part = _part(largest, choice)
    found["workspace"] = _workspace(config, part, message, gathered, encoded)
    parameters = sum(piece.numel for piece in _slices(buckets))
    in_order = {item: found[item] for item in ITEMS if found[item]}
    return MemoryAccount(parameters, in_order, notes)


def taken_on_virtual_ranks(
    config: SparseConfig,
    bucket: Bucket,
    nodes: Sequence[int],
    choice: LevelChoice,
    *,
    undo: bool = False,
) -> Counter[str]:
    """Synchronises a bucket of random gradients on virtual ranks, and counts what these hold.

    Args:
        config: `scheme.name=auto` takes the scheme of the fewest bytes; a straggler is pinned.
        bucket: synchronised on a CPU; only its shape and dtype are read.
        nodes: the node of each rank of the group.
        choice: the level.
        undo: whether steps can be skipped or repeated.

    Returns:
        Bytes by `residual`, `undo` and the purpose of each buffer: of each the most of any rank.
    """
    undo |= config.compression.undo == "always"
    if config.straggler.leaves_behind:
        config = replace(config, straggler=StragglerConfig(mode="pinned", rank=0))
    instances = bucket.instances if choice.level == INSTANCE else 1
    node_sizes = tuple(map(len, members_of(nodes))) * instances
    cluster = VirtualCluster(sum(node_sizes), Topology(node_sizes, NO_TIME, NO_TIME))
    residual_dtype = RESIDUAL_DTYPES[config.compression.residual_dtype]
    ranks: list[tuple[GradientReducer, ResidualStore, Bucket]] = []
    for groups in virtual_groups(cluster, choice, instances):
        residuals = ResidualStore(residual_dtype)
        # A store that is told the outcome of each step (`commit` below) keeps undo copies.
        residuals.undo = residuals.is_reported = undo
        planner, progress = Planner(config.compression, config.scheme), Progress(cluster.device, 0)
        reducer = GradientReducer(config, groups, planner, residuals, NullSink(), progress)
        grad_N = torch.empty(bucket.numel, dtype=bucket.grad_N.dtype)
        ranks.append((reducer, residuals, replace(bucket, grad_N=grad_N, layouts={})))
    for step in _steps(config.compression):
        for rank, (_, _, rank_bucket) in enumerate(ranks):
            rank_bucket.grad_N.normal_(generator=torch.Generator().manual_seed(rank))

        def pipeline(transport: VirtualTransport, step: int = step) -> Any:
            """The generator that synchronises the bucket of this transport's rank."""
            reducer, _, rank_bucket = ranks[transport.rank]
            # No other bucket waits at the gates.
            return without(reducer.synchronise(reducer.job(rank_bucket, step)), Gate)

        cluster.run(pipeline)
        if undo:
            for _, residuals, _ in ranks:
                residuals.commit()
    most: Counter[str] = Counter()
    for reducer, residuals, _ in ranks:
        # The union of two counters has the larger number of each purpose.
        most |= Counter(reducer.buffers.by_purpose())
        undo_bytes = residuals.undo_nbytes
        most |= Counter(residual=residuals.nbytes - undo_bytes, undo=undo_bytes)
    return most


def _steps(compression: CompressionConfig) -> list[int]:
    """The numbers of the steps to run: step 0, at most `RAMP_STEPS` of the ramp, two at the target.

    The second one at the target makes undo copies even where the first had no residual to copy.
    """
    ramp_start, ramp = compression.warmup, compression.ramp
    count = min(ramp, RAMP_STEPS)
    in_ramp = [ramp_start + ramp * i // count for i in range(count)]
    target_start = ramp_start + ramp
    return sorted({0, *in_ramp, target_start, target_start + 1})


def _short(buckets: Sequence[Bucket], largest: Bucket, ranks: int) -> Bucket:
    """A short bucket that stands for `buckets`, in a group of `ranks` ranks; it takes no memory.

    It has one parameter of each kind (`keep`, `lossless`), with the kind's share of all elements.
    """
    numel = min(largest.numel, max(NUMEL, NUMEL_PER_RANK * ranks))
    numel = max(numel // ranks, 1) * ranks  # a multiple of the ranks, for shards of equal size
    kind_numel: Counter[tuple[bool, bool]] = Counter()
    for piece in _slices(buckets):
        kind_numel[piece.keep, piece.lossless] += piece.numel
    total = kind_numel.total()
    stops = [round(numel * so_far / total) for so_far in accumulate(kind_numel.values())]
    shape = []
    # Each parameter begins where the one before it stops, so there is a start too many.
    for start, stop, (keep, lossless) in zip([0, *stops], stops, kind_numel, strict=False):
        shape.append(ParameterSlice(f"w{start}", start, stop, keep, lossless))
    return replace(
        largest,
        grad_N=torch.empty(numel, dtype=largest.grad_N.dtype, device="meta"),
        parameters=[piece for piece in shape if piece.numel],
        world_size=ranks,
        layouts={},
    )


def _slices(buckets: Sequence[Bucket]) -> list[ParameterSlice]:
    """The parameters of all buckets."""
    return [piece for bucket in buckets for piece in bucket.parameters]


def _part(bucket: Bucket, choice: LevelChoice) -> Bucket:
    """What a rank selects from."""
    if choice.level == INSTANCE:
        return instance_part(bucket, 0)
    return node_part(bucket, len(choice.nodes[0]), 0) if len(choice.nodes) > 1 else bucket


def _sent_inside(bucket: Bucket, choice: LevelChoice) -> Counter[str]:
    """Bytes of the buffers of a rank's dense sum inside its node or instance, by purpose; on gloo.

    `dense_allpairs` receives the piece of each other member, and adds narrow ones up in fp32.
    """
    members = len(choice.nodes[0]) if choice.nodes else bucket.world_size
    # A reduce-scatter adds up one node's shards at a time, an all-reduce the whole bucket.
    scatters = bucket.op is CollectiveOp.REDUCE_SCATTER
    piece_numel = bucket.numel // (bucket.world_size if scatters else members)
    element_bytes = bucket.grad_N.element_size()
    sum_bytes = FP32_BYTES if element_bytes < FP32_BYTES else 0
    return Counter(parts=piece_numel * (members - 1) * element_bytes, piece=piece_numel * sum_bytes)


def _workspace(
    config: SparseConfig, bucket: Bucket, message: int, gathered: int, encoded: int
) -> int:
    """Bytes of the encoders' scratch memory: one may encode a selection while another does a sum.

    Samples of thresholds take less, except in small models.

    Args:
        config: as of `taken_on_virtual_ranks`.
        bucket: what a rank selects from.
        message: bytes of the buffer of a rank's encoded selection.
        gathered: bytes of the buffer of all ranks' sums, each of which encodes its own.
        encoded: bytes of the buffer of one encoded sum.
    """
    planner, ranks = Planner(config.compression, config.scheme), bucket.world_size
    plans = [planner.plan_for(bucket, step) for step in _steps(config.compression)]
    if all(SCHEMES[plan.scheme].takes_all for plan in plans):
        return 0
    few_bits = config.compression.given_value_bits is not None
    # Before values are quantised, there is room for all of them in fp32.
    values_bytes = FP32_BYTES * bucket.numel if few_bits else message
    selecting = encoder_bytes(bucket.numel, values_bytes)
    if encoded:
        return selecting + encoder_bytes(bucket.numel, encoded)
    if gathered:
        return selecting + encoder_bytes(bucket.numel // ranks, gathered // ranks)
    return selecting


def encoder_bytes(numel: int, values_bytes: int) -> int:
    """An upper bound of the memory that an encoder takes; see `BITMAPS`.

    Example:
        >>> encoder_bytes(2**20, 2**14) / 2**20
        0.41562461853027344
    """
    return round(BITMAPS * numel) + values_bytes
