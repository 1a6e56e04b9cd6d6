"""Options of `bench collectives`: the cases and the place of the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Check,
    Options,
    Sizes,
    above_zero,
    check_arguments,
    fractions,
    known,
    option,
    parse_counts,
    parse_densities,
    parse_names,
    parse_size,
)
from megatron_sparse.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sparse.transport import Topology


WHOLE_BITS = 32
"""The value of `--value-bits` that rounds nothing, whatever the gradient's dtype."""


def parse_schemes(flag: str, text: str) -> tuple[str, ...]:
    """Names of schemes; `all` is each of them and `auto`."""
    if text != "all":
        return parse_names(flag, text)
    from megatron_sparse.collectives import SCHEMES

    return ("auto", *SCHEMES)


@dataclass(frozen=True, kw_only=True)
class Sweep(Sizes):
    """All cases, and how they are timed.

    Schemes that lack an operation are left out of it, those with a format of their own where values
    have few bits. Dense ones run once, whatever the density and the bits; `dense_q` runs once for
    8 and 4 bits each, and in 4 where no bits are given.
    """

    NAME = "bench collectives"

    min_bytes: int = option("64M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("64M", "Such as 64M, 1G.", parse_size)
    densities: Sequence[float] = option(
        "0.001,0.01,0.05", "Fractions selected.", parse_densities, flag="--density"
    )
    dtypes: Sequence[str] = option(
        "fp32", "fp32 | bf16 | fp16", parse_names, flag="--dtype", metavar="TYPE,..."
    )
    schemes: Sequence[str] = option(
        "all",
        "Of docs/collectives.md, auto, or all.",
        parse_schemes,
        flag="--scheme",
        metavar="NAME,...",
    )
    ops: Sequence[str] = option(
        "all_reduce", "all_reduce | reduce_scatter", parse_names, flag="--op", metavar="OP,..."
    )
    message_format: str = option("auto", "scheme.format", flag="--format")
    value_bits: Sequence[int] = option(
        "32", "compression.value_bits: 8, 4, 3, 2, or 32: whole.", parse_counts, flag="--value-bits"
    )
    sum_bits: int | None = option(None, "scheme.sum_bits, of values of few bits or rice.")
    levels: Sequence[str] = option(
        "rank", "compression.level: rank | node", parse_names, flag="--level", metavar="LEVEL,..."
    )
    capacity: float | None = option(None, "scheme.capacity of the schemes that take it.")
    nccl_engine: bool = option(
        False, "scheme.nccl_engine; on GPUs, with a capacity.", flag="--nccl-engine"
    )
    prune: bool = option(True, "Time selection with the collective.", flag="--prune/--no-prune")
    mbit: int | None = option(None, "Rate of each link, in Mbit/s; else measured.", min=1)
    warmup: int = option(2, "Rounds that are not timed.", min=0)
    iters: int = option(7, "Rounds that are timed.", min=1)
    timeout_s: float = option(120.0, "Seconds that an operation may take.", flag="--timeout")

    def __post_init__(self) -> None:
        check_arguments(self.NAME, self.checks())

    def checks(self) -> list[Check]:
        """Every argument's."""
        from megatron_sparse.bucket import CollectiveOp
        from megatron_sparse.collectives import SCHEMES
        from megatron_sparse.config.compression import VALUE_BITS
        from megatron_sparse.config.level import NODE, RANK
        from megatron_sparse.config.sparse import MESSAGE_FORMATS

        level_fits = self.prune or set(self.levels) == {RANK}
        engine_fits = not self.nccl_engine or self.capacity is not None
        return [
            *self.range_checks(64),
            fractions("density", self.densities),
            known("dtype", self.dtypes, DTYPE_NAMES),
            known("scheme", self.schemes, ("auto", *SCHEMES)),
            known("op", self.ops, CollectiveOp),
            known("format", [self.message_format], MESSAGE_FORMATS),
            known("value_bits", list(map(str, self.value_bits)), (WHOLE_BITS, *VALUE_BITS)),
            known("sum_bits", [str(self.sum_bits)], (None, *VALUE_BITS)),
            known("level", self.levels, (RANK, NODE)),
            ("level", ",".join(self.levels), level_fits, "rank with --no-prune"),
            above_zero("capacity", self.capacity),
            above_zero("mbit", self.mbit),
            above_zero("timeout", self.timeout_s, " s"),
            ("nccl_engine", self.nccl_engine, engine_fits, "false without a capacity"),
        ]


@dataclass(frozen=True, kw_only=True)
class Place(Options):
    """Where the ranks are."""

    ranks: int | None = option(None, "4, or as many as a launcher has started.", min=1)
    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    virtual: bool = option(False, "On virtual ranks: a model.", flag="--virtual")
    alpha_us: float = option(10.0, "Virtual latency of a message.", min=0)

    def nodes(self, ranks: int) -> int:
        """Hosts of the test bed."""
        return ranks

    def topology(self, ranks: int) -> Topology:
        """The virtual cluster."""
        raise NotImplementedError

    def _topology(self, ranks: int, ranks_per_node: int, intra: float, inter: float) -> Topology:
        from megatron_sparse.transport import Link, Topology

        one, other = (Link(self.alpha_us * 1e-6, 8e-9 / gbit) for gbit in (intra, inter))
        return Topology.even(ranks, ranks_per_node, one, other)


@dataclass(frozen=True, kw_only=True)
class NodePlace(Place):
    """Ranks on nodes; virtual links inside of nodes and between them have rates of their own."""

    ranks_per_node: int | None = option(
        None,
        "Ranks on each host of --netbed (default: 1) or node of --virtual (default: all).",
        min=1,
    )
    intra_gbit: float = option(1600.0, "Virtual links in a node.", min=1e-6)
    inter_gbit: float = option(25.0, "Virtual links between.", min=1e-6)

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and not (self.netbed or self.virtual):
            raise ConfigError(
                "--ranks-per-node needs hosts that the bench makes",
                expected="--netbed or --virtual",
                got="ranks on the loopback or of an existing launch, which are where they are",
                remedy="leave out --ranks-per-node; a launcher places ranks by its own options",
            )

    def nodes(self, ranks: int) -> int:
        """See `Place`."""
        return -(-ranks // (self.ranks_per_node or 1))

    def topology(self, ranks: int) -> Topology:
        """See `Place`."""
        return self._topology(ranks, self.ranks_per_node or ranks, self.intra_gbit, self.inter_gbit)
