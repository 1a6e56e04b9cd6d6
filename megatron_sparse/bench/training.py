"""`bench training`: iteration times of a small Megatron GPT, compressed beside plain.

Each row is a run of its own of `megatron-sparse train experiment=testbed`, over loopback or on the
network test bed, one after the other; `plain` is Megatron without the plugin. Times are those that
Megatron itself prints, so that all rows are measured alike. Unlike the pairs of `bench
collectives`, rows measured far apart in time do not share the machine's other load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from megatron_sparse.bench.host_load import MOST_FOREIGN_LOAD, HostLoad, foreign_share
from megatron_sparse.bench.options import at_least, check_arguments, known
from megatron_sparse.bench.table import Columns, TableRow, describe_cpu, print_table
from megatron_sparse.collectives import AUTO, SCHEMES, skips_straggler
from megatron_sparse.config.level import LEVELS, RANK
from megatron_sparse.config.parameters import METHODS
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run import composition, local_ranks

PLAIN = "plain"
ITERATION = re.compile(
    r"iteration +\d+/.*elapsed time per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+-]+)"
)
TAIL_LINES = 30


@dataclass(frozen=True)
class Variant:
    """What differs between two rows.

    Attributes:
        scheme: `plain`, or the plugin's.
        density: of the schemes that compress.
        parameters: `parameters.method`; None for `plain`.
        level: `compression.level`.
    """

    scheme: str
    density: float
    parameters: str | None
    level: str = RANK

    @property
    def run_name(self) -> str:
        """Of the run's folder and log."""
        gathered = "" if self.parameters in (None, "auto") else f"_{self.parameters}"
        level = "" if self.level == RANK else f"_{self.level}"
        return f"{self.scheme}_{self.density:g}{gathered}{level}"


@dataclass(frozen=True)
class Setting:
    """What to train, and where.

    Attributes:
        schemes: `plain` and names of schemes; the first is what the others are compared
            with.
        densities: for the schemes that compress.
        ranks: processes on this machine.
        mbit: rate of the test bed's links; None for loopback.
        warmup: iterations before the first that counts.
        iters: iterations that count.
        overrides: more arguments of `train`.
        slow_rank: sleeps in every backward pass, in all rows; schemes that can skip a
            straggler have it pinned. None for no rank; `plain` cannot skip it.
        slow_ms: how long it sleeps.
        parameters: values of `parameters.method`, a row of each scheme for each; `plain` has one
            row.
        levels: values of `compression.level`, likewise; dense schemes have `rank` alone.
        ranks_per_node: ranks on each host of the test bed.
    """

    schemes: Sequence[str]
    densities: Sequence[float]
    ranks: int
    mbit: int | None
    warmup: int
    iters: int
    overrides: Sequence[str]
    slow_rank: int | None = None
    slow_ms: float = 0.0
    parameters: Sequence[str] = ("auto",)
    levels: Sequence[str] = (RANK,)
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        divides = self.ranks % self.ranks_per_node == 0
        has_hosts = self.mbit is not None or self.ranks_per_node == 1
        check_arguments(
            "bench training",
            [
                known("scheme", self.schemes, (PLAIN, AUTO, *SCHEMES)),
                known("parameters", self.parameters, METHODS),
                at_least("ranks", self.ranks, 1),
                at_least("warmup", self.warmup, 0),
                at_least("iters", self.iters, 1),
                known("level", self.levels, LEVELS),
                ("ranks-per-node", self.ranks_per_node, divides, f"a divisor of {self.ranks}"),
                ("ranks-per-node", self.ranks_per_node, has_hosts, "1 without --netbed"),
            ],
        )
        if self.slow_rank is None:
            return
        fits = f"0 to {self.ranks - 1}"
        awake = f"no {PLAIN} with --slow-rank: it is the plugin that sleeps"
        check_arguments(
            "bench training",
            [
                ("slow-rank", self.slow_rank, self.slow_rank < self.ranks, fits),
                ("level", ",".join(self.levels), set(self.levels) == {RANK}, "rank: one is slow"),
                ("slow-ms", self.slow_ms, self.slow_ms > 0, "more than 0 with --slow-rank"),
                ("scheme", self.schemes, PLAIN not in self.schemes, awake),
            ],
        )

    def rows(self) -> Iterator[Variant]:
        """What differs between the rows."""
        for scheme in self.schemes:
            dense = scheme in (PLAIN, "straggler") or scheme.startswith("dense")
            for density in [1.0] if dense else self.densities:
                if scheme == PLAIN:
                    yield Variant(scheme, density, None)
                    continue
                for parameters, level in product(self.parameters, self.levels):
                    if level == RANK or not dense:
                        yield Variant(scheme, density, parameters, level)

    @property
    def nodes(self) -> int:
        """Hosts."""
        return 1 if self.mbit is None else self.ranks // self.ranks_per_node

    def arguments(self, variant: Variant, out: Path) -> list[str]:
        """Of `train`, for one row."""
        scheme = variant.scheme
        how = ["plugin=false"] if scheme == PLAIN else [f"scheme={scheme}"]
        if variant.parameters not in (None, "auto"):
            how.append(f"parameters.method={variant.parameters}")
        return [
            "experiment=testbed",
            f"name={variant.run_name}",
            f"runs_dir={out}",
            *how,
            f"compression.density={variant.density:g}",
            f"compression.level={variant.level}",
            f"cluster.nodes={self.nodes}",
            f"cluster.ranks_per_node={self.ranks // self.nodes}",
            "cluster.device=cpu",
            f"training.global_batch_size={self.ranks}",
            f"training.iterations={self.warmup + self.iters}",
            *self._slow(scheme),
            *self.overrides,
        ]

    def _slow(self, scheme: str) -> list[str]:
        if self.slow_rank is None:
            return []
        asleep = [
            f"straggler.inject_rank={self.slow_rank}",
            f"straggler.inject_delay_ms={self.slow_ms:g}",
        ]
        if not skips_straggler(scheme):
            return asleep
        return [*asleep, "straggler.mode=pinned", f"straggler.rank={self.slow_rank}"]


