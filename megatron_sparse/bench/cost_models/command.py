"""`bench cost-models`: the times that the cost models predict, beside the times that were taken.

Two truths. The virtual one (`virtual_truth`) runs every scheme on gradients of several kinds and
densities, on model clusters and 2 to 64 ranks: a MODEL too, but of another kind: real messages,
every rank's own non-zero elements, codec prices that the cost models do not see. And rows of `bench
collectives --json`, which were measured, beside the cluster file of the same ranks.

An error is predicted / taken - 1. The profile is the exact one; `bench planner` includes the error
of sampling.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_sparse.bench.cost_models import level_truth, virtual_truth
from megatron_sparse.bench.cost_models.codec_prices import (
    CodecPrices,
    MemoryBoundPrices,
    TimedPrices,
)
from megatron_sparse.bench.options import check_arguments, fractions, known
from megatron_sparse.bench.table import Columns, TableRow, print_table, torch_threads
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require_fits
from megatron_sparse.formats.message import VALUE_DTYPES
from megatron_sparse.planner.costs import fits, predict
from megatron_sparse.planner.levels import has_lanes, inside_s
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape, Prediction
from megatron_sparse.simulate import gradients
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.gradients import GradientModel
from megatron_sparse.sparsity.characteristics import profile_of
from megatron_sparse.wire import PICI_TILE

ROW_NUMEL = 64
KINDS: dict[str, Callable[[int, float], GradientModel]] = {
    "uniform": gradients.uniform,
    "skewed": partial(gradients.skewed, exponent=1.0),
    "overlapping": gradients.fully_overlapping,
    "disjoint": gradients.hardly_overlapping,
    "embedding": partial(gradients.skewed, exponent=1.0, row_numel=ROW_NUMEL),
}
"""Gradients of a number of elements and a density."""
FITTED = frozenset({"skewed", "embedding"})
"""Kinds that are fitted with scipy."""
LEAST_NNZ = 32
"""Least non-zero elements of a shard; with fewer, chance outweighs the model's error."""
LEAST_NUMEL, MOST_NUMEL = 2**16, 2**19
TARGET = 0.10


@dataclass(frozen=True)
class CostRow(TableRow):
    """One case; times are microseconds.

    Attributes:
        scheme: of the collective.
        op: `all_reduce` or `reduce_scatter`.
        kind: of the gradients.
        density: of a rank's gradient.
        world_size: ranks.
        level: `rank` or `node`.
        cluster: name of the cluster.
        count: elements of the bucket.
        predicted_us: by the cost model.
        network_us: its part that is the network's.
        codec_us: its part that is local work.
        host_us: its part that is the host's.
        taken_us: by the virtual cluster, or measured.
        modelled: whether `taken_us` is that of a virtual cluster.
    """

    COLUMNS = Columns(
        "scheme <18 | op <14 | kind <11 | density >8g | world_size >5 ranks | level <5 | "
        "cluster <17 | "
        "predicted_us >13.1f predicted(us) | taken_us >13.1f taken(us) | error >+7.1%"
    )

    scheme: str
    op: str
    kind: str
    density: float
    world_size: int
    level: str
    cluster: str
    count: int
    predicted_us: float
    network_us: float
    codec_us: float
    host_us: float
    taken_us: float
    modelled: bool

    @property
    def error(self) -> float:
        """The prediction's relative error; positive if it is too long."""
        return self.predicted_us / self.taken_us - 1

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return super().to_dict() | {"error": self.error}


