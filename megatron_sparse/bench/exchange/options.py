"""Options of the benches that exchange messages: their cases, and the place of the ranks.

Imports nothing heavy: the command line reads this for `--help`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse.bench.options import (
    AUTO,
    DTYPE_NAMES,
    Check,
    Options,
    Sizes,
    above_zero,
    at_least,
    density_option,
    names_option,
    option,
    parse_counts,
    parse_list,
    parse_names,
    parse_numbers,
    parse_size,
)
from megatron_sparse.config.compression import VALUE_BITS
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.config.sparse import MESSAGE_FORMATS
from megatron_sparse.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sparse.transport import Topology

WHOLE_BITS = 32
"""The value of `--value-bits` that rounds nothing, whatever the gradient's dtype."""
STRAGGLER_SCHEMES = (
    "dense,dense_ring,dense_rhd,dense_allpairs,dense_broadcast,straggler,agsparse,direct,"
    "straggler_direct"
)
ALPHA_S, INTRA_GBIT = 10e-6, 1600.0
"""Of virtual links: latency of a message, and the rate inside a node."""
GATHER_CODERS = ("rans", "packed")
CLUSTERS = ("ethernet_25gbit", "ethernet_100gbit", "perlmutter")
"""Of `bench planner`."""
OPS = ("all_reduce", "reduce_scatter")
BUCKET_CODECS = ("cuda", "torch")
"""MEGATRON_SPARSE_CODEC on a GPU: the compiled kernels; Triton's kernels and torch operations."""