@dataclass
class Row(TableRow):
    """One run; times are milliseconds.

    Attributes:
        op: `training`.
        scheme: `plain`, or the plugin's.
        density: of the schemes that compress; 1 for the others.
        parameters: `parameters.method`; null for `plain`.
        level: `compression.level`.
        world_size: ranks.
        slow_ms: how long the slow rank sleeps in an iteration; 0 if no rank is slow.
        mbit: rate of each rank's link; null over loopback.
        iteration_ms: median.
        slowest_ms: the slowest iteration that counts.
        exposed_ms: of the median iteration, spent waiting for gradients; null for `plain`.
        host_cpu_us: of the processor, spent by the progress thread for each bucket: codecs
            included, since ranks have no GPU; the median iteration's. Null for `plain`.
        wire_bytes: of gradients, sent by the last rank in an iteration; null for `plain`.
        inside_bytes: those of them that stayed on the rank's node, at level `node`.
        dense_bytes: the bytes that a dense ring would send; null for `plain`.
        param_exposed_ms: of the median iteration, spent waiting for gathered parameters; null for
            `plain`, 0 without the distributed optimizer.
        param_wire_bytes: of parameters, sent by the last rank in an iteration; null for `plain`.
        param_dense_bytes: the bytes that a raw all-gather on a ring would send; null for `plain`.
        loss_first: of the first iteration.
        loss_last: of the last one.
        speedup: over the first row.
        foreign_load: the share of the machine that other programs took during the whole run.
        noisy: whether `foreign_load` was too high to trust the times.
    """

    COLUMNS = Columns(
        "scheme >20 | density >8g | level >8 | parameters >7 params | "
        "iteration_ms >13.1f iteration(ms) | slowest_ms >9.1f slowest | "
        "exposed_ms >11.1f exposed(ms) | host_cpu_us >8.0f cpu(us) | "
        "wire_bytes >11.0f wire(B) | inside_bytes >11.0f inside(B) | "
        "dense_bytes >11.0f dense(B) | param_exposed_ms >12.1f params exp. | "
        "param_wire_bytes >11.0f params wire | param_dense_bytes >12.0f params dense | "
        "speedup >7.2f | losses >17 loss"
    )

    op: str
    scheme: str
    density: float
    parameters: str | None
    level: str
    world_size: int
    slow_ms: float
    mbit: int | None
    iteration_ms: float
    slowest_ms: float
    exposed_ms: float | None
    host_cpu_us: float | None
    wire_bytes: float | None
    inside_bytes: float | None
    dense_bytes: float | None
    param_exposed_ms: float | None
    param_wire_bytes: float | None
    param_dense_bytes: float | None
    loss_first: float
    loss_last: float
    speedup: float
    foreign_load: float
    noisy: bool

    @property
    def losses(self) -> str:
        """The first and the last one."""
        return f"{self.loss_first:>7.4f} -> {self.loss_last:.4f}"


