"""`bench training`: iteration times of a small Megatron GPT, compressed beside plain.

`plain` is Megatron without the plugin. Unlike the rounds of `bench collectives`, runs follow one
another, so that other programs may slow one down and not the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from megatron_sparse.bench.study.frame import Run, begin
from megatron_sparse.bench.study.options import PLAIN, TrainingOptions
from megatron_sparse.collectives import skips_straggler
from megatron_sparse.config.level import RANK
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.reduction.setting_trials import steps_of_trials
from megatron_sparse.reduction.straggler_policy import SLOW_RANK
from megatron_sparse.run.composition import compose
from megatron_sparse.run.rows import CellRow, cell, print_table

PRESET = "preset="


@dataclass(frozen=True)
class Variant:
    """The configuration of one row.

    Attributes:
        scheme: `plain`, one of the plugin's schemes, or `preset=NAME`.
        density: 1 for schemes that send all elements; of a preset its `given_density`.
        parameters: `parameters.method`; None for `plain`.
        level: `compression.level`.
    """

    scheme: str
    density: float
    parameters: str | None
    level: str = RANK

    @property
    def run_name(self) -> str:
        """The name of the run's folder and log."""
        gathered = "" if self.parameters in (None, "auto") else f"_{self.parameters}"
        level = "" if self.level == RANK else f"_{self.level}"
        return f"{self.scheme.removeprefix(PRESET)}_{self.density:g}{gathered}{level}"


@dataclass
class TrainingRow(CellRow):
    """One run; times are milliseconds. What only the plugin measures is null for `plain`."""

    op: str = cell("`training`")
    scheme: str = cell("`plain`, the plugin's, or `preset=NAME`", ">20")
    density: float = cell("of the schemes that compress; 1 for the others", ">8g")
    level: str = cell("`compression.level`", ">8")
    parameters: str | None = cell("`parameters.method`; null for `plain`", ">7 params")
    world_size: int = cell("ranks")
    slow_ms: float = cell("how long the slow rank sleeps in an iteration; 0 if no rank is slow")
    mbit: int | None = cell("rate of the test bed's slow links; null over loopback")
    delay_ms: int = cell("their round trip")
    sites: int = cell("1, or 2 that one slow link joins")
    iteration_ms: float = cell("median", ">13.1f iteration(ms)")
    slowest_ms: float = cell("the slowest iteration that counts", ">9.1f slowest")
    exposed_ms: float | None = cell(
        "of the median iteration, spent waiting for gradients", ">11.1f exposed(ms)"
    )
    host_cpu_us: float | None = cell(
        "of the processor, spent by the progress thread for each bucket: codecs included, since "
        "ranks have no GPU; the median iteration's",
        ">8.0f cpu(us)",
    )
    wire_bytes: float | None = cell(
        "of gradients, sent by the last rank in an iteration", ">11.0f wire(B)"
    )
    inside_bytes: float | None = cell(
        "those of them that stayed on the rank's node, at level `node`", ">11.0f inside(B)"
    )
    dense_bytes: float | None = cell("that a dense ring would send", ">11.0f dense(B)")
    param_exposed_ms: float | None = cell(
        "of the median iteration, spent waiting for gathered parameters; 0 without the "
        "distributed optimizer",
        ">12.1f params exp.",
    )
    param_wire_bytes: float | None = cell(
        "of parameters, sent by the last rank in an iteration", ">11.0f params wire"
    )
    param_dense_bytes: float | None = cell(
        "that a raw all-gather on a ring would send", ">12.0f params dense"
    )
    speedup: float = cell("over the first row", ">7.2f | losses >17 loss")
    loss_first: float = cell("of the first iteration")
    loss_last: float = cell("of the last one")
    foreign_load: float = cell("the share of the machine that other programs took meanwhile")

    @property
    def losses(self) -> str:
        """The first and the last one."""
        return f"{self.loss_first:>7.4f} -> {self.loss_last:.4f}"