@dataclass(frozen=True, kw_only=True)
class Place(Options):
    """Where the ranks are; `virtual` is an option of the benches that have virtual ranks."""

    ranks: int | None = option(None, "4, or as many as a launcher has started.", min=1)
    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    virtual: bool = False

    def nodes(self, ranks: int) -> int:
        """Hosts of the test bed."""
        return ranks

    def topology(self, ranks: int) -> Topology:
        """The virtual cluster."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinkPlace(Place):
    """Ranks whose virtual links are all alike."""

    virtual: bool = option(False, "On virtual ranks: a model.", flag="--virtual")
    inter_gbit: float = option(25.0, "Virtual links between nodes.", min=1e-6)

    def topology(self, ranks: int) -> Topology:
        """See `Place`."""
        return self._topology(ranks, ranks, self.inter_gbit)

    def _topology(self, ranks: int, ranks_per_node: int, intra_gbit: float) -> Topology:
        from megatron_sparse.transport import Link, Topology

        intra, inter = (Link(ALPHA_S, 8e-9 / gbit) for gbit in (intra_gbit, self.inter_gbit))
        return Topology.even(ranks, ranks_per_node, intra, inter)


@dataclass(frozen=True, kw_only=True)
class NodePlace(LinkPlace):
    """Ranks on nodes; virtual links inside of nodes have another rate than those between them."""

    ranks_per_node: int | None = option(
        None,
        "Ranks on each host of --netbed (default: 1) or node of --virtual (default: all).",
        min=1,
    )

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
        return self._topology(ranks, self.ranks_per_node or ranks, INTRA_GBIT)


@dataclass(frozen=True, kw_only=True)
class Rounds(Options):
    """Rounds between ranks, and their links."""

    mbit: int | None = option(None, "Rate of each link, in Mbit/s; else measured.", min=1)
    warmup: int = option(2, "Rounds that are not timed.", min=0)
    iters: int = option(7, "Rounds that are timed.", min=1)
    timeout_s: float = option(
        120.0, "Seconds that an operation may take.", flag="--timeout", fits=above_zero
    )


def scheme_names() -> Iterable[str]:
    """`auto`, and all that are registered."""
    from megatron_sparse.collectives import SCHEMES

    return ("auto", *SCHEMES)


def parse_schemes(flag: str, text: str) -> tuple[str, ...]:
    """Names of schemes; `all` is each of them and `auto`."""
    return tuple(scheme_names()) if text == "all" else parse_names(flag, text)


@dataclass(frozen=True, kw_only=True)
class CollectiveSweep(Rounds, Sizes):
    """Collectives, dense gradient to dense sum, beside the backend's dense one.

    Schemes that lack an operation are left out of it, those with a format of their own where values
    have few bits. Dense ones run once, whatever the density and the bits; `dense_q` runs once for
    8 and 4 bits each, and in 4 where no bits are given.
    """

    NAME = "bench collectives"
    RUNNER = "exchange.collectives"

    min_bytes: int = option("64M", "Such as 64K, 1M.", parse_size)
    densities: Sequence[float] = density_option("0.001,0.01,0.05", "Fractions selected.")
    dtypes: Sequence[str] = names_option(
        "fp32", flag="--dtype", metavar="TYPE,...", among=DTYPE_NAMES
    )
    schemes: Sequence[str] = option(
        "all",
        "Of docs/collectives.md, auto, or all.",
        parse_schemes,
        flag="--scheme",
        metavar="NAME,...",
        among=scheme_names,
    )
    ops: Sequence[str] = names_option("all_reduce", flag="--op", metavar="OP,...", among=OPS)
    message_format: str = option("auto", "scheme.format", flag="--format", among=MESSAGE_FORMATS)
    value_bits: Sequence[int] = option(
        "32",
        "compression.value_bits: 8, 4, 3, 2, or 32: whole.",
        parse_counts,
        flag="--value-bits",
        among=(WHOLE_BITS, *VALUE_BITS),
    )
    sum_bits: int | None = option(
        None,
        "scheme.sum_bits, or 32: whole; auto by default.",
        among=(WHOLE_BITS, *VALUE_BITS),
    )
    levels: Sequence[str] = names_option(
        "rank",
        "compression.level: rank | node",
        "--level",
        metavar="LEVEL,...",
        among=(RANK, NODE),
    )
    capacity: float | None = option(
        None, "scheme.capacity of the schemes that take it.", fits=above_zero
    )
    nccl_engine: bool = option(
        False, "scheme.nccl_engine; on GPUs, with a capacity.", flag="--nccl-engine"
    )

    def checks(self) -> list[Check]:
        """See `Options`."""
        engine_fits = not self.nccl_engine or self.capacity is not None
        return [
            *super().checks(),
            ("nccl_engine", self.nccl_engine, engine_fits, "false without a capacity"),
        ]


def parse_delays(flag: str, text: str) -> tuple[float | None, ...]:
    """Milliseconds separated by commas; `auto` becomes None.

    Raises:
        ConfigError: one of them is neither.

    Example:
        >>> parse_delays("--delay-ms", "0,auto")
        (0.0, None)
    """
    return parse_list(
        flag,
        text,
        lambda part: None if part == AUTO else float(part),
        "delays: milliseconds with commas between, or auto, such as 0,50,auto",
    )


@dataclass(frozen=True, kw_only=True)
class StragglerSweep(CollectiveSweep):
    """Time from the last rank's arrival to the end, scheme by scheme.

    An automatic delay is `AUTO_FACTOR` times the reduce-scatter of `dense_ring` on the same
    gradient, measured (or modelled) before.
    """

    NAME = "bench stragglers"
    RUNNER = "exchange.stragglers"
    DRAWS = True

    densities: Sequence[float] = density_option("0.01", "Fractions selected.")
    schemes: Sequence[str] = names_option(
        STRAGGLER_SCHEMES, "Of docs/collectives.md.", "--scheme", among=scheme_names
    )
    # Messages are always the schemes' own, and sizes travel with them.
    message_format: str = "auto"
    levels: Sequence[str] = ("rank",)
    capacity: float | None = None
    nccl_engine: bool = False
    delays_ms: Sequence[float | None] = option(
        "0,auto",
        "How late; auto: 1.5 reduce-scatters.",
        parse_delays,
        flag="--delay-ms",
        metavar="MS,...",
    )
    straggler: int | None = option(None, "The late rank; the last by default.")
    rule: bool = option(True, "Measure also what the rule takes.", flag="--rule/--no-rule")

    def checks(self) -> list[Check]:
        """See `Options`."""
        longest_ms = self.timeout_s * 1e3
        fits = f"0 to less than --timeout ({longest_ms:g} ms), or auto"
        delays = [
            ("delay-ms", delay, delay is None or 0 <= delay < longest_ms, fits)
            for delay in self.delays_ms
        ]
        return [*super().checks(), *delays]

    def late_rank(self, world_size: int) -> int:
        """The straggler's rank.

        Raises:
            ConfigError: the group has no such rank, or no other one that could wait for it.
        """
        rank = world_size - 1 if self.straggler is None else self.straggler
        if world_size < 2 or not 0 <= rank < world_size:
            raise ConfigError(
                "bench stragglers: there is no such straggler",
                expected=f"--straggler 0 to {world_size - 1} of at least 2 ranks",
                got=f"rank {rank} of {world_size}",
            )
        return rank


@dataclass(frozen=True, kw_only=True)
class GatherSweep(Rounds):
    """The all-gather of updated parameters, raw and exact, with their bits compared."""

    NAME = "bench gather"
    RUNNER = "exchange.gather"

    elements: int = option(4_000_000, "Parameters; rounded up to whole shards.", min=1)
    rates: Sequence[float] = option(
        "1e-4",
        "Learning rates of a step of Adam on normal weights.",
        parse_numbers,
        flag="--lr",
        fits=at_least(0),
    )
    dtype: str = option("bf16", among=DTYPE_NAMES)
    coders: Sequence[str] = names_option(
        ",".join(GATHER_CODERS), flag="--coder", among=GATHER_CODERS
    )
    warmup: int = option(1, "Rounds that are not timed.", min=0)


@dataclass(frozen=True, kw_only=True)
class RowSparseSweep(Rounds):
    """Row-sparse all-reduce beside torch's sparse and dense ones; see docs/ddp.md."""

    NAME = "bench row-sparse"
    RUNNER = "exchange.row_sparse"

    num_rows: int = option(50_000, "Rows of the embedding.", min=1)
    width: int = option(256, "Elements of a row.", min=1)
    rows: int = option(4096, "Tokens of each rank's batch.", min=1)


