"""The commands `megatron-sparse bench ...`.

They import what they need when they run, as those that `cli.main` lists.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.bench.codec.options import (
    BitsSweep,
    CodecSweep,
    DensitySweep,
    ParameterSweep,
    PruneSweep,
)
from megatron_sparse.bench.exchange.options import (
    BucketSweep,
    CollectiveSweep,
    GatherSweep,
    LinkPlace,
    NodePlace,
    PlannerOptions,
    RowSparseSweep,
    StragglerSweep,
)
from megatron_sparse.bench.options import command
from megatron_sparse.bench.study.options import ConvergenceOptions, RaceOptions, TrainingOptions
from megatron_sparse.cli.outputs import JsonFile, figures_folder, writable_file, writable_folder
from megatron_sparse.cli.renamed import answer_for_renamed

bench = typer.Typer(help="Measures one part on this machine.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Overrides of `train`.")
]
RunsFolder = Annotated[
    Path, typer.Option(metavar="DIR", callback=writable_folder, help="For the runs' folders.")
]
Figures = Annotated[
    Path | None,
    typer.Option(metavar="DIR", callback=figures_folder, help="Write pictures and their CSV here."),
]


@command(bench, "Selection from a gradient: threshold, error feedback, pruning, encoding.")
def prune(sweep: PruneSweep, json: JsonFile = None) -> None:
    """Exits with 1 when a row is wrong."""
    from megatron_sparse.bench.codec import prune as runner

    rows = runner.run(sweep, json)
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


@command(bench, "The density that is sent against the one asked for, for many distributions.")
def density(sweep: DensitySweep, json: JsonFile = None) -> None:
    """Exits with 1 when a row misses its target: see docs/compression.md."""
    from megatron_sparse.bench.codec import density as runner

    rows = runner.run(sweep, json)
    raise typer.Exit(1 if any(row.off for row in rows) else 0)


@command(bench, "The coders of parameters' moves: bits and speed, against zstd, lz4 and raw.")
def parameters(sweep: ParameterSweep, json: JsonFile = None) -> None:
    """Exits with 1 when a number comes out wrong: see docs/parameters.md."""
    from megatron_sparse.bench.codec import parameters as runner

    rows = runner.run(sweep, json)
    raise typer.Exit(1 if any(row.wrong for row in rows) else 0)


@command(bench, "The all-gather of updated parameters, raw and exact, with their bits compared.")
def gather(sweep: GatherSweep, place: NodePlace, json: JsonFile = None) -> None:
    """Exits with 1 when a bit comes out wrong: see docs/parameter-gather.md."""
    from megatron_sparse.bench.exchange.frame import run
    from megatron_sparse.bench.exchange.gather import GatherBench

    raise typer.Exit(run(GatherBench, sweep, place, json))


@command(bench, "Row-sparse all-reduce beside torch's sparse and dense ones; see docs/ddp.md.")
def row_sparse(sweep: RowSparseSweep, place: LinkPlace, json: JsonFile = None) -> None:
    """Exits with 1 when a sum is wrong."""
    from megatron_sparse.bench.exchange.frame import run
    from megatron_sparse.bench.exchange.row_sparse import RowSparseBench

    raise typer.Exit(run(RowSparseBench, sweep, place, json))


@bench.command(help="The plugin's own cost: dense through it against Megatron alone, in pairs.")
def overhead(
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Pairs that are not timed.")] = 3,
    iters: Annotated[int, typer.Option(min=2, help="Pairs that are timed.")] = 20,
    json: JsonFile = None,
) -> None:
    """Exits with the ranks' code."""
    from megatron_sparse.bench.study import overhead as runner

    raise typer.Exit(runner.run(ranks, warmup, iters, json))


