"""`megatron-sparse doctor --memory OVERRIDE...`: the memory that the plugin would hold in a run.

Takes the arguments of `train`, starts no training, and needs neither Megatron nor a GPU. In this
process, the ranks of a data-parallel group (virtual ranks) synchronise a short bucket with the
run's settings, from step 0 to the target density. The bytes of their buffers, which only grow, are
then scaled to the run's buckets. On a GPU the buckets of a group share most buffers; the kernels'
scratch memory is an upper bound. Other sizes are right to a few percent, because selection
thresholds come from samples and messages have headers.

A level is the unit that selects elements: each rank; a node, whose ranks add up their gradients
first; or an instance of Megatron's distributed optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from megatron_sparse.formats.moves import down_words
from megatron_sparse.parameters.agreement import EXACT
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
    """The bytes that the plugin will hold on one rank.

    Attributes:
        parameters: elements of the parameters on this rank.
        nbytes: item of `ITEMS` -> bytes, in the order of `ITEMS`; items of no bytes are left out.
        notes: sentences about what the numbers leave out.
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
    """Prints a run's `MemoryAccount` as a table; `overrides` are arguments of `train`.

    The file `json` gets one JSON object an item: `item`, `bytes`, `bytes_per_parameter`.

    Raises:
        ConfigError: the configuration is wrong, or it trains without the plugin.
        DatasetError: neither the model nor the data gives a vocabulary.
    """
    # Imported here, so that `account` can be called where rich is not installed.
    from rich.markup import escape

    from megatron_sparse.doctor.checks import console, table
    from megatron_sparse.run import composition
    from megatron_sparse.run.rows import write_rows
    from megatron_sparse.telemetry.quantities import size

    config = composition.compose(overrides)
    memory = of_run(config)
    shown = table(
        f"memory of the plugin, of one of {config.cluster.world_size} ranks",
        *("item", "bytes a parameter", "in all", "what for", "how to do with less"),
    )
    for item, nbytes in memory.nbytes.items():
        purpose, remedy = ITEMS[item]
        per_parameter = f"{memory.of_parameter(nbytes):.2f}"
        shown.add_row(item, per_parameter, size(nbytes), purpose, escape(remedy))
    total = f"{memory.of_parameter(memory.total):.2f}"
    parameters = f"{memory.parameters:,} parameters a rank"
    shown.add_row("total", total, size(memory.total), parameters, "")
    console().print(shown)
    for note in memory.notes:
        console().print(escape(note))
    rows = [
        {"item": item, "bytes": nbytes, "bytes_per_parameter": memory.of_parameter(nbytes)}
        for item, nbytes in [*memory.nbytes.items(), ("total", memory.total)]
    ]
    write_rows(json, rows)