def run(options: TrainingOptions, json_path: Path | None = None) -> list[TrainingRow]:
    """Trains, prints the table and returns its rows.

    `json_path` gets one JSON object a line; None writes none.

    Raises:
        ConfigError: an override is wrong, or a file cannot be written.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = {variant: run_of(options, variant) for variant in variants(options)}
    where = f"test bed, {options.links}" if options.links else "loopback"
    slow = ""
    if options.slow_rank is not None:
        slow = f", rank {options.slow_rank} sleeps {options.slow_ms:g} ms an iteration"
    # The preset `auto` first trains some iterations with several settings.
    trials = " after the trials of auto" if "auto" in (options.presets or ()) else ""
    measured = f"{options.warmup} + {options.iters} iterations{trials}, medians"
    begin(list(runs.values()), f"{options.ranks} ranks, gloo, {where}, {measured}{slow}")
    return print_table(_rows(options, runs), json_path)


def variants(options: TrainingOptions) -> Iterator[Variant]:
    """Yields variants: each scheme with all densities, methods and levels it has; then presets."""
    for scheme in options.schemes:
        # Dense schemes (`straggler` is one) have density 1, and level `rank` only.
        dense = scheme in (PLAIN, "straggler") or scheme.startswith("dense")
        for density in [1.0] if dense else options.densities:
            if scheme == PLAIN:
                yield Variant(scheme, density, None)  # without the plugin: no method, no level
                continue
            for parameters, level in product(options.methods, options.levels):
                if level == RANK or not dense:
                    yield Variant(scheme, density, parameters, level)
    for name, parameters, level in product(options.presets or (), options.methods, options.levels):
        compression = SparseConfig.preset(name).compression
        density = compression.given_density if compression.enabled else 1.0
        yield Variant(f"{PRESET}{name}", density, parameters, level)


def run_of(options: TrainingOptions, variant: Variant) -> Run:
    """Makes the run that measures one variant."""
    arguments = [
        "experiment=testbed",
        *_compression(variant),
        f"compression.level={variant.level}",
        f"cluster.nodes={options.nodes}",
        f"cluster.ranks_per_node={options.ranks // options.nodes}",
        "cluster.device=cpu",
        f"training.global_batch_size={options.ranks}",
        *_slow_rank(options, variant.scheme),
        *options.overrides,
    ]
    # The preset `auto` first takes iterations for its trials; they are not timed.
    trials = steps_of_trials(compose(arguments).compression)
    arguments.append(f"training.iterations={trials + options.warmup + options.iters}")
    return Run(
        "training",
        variant.run_name,
        arguments,
        options.out,
        links=options.links,
        validates=False,
        untimed=trials + options.warmup,
    )


def _compression(variant: Variant) -> list[str]:
    """Returns a variant's overrides of `train` for scheme, density and gathers of parameters."""
    parameters = variant.parameters
    # `auto` is the default of `parameters.method`.
    gather = [] if parameters in (None, "auto") else [f"parameters.method={parameters}"]
    if variant.scheme == PLAIN:
        return ["plugin=false", *gather]
    if variant.scheme.startswith(PRESET):
        return [variant.scheme, *gather]
    return [f"scheme={variant.scheme}", f"compression.density={variant.density:g}", *gather]


def _slow_rank(options: TrainingOptions, scheme: str) -> list[str]:
    """Returns overrides by which a rank sleeps in each iteration and a scheme that can skips it."""
    if options.slow_rank is None:
        return []
    sleeps = f"cluster.env.{SLOW_RANK}={options.slow_rank}:{options.slow_ms:g}"
    if not skips_straggler(scheme):
        return [sleeps]
    return [sleeps, "straggler.mode=pinned", f"straggler.rank={options.slow_rank}"]


def _rows(options: TrainingOptions, runs: dict[Variant, Run]) -> Iterator[TrainingRow]:
    """Trains one run after another, and yields the row of each once it has ended."""
    first_ms = None  # of the first row, which the others are compared with
    for variant, run in runs.items():
        outcome = run.train()
        # The iterations after the warm-up and the trials of `auto`.
        times_ms = outcome.iteration_ms[-options.iters :]
        middle_ms = median(times_ms)
        first_ms = first_ms or middle_ms
        breakdown = [] if variant.scheme == PLAIN else outcome.breakdown(options.iters)
        yield TrainingRow(
            op="training",
            **vars(variant),  # scheme, density, parameters and level
            world_size=options.ranks,
            slow_ms=options.slow_ms if options.slow_rank is not None else 0.0,
            **run.where,
            iteration_ms=middle_ms,
            slowest_ms=max(times_ms),
            loss_first=outcome.losses[0],
            loss_last=outcome.losses[-1],
            speedup=first_ms / middle_ms,
            foreign_load=outcome.foreign_load,
            **_measured(breakdown),
        )


def _measured(iterations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row's figures that the plugin records, as medians; all None for `plain`."""
    sizes = ("wire_bytes", "inside_bytes", "dense_bytes", "param_wire_bytes", "param_dense_bytes")
    stages = {"exposed_ms": "host_wait", "param_exposed_ms": "param_wait"}
    if not iterations:
        return dict.fromkeys((*sizes, *stages, "host_cpu_us"))
    found = {name: median(each[name] for each in iterations) for name in sizes}
    for name, stage in stages.items():
        found[name] = median(each["stage_ms"][stage] for each in iterations)
    # Microseconds a bucket: `schemes` counts an iteration's buckets by scheme.
    found["host_cpu_us"] = median(
        1e3 * each["host_cpu_ms"] / sum(each["schemes"].values()) for each in iterations
    )
    return found