def run(setting: Setting, out: Path, json_path: Path | None = None) -> list[dict[str, Any]]:
    """Trains, prints the table and returns its rows.

    Args:
        setting: what to train.
        out: gets a folder and a log for each run; an earlier run of the same name moves aside.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: an override is wrong, or a file cannot be written.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    for variant in setting.rows():
        composition.compose(setting.arguments(variant, out))
    _make_folder(out)
    where = "loopback" if setting.mbit is None else f"test bed, {setting.mbit} Mbit/s"
    slow = f", rank {setting.slow_rank} sleeps {setting.slow_ms:g} ms an iteration"
    print(
        f"# {describe_cpu(1)}\n# {setting.ranks} ranks, gloo, {where}, {setting.warmup} + "
        f"{setting.iters} iterations, medians{'' if setting.slow_rank is None else slow}",
        flush=True,
    )
    rows = print_table(Row.COLUMNS, _rows(setting, out), json_path)
    return [row.to_dict() for row in rows]


def _rows(setting: Setting, out: Path) -> Iterator[Row]:
    first = None
    for variant in setting.rows():
        row = _train(setting, variant, out, first)
        first = first or row
        yield row


def _train(setting: Setting, variant: Variant, out: Path, first: Row | None) -> Row:
    arguments, scheme = setting.arguments(variant, out), variant.scheme
    command = local_ranks.command_line(["train", *arguments])
    log_path = out / f"{variant.run_name}.log"
    load = HostLoad()
    with log_path.open("w") as log:
        if setting.mbit is None:
            code = local_ranks.run(command, log)
        else:
            code = local_ranks.run_netbed(command, setting.ranks, setting.mbit, setting.nodes, log)
    share = foreign_share(*load.spent())
    printed = log_path.read_text("utf-8", errors="replace")
    found = ITERATION.findall(printed)
    if code or len(found) != setting.warmup + setting.iters:
        tail = "\n".join(printed.splitlines()[-TAIL_LINES:])
        raise MegatronSparseError(
            f"bench training: the run with scheme {scheme} failed",
            expected=f"exit code 0 and {setting.warmup + setting.iters} iterations",
            got=f"exit code {code} and {len(found)} iterations; it ends with\n{tail}",
            remedy=f"see {log_path}",
        )
    times_ms = [float(time_ms) for time_ms, _ in found][setting.warmup :]
    losses = [float(loss) for _, loss in found]
    middle_ms = median(times_ms)
    return Row(
        op="training",
        scheme=scheme,
        density=variant.density,
        parameters=variant.parameters,
        level=variant.level,
        world_size=setting.ranks,
        slow_ms=setting.slow_ms if setting.slow_rank is not None else 0.0,
        mbit=setting.mbit,
        iteration_ms=middle_ms,
        slowest_ms=max(times_ms),
        loss_first=losses[0],
        loss_last=losses[-1],
        speedup=(first.iteration_ms if first else middle_ms) / middle_ms,
        foreign_load=share,
        noisy=share > MOST_FOREIGN_LOAD,
        **_from_breakdown(out / variant.run_name, setting.warmup, plain=scheme == PLAIN),
    )


def _from_breakdown(folder: Path, warmup: int, *, plain: bool) -> dict[str, float | None]:
    """The figures that only the plugin measures: medians over the iterations that count."""
    names = ("wire_bytes", "inside_bytes", "dense_bytes", "param_wire_bytes", "param_dense_bytes")
    waits = {"exposed_ms": "host_wait", "param_exposed_ms": "param_wait"}
    if plain:
        return dict.fromkeys((*names, *waits, "host_cpu_us"))
    lines = (folder / "breakdown.jsonl").read_text().splitlines()[warmup:]
    iterations = [json.loads(line) for line in lines]
    of_bucket_us = [
        1e3 * iteration["host_cpu_ms"] / sum(iteration["schemes"].values())
        for iteration in iterations
    ]
    found = {name: median(each[name] for each in iterations) for name in names}
    for name, stage in waits.items():
        found[name] = median(each["stage_ms"][stage] for each in iterations)
    return found | {"host_cpu_us": median(of_bucket_us)}


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "bench training: the runs have no place",
            expected="a folder that can be made",
            got=error,
            remedy="give another --out",
        ) from None