def of_run(config: RunConfig) -> MemoryAccount:
    """Computes what the plugin will hold on a rank of a run's first pipeline stage.

    That stage also has the embeddings. `cluster.device=cuda` needs no GPU on this machine.

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
        config = preparation.decide(config)  # not for `cuda`: this would require GPUs here
    config = preparation.with_precision(config)
    vocab_size = config.model.vocab_size or training.find_data(config)[0]
    sparse = with_swept_thresholds(config.sparse)
    predicted = predicted_buckets.predicted_buckets(config, vocab_size)
    # The plugin cuts a large bucket on a GPU into pieces, and treats each piece as a bucket.
    buckets = [piece for bucket in predicted for piece in in_pieces(bucket, sparse)]
    undo = predicted_buckets.may_undo(config)
    check_undo(config.compression, undo=undo)
    # Megatron numbers tensor-parallel ranks first: rank r of the group is the run's rank
    # r * tensor_parallel.
    nodes = tuple(
        rank * config.training.tensor_parallel // config.cluster.ranks_per_node
        for rank in range(buckets[0].world_size)
    )
    memory = account(sparse, buckets, nodes, undo=undo)
    if sparse.parameters.method in COMPRESSED:
        # A compressed gather of parameters keeps a copy of this rank's shard of each bucket, an
        # exact one also the directions of all shards.
        element_bytes, kept_bytes = VALUE_DTYPES[config.training.precision].itemsize, 0
        for bucket in buckets:
            if bucket.op is CollectiveOp.REDUCE_SCATTER and bucket.world_size > 1:
                shard = bucket.numel // bucket.world_size
                kept_bytes += shard * element_bytes
                if sparse.parameters.method == EXACT:
                    kept_bytes += 4 * bucket.world_size * down_words(shard)
        if kept_bytes:
            memory.nbytes["parameters"] = kept_bytes
    return memory


def account(
    config: SparseConfig, buckets: Sequence[Bucket], nodes: Sequence[int], *, undo: bool
) -> MemoryAccount:
    """Computes what the plugin will hold on one rank for the gradients of its group.

    Measures the buffers of a short bucket on virtual ranks, and scales them to `buckets`.

    Args:
        config: the plugin's configuration, as `with_swept_thresholds` returns it.
        buckets: all buckets of one rank; only their shapes, dtypes and devices are read.
        nodes: for each rank of an instance, the index of its node.
        undo: whether steps can be skipped or repeated; `compression.undo=always` counts too.
    """
    largest = max(buckets, key=lambda bucket: bucket.numel)
    on_gpu = largest.grad_N.is_cuda
    choice = choose_level(config, nodes, largest.instances, shapes_of(buckets, config))
    notes: tuple[str, ...] = ()
    if config.scheme.name == AUTO and config.planner.cluster:
        notes = ("planner.cluster may choose schemes that need other buffers",)
    if config.scheme.capacity == "auto":
        # `auto` depends on the device, and virtual ranks are on a CPU: decide for the run's device.
        # Messages have a fixed size (slots) only if no rank may be skipped as a straggler.
        name = config.scheme.name
        scheme_takes_slots = name == AUTO or SCHEMES[name].takes_slots
        takes_slots = scheme_takes_slots and not config.straggler.leaves_behind
        capacity = config.scheme.capacity_on(largest.grad_N.device.type, takes_slots=takes_slots)
        config = replace(config, scheme=replace(config.scheme, capacity=capacity))
    ranks = largest.world_size
    if choice.level != INSTANCE and ranks > MOST_RANKS:
        # Virtual ranks take time: run as many complete nodes as fit in `MOST_RANKS`, at least one.
        node_ranks = nodes.count(nodes[0])
        node_count = max(MOST_RANKS // node_ranks, 1)
        ranks = node_count * node_ranks
        nodes, choice = nodes[:ranks], replace(choice, nodes=choice.nodes[:node_count])
        notes += (f"as of {ranks} ranks: with scheme=agsparse more ranks receive more",)
    short = _short_bucket(buckets, largest, ranks)
    short_nbytes = bytes_on_virtual_ranks(config, short, nodes, choice, undo=undo)
    is_narrow = short.grad_N.element_size() < FP32_BYTES
    if choice.level != RANK and not on_gpu and not (short.fp32_sums and is_narrow):
        # Over gloo a node or instance sums with `dense_allpairs`, which needs buffers. Virtual
        # ranks do so only for fp32 sums of narrow gradients; else their sum takes no buffers.
        short_nbytes.update(_allpairs_nbytes(short, choice))
    ratio = largest.numel / short.numel
    nbytes = _scaled(short_nbytes, short.numel, largest, buckets)
    message, gathered, encoded = (
        round(short_nbytes[purpose] * ratio) for purpose in ("message", "gathered", "encoded")
    )
    part = _part(largest, choice)
    nbytes["workspace"] = _workspace(config, part, message, gathered, encoded)
    parameters = sum(piece.numel for piece in _slices(buckets))
    return MemoryAccount(parameters, {i: nbytes[i] for i in ITEMS if nbytes[i]}, notes)


def _scaled(
    short_nbytes: Mapping[str, int], short_numel: int, largest: Bucket, buckets: Sequence[Bucket]
) -> Counter[str]:
    """Item -> bytes for the run's `buckets`, from purpose -> bytes for the short bucket.

    On a CPU every bucket has its own buffers. On a GPU all buckets share those of the largest one,
    but each has a residual and undo copy, and buffers of `OWN` exist up to `TURNS` times.
    """
    total_ratio = sum(bucket.numel for bucket in buckets) / short_numel
    unshared = {"residual", "undo"} if largest.grad_N.is_cuda else short_nbytes.keys()
    scaled: Counter[str] = Counter()
    for purpose, nbytes in short_nbytes.items():
        if purpose in unshared:
            scaled[item_of(purpose)] += round(nbytes * total_ratio)
        else:
            copies = min(TURNS, len(buckets)) if purpose in OWN else 1
            scaled[item_of(purpose)] += round(nbytes * (largest.numel / short_numel)) * copies
    return scaled


def bytes_on_virtual_ranks(
    config: SparseConfig,
    bucket: Bucket,
    nodes: Sequence[int],
    choice: LevelChoice,
    *,
    undo: bool = False,
) -> Counter[str]:
    """Synchronises random gradients on virtual ranks, and counts the bytes that a rank then holds.

    `scheme.name=auto` takes the scheme of the fewest bytes. Of `bucket`, which is synchronised on a
    CPU, only shape and dtype are read. `nodes` and `undo` are as in `account`.

    Returns:
        `residual`, `undo` or a buffer's purpose -> bytes, on the rank that holds the most of it.
    """
    undo |= config.compression.undo == "always"
    if config.straggler.leaves_behind:
        # No virtual rank is ever late: name a straggler, so that its extra buffers are counted.
        config = replace(config, straggler=StragglerConfig(mode="pinned", rank=0))
    instances = bucket.instances if choice.level == INSTANCE else 1
    node_sizes = tuple(map(len, members_of(nodes))) * instances
    cluster = VirtualCluster(sum(node_sizes), Topology(node_sizes, NO_TIME, NO_TIME))
    residual_dtype = RESIDUAL_DTYPES[config.compression.residual_dtype]
    # For each virtual rank: its reducer, its residual, and a copy of the bucket for its gradient.
    ranks: list[tuple[GradientReducer, ResidualStore, Bucket]] = []
    for groups in virtual_groups(cluster, choice, instances):
        residuals = ResidualStore(residual_dtype)
        # A store keeps undo copies if `commit` or `rollback` is to follow each step, as below.
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
            # Gates keep several buckets in order; here there is one, so they are skipped.
            return without(reducer.synchronise(reducer.job(rank_bucket, step)), Gate)

        cluster.run(pipeline)
        if undo:
            for _, residuals, _ in ranks:
                residuals.commit()
    most: Counter[str] = Counter()
    for reducer, residuals, _ in ranks:
        # `|` of two counters takes the larger number for each purpose.
        most |= Counter(reducer.buffers.by_purpose())
        undo_bytes = residuals.undo_nbytes
        most |= Counter(residual=residuals.nbytes - undo_bytes, undo=undo_bytes)
    return most


def _steps(compression: CompressionConfig) -> list[int]:
    """The numbers of the steps to run: step 0, at most `RAMP_STEPS` of the ramp, two at the target.

    The first step that selects makes the residual; only the next one has a residual to copy for
    `undo`. So two steps run at the target, which may be the first to select.
    """
    ramp_start, ramp = compression.warmup, compression.ramp
    count = min(ramp, RAMP_STEPS)
    in_ramp = [ramp_start + ramp * i // count for i in range(count)]
    target_start = ramp_start + ramp
    return sorted({0, *in_ramp, target_start, target_start + 1})


def _short_bucket(buckets: Sequence[Bucket], largest: Bucket, ranks: int) -> Bucket:
    """A short bucket that models `buckets` in a group of `ranks` ranks; its tensor is on `meta`.

    It has one parameter for each combination of `keep` (sent whole) and `lossless` (all non-zeros
    sent) in `buckets`, with the combination's share of all elements.
    """
    numel = min(largest.numel, max(NUMEL, NUMEL_PER_RANK * ranks))
    numel = max(numel // ranks, 1) * ranks  # a multiple of the ranks, for shards of equal size
    kind_numel: Counter[tuple[bool, bool]] = Counter()
    for piece in _slices(buckets):
        kind_numel[piece.keep, piece.lossless] += piece.numel
    total = kind_numel.total()
    stops = [round(numel * so_far / total) for so_far in accumulate(kind_numel.values())]
    parameters = []
    starts = [0, *stops][:-1]
    for start, stop, (keep, lossless) in zip(starts, stops, kind_numel, strict=True):
        parameters.append(ParameterSlice(f"w{start}", start, stop, keep, lossless))
    return replace(
        largest,
        grad_N=torch.empty(numel, dtype=largest.grad_N.dtype, device="meta"),
        parameters=[parameter for parameter in parameters if parameter.numel],
        world_size=ranks,
        layouts={},
    )


def _slices(buckets: Sequence[Bucket]) -> list[ParameterSlice]:
    """The parameters of all buckets."""
    return [piece for bucket in buckets for piece in bucket.parameters]


def _part(bucket: Bucket, choice: LevelChoice) -> Bucket:
    """The bucket, or the part of it, from which a rank selects elements at the level `choice`."""
    if choice.level == INSTANCE:
        return instance_part(bucket, 0)
    return node_part(bucket, len(choice.nodes[0]), 0) if len(choice.nodes) > 1 else bucket


def _allpairs_nbytes(bucket: Bucket, choice: LevelChoice) -> Counter[str]:
    """Purpose -> bytes of the buffers of `dense_allpairs`, which sums within a node or instance.

    A rank receives its piece of the gradient from each other member. Pieces narrower than fp32 are
    added up in one more buffer, in fp32.
    """
    members = len(choice.nodes[0]) if choice.nodes else bucket.world_size
    # A reduce-scatter takes `members` adjacent shards at a time, so a piece is one shard.
    scatters = bucket.op is CollectiveOp.REDUCE_SCATTER
    piece_numel = bucket.numel // (bucket.world_size if scatters else members)
    element_bytes = bucket.grad_N.element_size()
    sum_bytes = FP32_BYTES if element_bytes < FP32_BYTES else 0
    return Counter(parts=piece_numel * (members - 1) * element_bytes, piece=piece_numel * sum_bytes)


def _workspace(
    config: SparseConfig, bucket: Bucket, message: int, gathered: int, encoded: int
) -> int:
    """Scratch bytes of two encoders: one may encode a selection while the other encodes a sum.

    The scratch memory for sampling thresholds is smaller, except in small models, and left out.
    `bucket` is the part that a rank selects from, if there are parts. The others are the bytes of
    buffers: of a rank's encoded selection (`message`), of all ranks' encoded sums (`gathered`; a
    rank encodes its shard's), of one encoded sum of the whole bucket (`encoded`).
    """
    planner, ranks = Planner(config.compression, config.scheme), bucket.world_size
    plans = [planner.plan_for(bucket, step) for step in _steps(config.compression)]
    if all(SCHEMES[plan.scheme].takes_all for plan in plans):
        return 0  # every element is sent, so that no selection is encoded
    few_bits = config.compression.given_value_bits is not None
    # Before values are quantised, there is room for all of them in fp32; on a GPU, where chunks are
    # short, for half of that.
    values_bytes = FP32_BYTES * bucket.numel if few_bits else message
    selecting = encoder_bytes(bucket.numel, values_bytes)
    if encoded:
        return selecting + encoder_bytes(bucket.numel, encoded)
    if gathered:
        return selecting + encoder_bytes(bucket.numel // ranks, gathered // ranks)
    return selecting


def encoder_bytes(numel: int, values_bytes: int) -> int:
    """An upper bound of the bytes that one encoder takes for `numel` elements; see `BITMAPS`.

    Example:
        >>> encoder_bytes(2**20, 2**14) / 2**20
        0.41562461853027344
    """
    return round(BITMAPS * numel) + values_bytes