@dataclass(frozen=True)
class CostSweep:
    """The cases of the virtual truth.

    Attributes:
        schemes: of the registry; those without a model are left out.
        kinds: names of `KINDS`.
        densities: of a rank's gradient.
        world_sizes: ranks, 2 and more.
        clusters: names of model clusters, or files of `calibrate`, whose codec prices are then
            this machine's.
        op: all-reduce or reduce-scatter.
        full_numel: elements of the bucket that the simulated one represents.
        level: `rank` or `node`. At `node` gradients and densities are those of each part of the
            nodes' sums; cases on one node, with one rank a node or with nodes of different sizes
            are left out.

    Raises:
        ConfigError: a name is unknown, or a number out of range.
        DependencyError: scipy is missing, which the kinds need.
    """

    schemes: Sequence[str]
    kinds: Sequence[str]
    densities: Sequence[float]
    world_sizes: Sequence[int]
    clusters: Sequence[str]
    op: CollectiveOp = CollectiveOp.ALL_REDUCE
    full_numel: int = 2**24
    level: str = RANK

    def __post_init__(self) -> None:
        smallest = PICI_TILE * max(self.world_sizes, default=1)
        check_arguments(
            "bench cost-models",
            [
                known("scheme", self.schemes, SCHEMES),
                (
                    "scheme",
                    self.schemes,
                    any(
                        name in SCHEMES and fits(name, self.op, SchemeConfig())
                        for name in self.schemes
                    ),
                    f"a scheme that has a cost model and can do the {self.op}",
                ),
                known("kind", self.kinds, KINDS),
                fractions("density", self.densities),
                ("ranks", self.world_sizes, all(n >= 2 for n in self.world_sizes), "2 or more"),
                known("level", [self.level], (RANK, NODE)),
                ("size", self.full_numel, self.full_numel >= smallest, f"{smallest} elements"),
            ],
        )
        for name in self.clusters:
            find(name)
        if FITTED.intersection(self.kinds):
            require_fits()

    def rows(self) -> Iterator[CostRow]:
        """Every case; kinds outermost, schemes innermost."""
        for kind in self.kinds:
            for density in self.densities:
                for n in self.world_sizes:
                    of_level = self._rows if self.level == RANK else self._node_rows
                    yield from of_level(kind, density, n)

    def _rows(self, kind: str, density: float, n: int) -> Iterator[CostRow]:
        options = SchemeConfig(capacity=None)
        model = KINDS[kind](simulated_numel(n, density, self.full_numel), density)
        given = [model.gradient(rank) for rank in range(n)]
        profile = virtual_truth.at_full_size(profile_of(given), self.full_numel)
        shape = BucketShape(self.full_numel, 0, 4, self.op, n)
        for name in self.clusters:
            cluster, prices = find(name), prices_of(name)
            setting = virtual_truth.Setting.on(
                cluster, n, prices, options, self.op, self.full_numel
            )
            for scheme in self.schemes:
                if fits(scheme, self.op, options):
                    taken_s = virtual_truth.run(scheme, given, setting).total_s
                    found = predict(scheme, shape, profile, cluster, options)
                    case = {"scheme": scheme, "kind": kind, "density": density}
                    yield _row(shape, found, cluster, taken_s, modelled=True, **case)

    def _node_rows(self, kind: str, density: float, n: int) -> Iterator[CostRow]:
        options = SchemeConfig(capacity=None)
        shape = BucketShape(self.full_numel, 0, 4, self.op, n)
        for name in self.clusters:
            cluster, prices = find(name), prices_of(name)
            sizes = cluster.topology(n).node_sizes
            if not has_lanes(sizes):
                continue
            inside = sizes[0]
            lane = shape.lane(inside)
            model = KINDS[kind](simulated_numel(len(sizes), density, lane.numel), density)
            parts = [model.gradient(node) for node in range(len(sizes))]
            profile = virtual_truth.at_full_size(profile_of(parts), lane.numel)
            setting = virtual_truth.Setting.on(
                cluster, n, prices, options, self.op, self.full_numel
            )
            within_s = inside_s(shape, cluster, inside, grouped=True)
            for scheme in self.schemes:
                if fits(scheme, self.op, options):
                    taken_s = level_truth.run_at_node(scheme, parts, setting).total_s
                    found = predict(scheme, lane, profile, cluster, options)
                    found = replace(found, network_s=found.network_s + within_s)
                    case = {"scheme": scheme, "kind": kind, "density": density, "level": NODE}
                    yield _row(shape, found, cluster, taken_s, modelled=True, **case)


def prices_of(cluster: str) -> CodecPrices:
    """Prices of a model cluster's GPUs, bound by memory, or of this machine's CPU for a file."""
    if cluster in MACHINES:
        return MemoryBoundPrices(MACHINES[cluster][0].codec_rate)
    return _timed_prices()


@cache
def _timed_prices() -> TimedPrices:
    return TimedPrices.timed()


def _row(
    shape: BucketShape,
    found: Prediction,
    cluster: ClusterModel,
    taken_s: float,
    *,
    modelled: bool,
    level: str = RANK,
    **case: Any,
) -> CostRow:
    return CostRow(
        level=level,
        op=str(shape.op),
        world_size=shape.world_size,
        cluster=cluster.name,
        count=shape.numel,
        predicted_us=found.total_s * 1e6,
        network_us=found.network_s * 1e6,
        codec_us=found.codec_s * 1e6,
        host_us=found.host_s * 1e6,
        taken_us=taken_s * 1e6,
        modelled=modelled,
        **case,
    )


