"""Prices whole synchronisations of a model at the levels `rank` and `node`: a MODEL.

At level `rank` each rank compresses its own gradient, at level `node` the sum of its node. To price
a collective is to predict its time by the cost models.

One iteration with the distributed optimizer moves every gradient in a reduce-scatter and every
updated parameter in an all-gather. The gradient's half is priced by `planner.levels` with the
cheapest scheme of each level, the parameters' half by `parameters.price`: exact moves (changes of
parameters), once per node or to each rank, or raw parameters, whichever takes the least time. That
half does not depend on the level. Without the distributed optimizer there is an all-reduce of
gradients and nothing else.

`dense` is Megatron's own synchronisation: the backend's ring over all ranks for both halves,
parameters in two bytes. `best_dense` is the cheapest that sends every element in full: any dense
scheme, or dense at level `node`, for each half.

Buckets are Megatron's, of equal size: max(40 million, 1 million a rank) elements at most. They are
priced one after the other, at the preset's target density.

Moves are coded by `rans`, in a number of bits that the caller states. No GPU's coder was measured:
it moves as many bytes as docs/device-work.md counts, at the rate of the cluster's other codecs, and
takes at least as long as one of its chunks (docs/parameters.md). On a CPU's cluster it is timed
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from pathlib import Path

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.checks import in_range
from megatron_sparse.config.sparse import SchemeConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.parameters.price import (
    CoderSpeed,
    GatherLinks,
    coder_speed,
    gather_prices,
    several_levels,
)
from megatron_sparse.planner.levels import INSTANCE, NODE, RANK, LevelPrice, LevelPricing, has_lanes
from megatron_sparse.planner.prices import DENSE, candidates
from megatron_sparse.pricing.cluster import ClusterModel, CodecOp
from megatron_sparse.pricing.shape import FP32_BYTES, BucketShape
from megatron_sparse.run.rows import CellRow, cell, print_table

BUCKET_NUMEL, BUCKET_NUMEL_PER_RANK = 40_000_000, 1_000_000
"""Megatron's default size of a bucket, whichever of the two is more."""
PARAMETER = torch.bfloat16
COPIED_BYTES = 8
"""Read and written, of an fp32 element that is copied."""
ENCODED_BYTES, DECODED_BYTES = 7.0, 8.9
"""Read and written, of a number of a long shard: docs/device-work.md."""
CHUNK_S = 0.25e-3
"""Of a chunk's 512 steps on a GPU, however short the shard is: docs/parameters.md."""


@dataclass(frozen=True)
class Training:
    """What is synchronised.

    Attributes:
        numel: parameters of the model on one rank.
        gradient_bytes: of a gradient's value: 4 is Megatron's default (fp32 accumulation), or 2.
        sharded: whether the optimizer is distributed.
        move_bits: of a parameter's move, in the exact gather.
        instances: of the distributed optimizer: their sum is part of the gradients' half.

    Raises:
        ConfigError: a number is out of range.
    """

    numel: int = 1_500_000_000
    gradient_bytes: int = FP32_BYTES
    sharded: bool = True
    move_bits: float = 2.5
    instances: int = 1

    def __post_init__(self) -> None:
        in_range("--move-bits", self.move_bits, 0, 16, low_open=True)

    def buckets(self, ranks: int) -> tuple[int, int]:
        """Returns (number of buckets, elements of each) for a number of data-parallel ranks.

        Example:
            >>> Training(numel=100_000_000).buckets(8)
            (3, 33333334)
        """
        count = ceil(self.numel / max(BUCKET_NUMEL, BUCKET_NUMEL_PER_RANK * ranks))
        return count, ceil(self.numel / count)


@dataclass(frozen=True)
class LevelRow(CellRow):
    """One whole synchronisation; times are milliseconds of a model.

    On one node level `node` is dense: no message leaves the node.
    """

    cluster: str = cell("its name")
    preset: str = cell("the settings", "<10")
    ranks: int = cell("data-parallel ranks", ">5")
    nodes: int = cell("that they are on", ">5")
    level: str = cell("`rank`, `node`, or with several instances `instance`", "<8")
    scheme: str = cell("of the gradients: of all ranks, or of a lane", "<18")
    parameters: str = cell(
        "how they are gathered: `raw`, `exact` or `exact per node`; `none` without the "
        "distributed optimizer",
        "<14",
    )
    buckets: int = cell("how many")
    inside_ms: float = cell("of gradients, inside nodes, at level `node`", ">9.1f inside")
    across_ms: float = cell(
        "of gradients, selection included", ">9.1f across | gradient_over_rank >6.2f rank/"
    )
    gradient_ms: float = cell("both")
    parameters_ms: float = cell("of parameters", ">10.1f parameters")
    total_ms: float = cell("of both halves", ">9.1f whole")
    dense_gradient_ms: float = cell("of Megatron's own reduce-scatter, or all-reduce")
    dense_ms: float = cell("of Megatron's own synchronisation, both halves", ">9.1f dense")
    best_dense_ms: float = cell(
        "of the cheapest dense synchronisation, both halves", ">10.1f best dense"
    )
    speedup: float = cell("dense_ms / total_ms", ">11.2f dense/whole")
    gradient_over_rank: float = cell("the gradient_ms of level `rank` / gradient_ms")
    modelled: bool = cell("true", default=True)


