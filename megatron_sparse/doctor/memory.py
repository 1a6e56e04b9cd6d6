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
from megatron_sparse.formats.message import TURNS
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
        return nbytes / self.parameters if self.parameters else 0.0


def run(overrides: Sequence[str], json: Path | None = None) -> int:
    """Prints the account as a table and, if asked, as JSON lines.

    Args:
        overrides: as of `train`.
        json: file for one JSON object an item: `item`, `bytes`, `bytes_per_parameter`.

    Returns:
        The exit code: 0.

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
        purpose, without = ITEMS[item]
        shown.add_row(
            item, f"{found.of_parameter(nbytes):.2f}", size(nbytes), purpose, escape(without)
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
    return 0


def of_run(config: RunConfig) -> MemoryAccount:
    """The account of a run's first pipeline stage.

    `cluster.device=cuda` needs no GPU here: another machine's run may be asked about.

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
    buckets = [piece for bucket in predicted for piece in in_pieces(bucket, sparse)]
    undo = predicted_buckets.may_undo(config)
    check_undo(config.compression, undo=undo)
    # Megatron numbers tensor-parallel ranks first.
    nodes = tuple(
        rank * config.training.tensor_parallel // config.cluster.ranks_per_node
        for rank in range(buckets[0].world_size)
    )
    found = account(sparse, buckets, nodes, undo=undo)
    if sparse.parameters.method in COMPRESSED:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.training.precision)
        shards = sum(
            bucket.numel // bucket.world_size
            for bucket in buckets
            if bucket.op is CollectiveOp.REDUCE_SCATTER and bucket.world_size > 1
        )
        if shards:
            found.nbytes["parameters"] = shards * (dtype or torch.float32).itemsize
    return found