@dataclass(frozen=True, kw_only=True)
class BucketSweep(Sizes):
    """One bucket on this device, without a network: time, waits, overlap.

    With `stub_nccl` it is a small bucket on rank 0 of several.
    """

    NAME = "bench bucket"
    RUNNER = "exchange.bucket"

    min_bytes: int = option("64M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("1G", "Such as 64M, 1G.", parse_size)
    schemes: Sequence[str] = names_option(
        "direct", "Of docs/collectives.md.", "--scheme", among=scheme_names
    )
    density: float = option(0.01, "Fraction selected.", min=1e-6, max=1)
    capacity: float = option(1.25, "scheme.capacity", min=1)
    codecs: Sequence[str] = names_option(
        ",".join(BUCKET_CODECS),
        "On a GPU: cuda, torch (Triton's kernels and torch operations; exchanges sizes).",
        among=BUCKET_CODECS,
    )
    nccl_engine: bool = option(False, "scheme.nccl_engine", flag="--nccl-engine")
    stub_nccl: bool = option(
        False, "The host's time beside NCCL, which is not called; no GPU.", flag="--stub-nccl"
    )
    ranks: Sequence[int] = option("2,8,16", "With --stub-nccl: sizes of the group.", parse_counts)
    iters: int = option(10, "Buckets that are timed.", min=1)

    @property
    def threads(self) -> int | None:
        """Of torch; None: as they are."""
        return 1 if self.stub_nccl else None

    def checks(self) -> list[Check]:
        """See `Options`."""
        if not self.stub_nccl:
            return super().checks()
        from megatron_sparse.collectives import SCHEMES

        # All ranks know the sizes of these schemes' messages beforehand.
        sized = {name for name, entry in SCHEMES.items() if entry.takes_slots}
        sized |= {"dense", "dense_ring", "dense_rhd", "dense_allpairs"}
        return [
            *super().checks(),
            ("ranks", self.ranks, all(2 <= n <= 256 for n in self.ranks), "2 to 256"),
            ("scheme", self.schemes, sized >= set(self.schemes), " | ".join(sorted(sized))),
        ]


def _kinds() -> Iterable[str]:
    from megatron_sparse.bench.exchange.planner_cases import KINDS

    return KINDS


@dataclass(frozen=True, kw_only=True)
class PlannerOptions(Rounds):
    """Compare the planner's choice with the best of all schemes.

    Of gradients, ranks, clusters and candidates None stands for the usual.
    """

    NAME = "bench planner"
    RUNNER = "exchange.planner"

    kinds: Sequence[str] | None = names_option(None, "Of gradients; all by default.", among=_kinds)
    recording: Path | None = option(  # noqa: RUF009 - it makes a field
        None, "Recorded gradients instead.", metavar="DIR"
    )
    ranks: Sequence[int] | None = option(
        None,
        "2 to 64 by default; 4 on the test bed.",
        partial(parse_counts, low=2),
        metavar="N,...",
    )
    clusters: Sequence[str] | None = names_option(
        None, "Shipped models; all by default.", among=CLUSTERS
    )
    schemes: Sequence[str] | None = names_option(None, "The candidates; all by default.")
    bucket_bytes: int = option("64M", "Of the fp32 bucket.", parse_size)
    simulated_bytes: int | None = option(
        None, "Of the virtual one for it; 2M, with --quick 512K.", parse_size
    )
    op: str = option("all_reduce", among=OPS)
    quick: bool = option(False, "Five kinds, 2 to 8 ranks.", flag="--quick")
    netbed: bool = option(False, "Real time, on the test bed; needs root.", flag="--netbed")
    cluster: str | None = option(None, "Of the test bed; else it is measured.", metavar="FILE")
    iters: int = option(9, "Rounds that are timed.", min=1)

    def checks(self) -> list[Check]:
        """See `Options`."""
        one = self.recording is None or self.kinds is None
        return [*super().checks(), ("kinds", self.kinds, one, "--kinds or --recording, not both")]