@dataclass(frozen=True)
class Group:
    """Data-parallel ranks on a cluster, and the prices of one bucket there.

    Nodes are filled one after the other.

    Raises:
        ConfigError: nodes would differ in size.
    """

    cluster: ClusterModel
    ranks: int
    training: Training

    def __post_init__(self) -> None:
        """Refuses a number of ranks that does not fill instances and nodes of equal size."""
        if self.ranks % self.training.instances:
            raise ConfigError(
                "instances of the distributed optimizer must have the same number of ranks",
                expected=f"--ranks in multiples of {self.training.instances}",
                got=self.ranks,
            )
        if len(set(self.sizes)) > 1:
            raise ConfigError(
                "level node needs nodes of one size",
                expected=f"--ranks in multiples of {max(self.sizes)}, or fewer than that",
                got=f"{self.ranks} ranks: nodes of {', '.join(map(str, self.sizes))}",
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each node of an instance."""
        return self.cluster.topology(self.ranks_of_instance).node_sizes

    @property
    def ranks_of_instance(self) -> int:
        """Of the distributed optimizer."""
        return self.ranks // self.training.instances

    def shape(self, element_bytes: int, value_bits: int | None = None) -> BucketShape:
        """The shape of every bucket, all of whose elements can be pruned."""
        _, numel = self.training.buckets(self.ranks)
        op = CollectiveOp.REDUCE_SCATTER if self.training.sharded else CollectiveOp.ALL_REDUCE
        kept_numel, ranks = 0, self.ranks_of_instance
        return BucketShape(numel, kept_numel, element_bytes, op, ranks, value_bits=value_bits)

    def gradient(self, level: str, settings: SparseConfig, names: Sequence[str]) -> LevelPrice:
        """The price of synchronising one bucket's gradient, by the cheapest scheme of `names`.

        Without compression every level has the price of the backend's own collective, and so has
        level `node` on one node.
        """
        bits = settings.compression.given_value_bits
        if not settings.compression.enabled:
            level, bits, names = RANK, None, (DENSE,)
        shape = self.shape(self.training.gradient_bytes, bits)
        instances = self.training.instances
        if level == NODE and len(self.sizes) == 1:  # no message leaves the node
            inside_s = self.dense_s(RANK, shape.element_bytes, instances)
            return LevelPrice(DENSE, inside_s, across_s=0.0)
        pricing = LevelPricing(self.cluster, settings.scheme, names, self.sizes, instances)
        return pricing.price(level, shape, settings.compression.given_density)

    def dense_s(
        self, level: str, element_bytes: int, instances: int = 1, names: Sequence[str] = (DENSE,)
    ) -> float:
        """Seconds to reduce one bucket of full elements, by the cheapest scheme of `names`.

        Also the seconds to gather one: a gather takes as long as a reduce-scatter.
        """
        pricing = LevelPricing(self.cluster, SchemeConfig(), names, self.sizes, instances)
        return pricing.price(level, self.shape(element_bytes), 1.0).total_s

    def best_dense_s(self, element_bytes: int, instances: int = 1) -> float:
        """Least seconds of a bucket of full elements: dense schemes, or `dense` at level `node`."""
        dense = [name for name, each in SCHEMES.items() if each.takes is Input.DENSE]
        prices_s = [self.dense_s(RANK, element_bytes, instances, dense)]
        if has_lanes(self.sizes):
            prices_s.append(self.dense_s(NODE, element_bytes, instances))
        return min(prices_s)

    def parameters(self) -> tuple[str, float]:
        """The cheapest gather of one bucket's parameters: (`LevelRow.parameters`, seconds).

        Exact gathers send the parameters' moves, "per node" once to each node.
        """
        if not self.training.sharded:  # an all-reduce needs no gather
            return "none", 0.0
        _, numel = self.training.buckets(self.ranks)
        n = self.ranks_of_instance
        topology = self.cluster.topology(n)
        links = GatherLinks(
            self.cluster.dense_link(n), topology if several_levels(topology.nodes) else None
        )
        prices = gather_prices(numel, PARAMETER, n, links, self._coder(numel / n))
        if not prices.exact_pays:
            return "raw", prices.raw_s
        per_node = prices.per_node  # a key of `exact_s`
        return ("exact per node" if per_node else "exact"), prices.exact_s[per_node]

    def _coder(self, shard_numel: float) -> CoderSpeed:
        """The speed of coding a shard's moves: timed on a CPU, modelled on a GPU."""
        bits = self.training.move_bits
        if self.cluster.device == "cpu":
            return CoderSpeed(*_timed_coder(PARAMETER, torch.device("cpu")), bits)
        # A GPU's coder is modelled as bound by memory, at the rate of an fp32 copy; it takes at
        # least the time of one chunk.
        copied_s = self.cluster.codec_s(CodecOp.COPY, "dense", shard_numel, 1.0)
        encode_s, decode_s = (
            max(copied_s * moved_bytes / COPIED_BYTES, CHUNK_S) / shard_numel
            for moved_bytes in (ENCODED_BYTES, DECODED_BYTES)
        )
        return CoderSpeed(encode_s, decode_s, bits)


_timed_coder = cache(coder_speed)
"""Timed once, so that all numbers of ranks are priced with the same speed."""


def level_rows(
    training: Training,
    cluster: ClusterModel,
    settings: Mapping[str, SparseConfig],
    ranks: Sequence[int],
    schemes: Sequence[str] | None = None,
) -> Iterator[LevelRow]:
    """Yields a row for each number of ranks, preset and level.

    `settings`: configurations by the names of their presets. `ranks`: numbers of data-parallel
    ranks. `schemes`: the candidates besides `dense`; None: all that do not round unasked.

    Raises:
        ConfigError: nodes would differ in size, or the cluster file lacks a rate.
    """
    instances = training.instances
    levels = (RANK, NODE, INSTANCE) if instances > 1 else (RANK, NODE)
    for n in ranks:
        group = Group(cluster, n, training)
        gradient_bytes, raw_bytes = training.gradient_bytes, PARAMETER.itemsize
        # Seconds of one bucket without compression: as Megatron does it, and the cheapest way.
        gradient_s = dense_s = group.dense_s(RANK, gradient_bytes, instances)
        best_s = group.best_dense_s(gradient_bytes, instances)
        if training.sharded:  # the parameters' gather, within one instance
            dense_s += group.dense_s(RANK, raw_bytes)
            best_s += group.best_dense_s(raw_bytes)
        how, parameters_s = group.parameters()
        ms = 1e3 * training.buckets(n)[0]  # from seconds of one bucket to milliseconds of all
        for preset, config in settings.items():
            names = candidates(schemes, config.compression.given_value_bits)
            prices = {level: group.gradient(level, config, names) for level in levels}
            for level, price in prices.items():
                total_s = price.total_s + parameters_s
                yield LevelRow(
                    cluster=cluster.name,
                    preset=preset,
                    ranks=n,
                    nodes=instances * len(group.sizes),
                    level=level,
                    scheme=price.scheme,
                    parameters=how,
                    buckets=training.buckets(n)[0],
                    inside_ms=price.inside_s * ms,
                    across_ms=price.across_s * ms,
                    gradient_ms=price.total_s * ms,
                    parameters_ms=parameters_s * ms,
                    total_ms=total_s * ms,
                    dense_gradient_ms=gradient_s * ms,
                    dense_ms=dense_s * ms,
                    best_dense_ms=best_s * ms,
                    speedup=dense_s / total_s,
                    gradient_over_rank=prices[RANK].total_s / price.total_s,
                )


def print_levels(rows: Sequence[LevelRow], training: Training, json_path: Path | None) -> None:
    """Prints a line that states the assumptions, then the rows as a table; see `print_table`."""
    collectives = "all-reduce"
    if training.sharded:
        bits = f"{training.move_bits:g} bits"
        collectives = f"reduce-scatter, and bf16 parameters gathered exactly in {bits}"
    if training.instances > 1:
        collectives += f", {training.instances} instances"
    dtype = "fp32" if training.gradient_bytes == 4 else "bf16"
    priced = f"{training.numel / 1e9:g} B parameters on {rows[0].cluster}: {dtype} gradients"
    print(f"{priced}, {collectives}; milliseconds of a model (cost models), not measured")
    print_table(rows, json_path)