def simulated_numel(world_size: int, density: float, full_numel: int) -> int:
    """Elements to simulate: whole tiles a shard, and enough non-zero ones if that is not too many.

    Example:
        >>> simulated_numel(8, 0.01, 2**24), simulated_numel(64, 0.001, 2**24)
        (65536, 524288)
    """
    numel = max(PICI_TILE * world_size, LEAST_NUMEL)
    while numel * density / world_size < LEAST_NNZ and numel < MOST_NUMEL:
        numel *= 2
    return min(numel, full_numel)


def measured_rows(path: Path, cluster: ClusterModel) -> Iterator[CostRow]:
    """Predictions beside rows that `bench collectives --json` wrote.

    Positions of what was selected there are uniform and independent. Rows of schemes without a
    model, of level `node` and of modelled times are left out.

    Raises:
        ConfigError: the file cannot be read, is none of that bench, or no row is left.
    """
    left_out = 0
    for row in _read(path):
        op, bits = CollectiveOp(row["op"]), row.get("value_bits")
        options = SchemeConfig(capacity=None, sum_bits=row.get("sum_bits"))
        scheme, n, numel = row["carried_by"], row["world_size"], row["count"]
        # A row of level `node` does not tell how many ranks a node had.
        is_priced = row.get("level", RANK) == RANK and fits(scheme, op, options, bits)
        if row["modelled"] or row["time_us"] is None or not is_priced:
            left_out += 1
            continue
        value_bytes = VALUE_DTYPES[row["dtype"]].itemsize
        shape = BucketShape(numel, 0, value_bytes, op, n, value_bits=bits)
        density = row["sent_density"]
        profile = SparsityProfile.uniform(numel, density, n)
        found = predict(scheme, shape, profile, cluster, options)
        case = {"scheme": scheme, "kind": "measured", "density": density}
        yield _row(shape, found, cluster, row["time_us"] / 1e6, modelled=False, **case)
    if left_out:
        print(
            f"# {left_out} rows are left out: modelled, not timed, of level node, or without "
            "a cost model"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    needed = {
        "op",
        "carried_by",
        "world_size",
        "count",
        "modelled",
        "time_us",
        "dtype",
        "sent_density",
    }
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise _not_measured(path, error) from error
    for row in rows:
        if not isinstance(row, dict) or not needed <= row.keys():
            raise _not_measured(path, "a line without " + ", ".join(sorted(needed - set(row))))
    if not rows:
        raise _not_measured(path, "no line")
    return rows


def _not_measured(path: Path, got: object) -> ConfigError:
    return ConfigError(
        f"{path} holds no measured collectives",
        expected="JSON lines of `megatron-sparse bench collectives --json FILE`",
        got=got,
        remedy="measure with that command, and give the cluster's file of `calibrate`",
    )


@dataclass(frozen=True)
class SchemeErrors:
    """Errors of a scheme's model over all its cases.

    Attributes:
        scheme: its name.
        cases: how many.
        mean_error: mean magnitude.
        worst: the row that is furthest off.
    """

    scheme: str
    cases: int
    mean_error: float
    worst: CostRow

    def line(self) -> str:
        """In words."""
        row = self.worst
        return (
            f"# {self.scheme:<18} {self.cases:>5} cases, mean error {self.mean_error:>6.1%}, worst "
            f"{row.error:>+7.1%} ({row.kind} {row.density:g}, {row.world_size} ranks, "
            f"{row.cluster})"
        )


def errors_by_scheme(rows: Iterable[CostRow]) -> list[SchemeErrors]:
    """The errors of each scheme, in the order in which the schemes first appear."""
    by_scheme: dict[str, list[CostRow]] = defaultdict(list)
    for row in rows:
        by_scheme[row.scheme].append(row)
    return [
        SchemeErrors(
            scheme,
            len(found),
            mean(abs(row.error) for row in found),
            max(found, key=lambda row: abs(row.error)),
        )
        for scheme, found in by_scheme.items()
    ]


def report(rows: Iterable[CostRow], json_path: Path | None) -> list[SchemeErrors]:
    """Prints rows as they come, then each scheme's errors and the mean of all.

    Raises:
        ConfigError: the JSON file cannot be written, or there is no row.
    """
    with torch_threads(1):
        done = print_table(CostRow.COLUMNS, rows, json_path)
    if not done:
        raise ConfigError("there is nothing to compare", expected="one row at least", got="none")
    errors = errors_by_scheme(done)
    for error in errors:
        print(error.line())
    over = [error.scheme for error in errors if error.mean_error > TARGET]
    print(
        f"# mean error of {len(done)} predictions: {mean(abs(row.error) for row in done):.1%}"
        + (f"; over {TARGET:.0%}: {', '.join(over)}" if over else ""),
        flush=True,
    )
    return errors