def account(
    config: SparseConfig, buckets: Sequence[Bucket], nodes: Sequence[int], *, undo: bool
) -> MemoryAccount:
    """Computes what the plugin will hold for the gradients of one group of ranks.

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
        has_slots = name == AUTO or SCHEMES[name].takes_slots
        has_slots = has_slots and not config.straggler.leaves_behind
        capacity = config.scheme.capacity_on(largest.grad_N.device.type, takes_slots=has_slots)
        config = replace(config, scheme=replace(config.scheme, capacity=capacity))
    ranks = largest.world_size
    if choice.level != INSTANCE and ranks > MOST_RANKS:
        of_node = nodes.count(nodes[0])
        ranks = max(MOST_RANKS // of_node, 1) * of_node
        nodes, choice = nodes[:ranks], replace(choice, nodes=choice.nodes[: ranks // of_node])
        notes += (f"as of {ranks} ranks: with scheme=agsparse more ranks receive more",)
    short = _short(buckets, largest, ranks)
    taken = taken_on_virtual_ranks(config, short, nodes, choice, undo=undo)
    if choice.level != RANK and not on_gpu:
        taken["parts"] += _sent_inside(short, choice)
    of_largest = largest.numel / short.numel
    of_all = sum(bucket.numel for bucket in buckets) / short.numel
    found: Counter[str] = Counter()
    of_each_bucket = {"residual", "undo"} if on_gpu else taken.keys()
    for purpose, nbytes in taken.items():
        if purpose in of_each_bucket:
            found[item_of(purpose)] += round(nbytes * of_all)
        else:
            turns = min(TURNS, len(buckets)) if purpose in OWN else 1
            found[item_of(purpose)] += round(nbytes * of_largest) * turns
    part = _part(largest, choice)
    rooms = (round(taken[name] * of_largest) for name in ("message", "gathered", "encoded"))
    found["workspace"] = _workspace(config, part, *rooms)
    parameters = sum(piece.numel for bucket in buckets for piece in bucket.parameters)
    return MemoryAccount(parameters, {item: found[item] for item in ITEMS if found[item]}, notes)


def taken_on_virtual_ranks(
    config: SparseConfig,
    bucket: Bucket,
    nodes: Sequence[int],
    choice: LevelChoice,
    *,
    undo: bool = False,
) -> Counter[str]:
    """Bytes that a rank's reducer holds after steps with normal gradients: the most of any rank.

    Args:
        config: its scheme, or the fewest bytes, decide; a straggler is pinned.
        bucket: synchronised on a CPU; only its shape and dtype are read.
        nodes: of each rank of the group.
        choice: the level.
        undo: as of `ResidualStore`.

    Returns:
        By `residual`, `undo` and the purpose of the buffer.
    """
    undo |= config.compression.undo == "always"
    if config.straggler.leaves_behind:
        config = replace(config, straggler=StragglerConfig(mode="pinned", rank=0))
    instances = bucket.instances if choice.level == INSTANCE else 1
    sizes = tuple(map(len, members_of(nodes))) * instances
    cluster = VirtualCluster(sum(sizes), Topology(sizes, NO_TIME, NO_TIME))
    residual_dtype = RESIDUAL_DTYPES[config.compression.residual_dtype]
    ranks: list[tuple[GradientReducer, ResidualStore, Bucket]] = []
    for groups in virtual_groups(cluster, choice, instances):
        residuals = ResidualStore(residual_dtype)
        residuals.undo = residuals.is_reported = undo
        planner, progress = Planner(config.compression, config.scheme), Progress(cluster.device, 0)
        reducer = GradientReducer(config, groups, planner, residuals, NullSink(), progress)
        grad_N = torch.empty(bucket.numel, dtype=bucket.grad_N.dtype)
        ranks.append((reducer, residuals, replace(bucket, grad_N=grad_N, layouts={})))
    for step in _steps(config.compression):
        for seed, (_, _, own) in enumerate(ranks):
            own.grad_N.normal_(generator=torch.Generator().manual_seed(seed))

        def pipeline(transport: VirtualTransport, step: int = step) -> Any:
            reducer, _, own = ranks[transport.rank]
            # No other bucket waits at the gates.
            return without(reducer.synchronise(reducer.job(own, step)), Gate)

        cluster.run(pipeline)
        for _, residuals, _ in ranks if undo else ():
            residuals.commit()
    most: Counter[str] = Counter()
    for reducer, residuals, _ in ranks:
        most |= Counter(reducer.buffers.by_purpose())
        undo_bytes = residuals.undo_nbytes
        most |= Counter(residual=residuals.nbytes - undo_bytes, undo=undo_bytes)
    return most


def _steps(compression: CompressionConfig) -> list[int]:
    """Steps whose plans may differ; the second one at the target makes undo copies."""
    start, ramp = compression.warmup, compression.ramp
    count = min(ramp, RAMP_STEPS)
    in_ramp = (start + ramp * i // count for i in range(count))
    return sorted({0, *in_ramp, start + ramp, start + ramp + 1})


def _short(buckets: Sequence[Bucket], largest: Bucket, ranks: int) -> Bucket:
    """A bucket of so many ranks, at most as long as the largest one.

    It has a parameter of each kind, with the kind's part of all buckets.
    """
    numel = min(largest.numel, max(NUMEL, NUMEL_PER_RANK * ranks))
    numel = max(numel // ranks, 1) * ranks
    kinds: Counter[tuple[bool, bool]] = Counter()
    for piece in (piece for bucket in buckets for piece in bucket.parameters):
        kinds[piece.keep, piece.lossless] += piece.numel
    borders = [round(numel * part / kinds.total()) for part in accumulate(kinds.values())]
    cuts = zip([0, *borders], borders, kinds, strict=False)
    shape = [ParameterSlice(f"w{start}", start, stop, *kind) for start, stop, kind in cuts]
    return replace(
        largest,
        grad_N=torch.empty(numel, dtype=largest.grad_N.dtype, device="meta"),
        parameters=[piece for piece in shape if piece.numel],
        world_size=ranks,
        layouts={},
    )


def _part(bucket: Bucket, choice: LevelChoice) -> Bucket:
    """What a rank selects from."""
    if choice.level == INSTANCE:
        return instance_part(bucket, 0)
    return node_part(bucket, len(choice.nodes[0]), 0) if len(choice.nodes) > 1 else bucket


def _sent_inside(bucket: Bucket, choice: LevelChoice) -> int:
    """Bytes that `dense_allpairs` takes inside a node or instance, over gloo; see `level`."""
    members = len(choice.nodes[0]) if choice.nodes else bucket.world_size
    scatters = bucket.op is CollectiveOp.REDUCE_SCATTER
    element_bytes = bucket.grad_N.element_size()
    sums_bytes = FP32_BYTES if element_bytes < FP32_BYTES else 0
    shard = bucket.numel // (bucket.world_size if scatters else members)
    return shard * ((members - 1) * element_bytes + sums_bytes)


def _workspace(
    config: SparseConfig, bucket: Bucket, message: int, gathered: int, encoded: int
) -> int:
    """Bytes of the largest calls that may run at once: selection, and encoding of a sum.

    Samples of thresholds take less, but in small models.

    Args:
        config: as of `taken_on_virtual_ranks`.
        bucket: what a rank selects from.
        message: bytes of its buffer.
        gathered: bytes of the buffer of all ranks' sums, each of which encodes its own.
        encoded: bytes of the buffer of one encoded sum.
    """
    planner, n = Planner(config.compression, config.scheme), bucket.world_size
    plans = [planner.plan_for(bucket, step) for step in _steps(config.compression)]
    if all(SCHEMES[plan.scheme].takes_all for plan in plans):
        return 0
    few_bits = config.compression.given_value_bits is not None
    selecting = encoder_bytes(bucket.numel, FP32_BYTES * bucket.numel if few_bits else message)
    if encoded:
        return selecting + encoder_bytes(bucket.numel, encoded)
    return selecting + (encoder_bytes(bucket.numel // n, gathered // n) if gathered else 0)


def encoder_bytes(numel: int, values_bytes: int) -> int:
    """An upper bound of the memory that an encoder takes; see `BITMAPS`.

    Example:
        >>> encoder_bytes(2**20, 2**14) / 2**20
        0.41562461853027344
    """
    return round(BITMAPS * numel) + values_bytes
