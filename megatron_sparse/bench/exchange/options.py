"""Options of the benches that exchange messages, and of `calibrate`: what to measure, and where.

Imports nothing heavy: the command line reads this for `--help`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Check,
    Options,
    Sizes,
    above_zero,
    at_least,
    check_arguments,
    density_option,
    fraction,
    names_option,
    option,
    parse_counts,
    parse_names,
    parse_numbers,
    parse_size,
    some_seconds,
)
from megatron_sparse.config.compression import VALUE_BITS
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.config.scheme import MESSAGE_FORMATS

if TYPE_CHECKING:
    from megatron_sparse.transport import Topology

WHOLE_BITS = 32
"""The value of `--value-bits` that rounds nothing, whatever the gradient's dtype."""
ALPHA_S, INTRA_GBIT = 10e-6, 1600.0
"""Of virtual links: latency of a message, and the rate inside a node."""
OPS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Place(Options):
    """Where ranks of this machine are: on the loopback, or on hosts of the test bed."""

    ranks: int | None = option(None, "4, or as many as a launcher has started.", min=1)
    netbed: bool = option(False, "On the test bed; needs root.", flag="--netbed")
    ranks_per_node: int | None = option(
        None, "Ranks on each host of the test bed; 1 by default.", min=1
    )

    def nodes(self, ranks: int) -> int:
        """Returns the number of hosts of the test bed that `ranks` ranks are on.

        Raises:
            ConfigError: `ranks_per_node` does not divide the ranks.
        """
        per_host = min(self.ranks_per_node or 1, ranks)
        divisor = f"a divisor of {ranks}"
        check_arguments(self.NAME, [("ranks-per-node", per_host, ranks % per_host == 0, divisor)])
        return ranks // per_host


@dataclass(frozen=True, kw_only=True)
class NodePlace(Place):
    """Ranks on nodes; virtual links inside of nodes have another rate than those between them."""

    NAME = "bench"

    virtual: bool = option(False, "On virtual ranks: a model.", flag="--virtual")
    inter_gbit: float = option(25.0, "Virtual links between nodes.", min=1e-6)
    ranks_per_node: int | None = option(
        None,
        "Ranks on each host of --netbed (default: 1) or node of --virtual (default: all).",
        min=1,
    )

    def checks(self) -> list[Check]:
        """Allows `--ranks-per-node` only where this command decides it, and no launcher."""
        given, has_nodes = self.ranks_per_node, self.netbed or self.virtual
        fitting = "none without --netbed or --virtual: elsewhere a launcher places ranks"
        return [("ranks-per-node", given, given is None or has_nodes, fitting)]

    def topology(self, ranks: int) -> Topology:
        """Makes the virtual cluster: nodes of `ranks_per_node`, by default a node of all ranks."""
        from megatron_sparse.transport import Link, Topology

        # 8e-9 / rate in Gbit/s: seconds a byte.
        intra, inter = (Link(ALPHA_S, 8e-9 / gbit) for gbit in (INTRA_GBIT, self.inter_gbit))
        return Topology.even(ranks, self.ranks_per_node or ranks, intra, inter)


@dataclass(frozen=True, kw_only=True)
class Rounds(Options):
    """Rounds between ranks, and their links."""

    mbit: int | None = option(None, "Rate of each link, in Mbit/s; else measured.", min=1)
    warmup: int = option(2, "Rounds that are not timed.", min=0)
    iters: int = option(7, "Rounds that are timed.", min=1)
    timeout_s: float = option(
        120.0, "Seconds that an operation may take.", flag="--timeout", fits=some_seconds
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

    A scheme runs only with operations that it has; one with a message format of its own only with
    values in full. Dense schemes run once, whatever the density and the bits; `dense_q` runs once
    for 8 and 4 bits each, and in 4 where no bits are given.
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
        None, "scheme.sum_bits, or 32: whole; auto by default.", among=(WHOLE_BITS, *VALUE_BITS)
    )
    levels: Sequence[str] = names_option(
        "rank", "compression.level: rank | node", "--level", metavar="LEVEL,...", among=(RANK, NODE)
    )
    capacity: float | None = option(
        None, "scheme.capacity of the schemes that take it.", fits=above_zero
    )
    nccl_engine: bool = option(
        False, "scheme.nccl_engine; on GPUs, with a capacity.", flag="--nccl-engine"
    )
    delay_ms: float = option(0.0, "How late the last rank is.", fits=at_least(0))

    def checks(self) -> list[Check]:
        """Checks NCCL's engine and the delay against other options, after the checks of `Sizes`."""
        engine_fits = not self.nccl_engine or self.capacity is not None
        longest_ms = self.timeout_s * 1e3
        comes_in_time = self.delay_ms < longest_ms
        return [
            *super().checks(),
            ("nccl_engine", self.nccl_engine, engine_fits, "false without a capacity"),
            ("delay_ms", self.delay_ms, comes_in_time, f"less than --timeout ({longest_ms:g} ms)"),
        ]


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
    warmup: int = option(1, "Rounds that are not timed.", min=0)


@dataclass(frozen=True, kw_only=True)
class BucketSweep(Sizes):
    """One bucket on this device, without a network: time, waits, overlap."""

    NAME = "bench bucket"
    RUNNER = "exchange.bucket"

    min_bytes: int = option("64M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("1G", "Such as 64M, 1G.", parse_size)
    schemes: Sequence[str] = names_option(
        "direct", "Of docs/collectives.md.", "--scheme", among=scheme_names
    )
    density: float = option(0.01, "Fraction selected.", fits=fraction)
    capacity: float = option(1.25, "scheme.capacity", min=1)
    nccl_engine: bool = option(False, "scheme.nccl_engine", flag="--nccl-engine")
    iters: int = option(10, "Buckets that are timed.", min=1)


@dataclass(frozen=True, kw_only=True)
class CalibrationPlace(Place):
    """Where `calibrate` measures."""

    NAME = "calibrate"

    ranks: int | None = option(None, "Default: the ranks that a launcher started, else 2.", min=1)
    mbit: int | None = option(None, "Link rate of the test bed in Mbit/s.", min=1)

    def checks(self) -> list[Check]:
        """Allows the test bed's own options only with `--netbed`."""
        bed_options = {"mbit": self.mbit, "ranks-per-node": self.ranks_per_node}
        return [
            (name, value, self.netbed or value is None, "none without --netbed")
            for name, value in bed_options.items()
        ]


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(Options):
    """What to measure, the same on every rank; `out` is the YAML file."""

    NAME = "calibrate"

    out: Path = Path("cluster.yaml")
    quick: bool = option(False, "Take seconds, with less precise results.", flag="--quick")
    force: bool = option(False, "Replace FILE.", flag="--force")
    sweep: bool = option(
        False, "Find adaptive_ring's thresholds and add them to FILE.", flag="--sweep"
    )
    env: str | None = option(None, "Set the environment of configs/cluster/NAME.", metavar="NAME")
    timeout_s: float = option(
        120.0, "Seconds after which an operation has failed.", flag="--timeout", fits=some_seconds
    )

    def arguments(self) -> list[str]:
        """The command line with the same options."""
        return [f"--output={self.out}", *super().arguments()]