@command(bench, "The message codec: selection with encoding, encoding, adding up.")
def codecs(
    sweep: CodecSweep,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fail where slower than this baseline.")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="Times its noise that --check allows.")
    ] = 1.0,
    save_baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=writable_file(),
            help="Measure three times and write a baseline.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours from `min_bytes` to `max_bytes`."""
    from megatron_sparse.bench.codec import codecs as runner

    runner.run(sweep, json, check, margin, save_baseline)


@command(bench, "Bits an entry by density and format against the entropy; errors of few bits.")
def bits(sweep: BitsSweep, json: JsonFile = None) -> None:
    """Exits with 1 where positions take too many bits: see docs/wire-format.md."""
    from megatron_sparse.bench.codec import bits as runner

    rows, _ = runner.run(sweep, json)
    raise typer.Exit(1 if any(row.off for row in rows) else 0)


@command(bench, "One bucket on this device, without a network: time, waits, overlap.")
def bucket(sweep: BucketSweep, json: JsonFile = None) -> None:
    """Exits with 1 when a row is wrong. See docs/reading-the-breakdown.md."""
    from megatron_sparse.bench.exchange import bucket as runner
    from megatron_sparse.bench.exchange import stub_nccl

    if sweep.stub_nccl:
        stub_nccl.run(sweep, json)
        return
    rows = runner.run(sweep, json)
    raise typer.Exit(1 if any(row.wrong for row in rows) else 0)


@command(bench, "Collectives, dense gradient to dense sum, beside the backend's dense one.")
def collectives(sweep: CollectiveSweep, place: NodePlace, json: JsonFile = None) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong. See docs/testbed.md."""
    from megatron_sparse.bench.exchange.collectives import CollectiveBench
    from megatron_sparse.bench.exchange.frame import run

    raise typer.Exit(run(CollectiveBench, sweep, place, json))


@command(bench, "Time from the last rank's arrival to the end, scheme by scheme.")
def stragglers(
    sweep: StragglerSweep,
    place: LinkPlace,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=figures_folder, help="Draw the rows as StragglAR's figure 5."
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong. See docs/stragglers.md."""
    from megatron_sparse.bench.exchange.frame import run
    from megatron_sparse.bench.exchange.stragglers import StragglerBench

    raise typer.Exit(run(StragglerBench, replace(sweep, figure=figure), place, json))


@command(bench, "Iterations of a small Megatron GPT: plain Megatron beside compressed gradients.")
def training(
    options: TrainingOptions,
    overrides: Overrides = None,
    output: RunsFolder = Path("runs/bench_training"),
    json: JsonFile = None,
) -> None:
    """See docs/testbed.md."""
    from megatron_sparse.bench.study import training as runner

    runner.run(options.given(output, overrides), json)


@command(bench, "Seconds of training until a small GPT reaches plain Megatron's losses.")
def time_to_loss(
    options: RaceOptions,
    overrides: Overrides = None,
    output: RunsFolder = Path("runs/time_to_loss"),
    figures: Figures = None,
    json: JsonFile = None,
) -> None:
    """A finished run is not repeated. See docs/results/time-to-loss.md."""
    from megatron_sparse.bench.study import time_to_loss as runner

    runner.run(options.given(output, overrides), figures, json)


@command(bench, "Final validation loss of small models, compressed beside dense.")
def convergence(
    options: ConvergenceOptions,
    overrides: Overrides = None,
    output: RunsFolder = Path("runs/convergence"),
    figures: Figures = None,
    report: Annotated[
        bool, typer.Option("--report", help="Train nothing: report the finished runs.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """A finished run is not repeated. See docs/results/convergence.md."""
    from megatron_sparse.bench.study import convergence as runner

    runner.run(options.given(output, overrides), figures, json, trains=not report)


@command(bench, "Compare the planner's choice with the best of all schemes.")
def planner(options: PlannerOptions, json: JsonFile = None) -> None:
    """Exits with 1 when the planner is worse than it claims. See docs/planner.md."""
    from megatron_sparse.bench.exchange import planner as runner

    raise typer.Exit(runner.run(options, json))


answer_for_renamed(bench, "bench")
