"""The commands `megatron-sparse bench ...`.

They import what they need when they run, as those that `cli.main` lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.bench.bucket.sweep import BucketSweep
from megatron_sparse.bench.codec.options import (
    BitsSweep,
    CodecSweep,
    DensitySweep,
    ParameterSweep,
    PruneSweep,
)
from megatron_sparse.bench.collectives.sweep import NodePlace, Sweep
from megatron_sparse.bench.gather.sweep import GatherSweep
from megatron_sparse.bench.node.sweep import NodeSweep
from megatron_sparse.bench.options import (
    command,
    parse_counts,
    parse_densities,
    parse_size,
)
from megatron_sparse.bench.peer.options import PeerOptions
from megatron_sparse.bench.planner.options import PlannerOptions
from megatron_sparse.bench.stragglers.sweep import LinkPlace, StragglerSweep
from megatron_sparse.bench.study.options import ConvergenceOptions, RaceOptions, TrainingOptions
from megatron_sparse.cli.outputs import JsonFile, figures_folder, writable_file, writable_folder

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
    from importlib import import_module

    raise typer.Exit(import_module("megatron_sparse.bench.gather.command").run(sweep, place, json))


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


@bench.command(help="What a bucket costs the host with NCCL, posts that go nowhere; no GPU needed.")
def host(
    ranks: Annotated[
        str, typer.Option(metavar="N,...", help="Sizes of the group; this process is rank 0.")
    ] = "2,8,16",
    scheme: Annotated[
        str, typer.Option(metavar="NAME,...", help="With messages of fixed size, or all of them.")
    ] = "dense,agsparse,direct",
    capacity: Annotated[float, typer.Option(help="scheme.capacity")] = 1.25,
    warmup: Annotated[int, typer.Option(min=0, help="Buckets that are not timed.")] = 30,
    iters: Annotated[int, typer.Option(min=1, help="Buckets that are timed.")] = 200,
    nccl_engine: Annotated[
        bool, typer.Option(help="With scheme.nccl_engine too, where a scheme has it.")
    ] = True,
    json: JsonFile = None,
) -> None:
    """See docs/reading-the-breakdown.md."""
    from megatron_sparse.bench import host as runner

    schemes = runner.SCHEMES if scheme == "all" else scheme.split(",")
    sizes = parse_counts("--ranks", ranks)
    sweep = runner.HostSweep(sizes, schemes, capacity, warmup, iters, nccl_engine)
    runner.run(sweep, json)


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
    from megatron_sparse.bench.bucket import command as runner

    rows = runner.run(sweep, json)
    raise typer.Exit(1 if any(row.wrong for row in rows) else 0)


@command(bench, "The two-shot all-reduce over peer memory, on virtual ranks of one GPU.")
def peer(options: PeerOptions, json: JsonFile = None) -> None:
    """Exits with 1 where a row is wrong. See docs/peer-memory.md."""
    import torch

    from megatron_sparse.bench.peer import command as runner

    rows = runner.run(options, json, torch.device("cuda"))
    raise typer.Exit(1 if any(row.wrong for row in rows) else 0)


@command(bench, "Messages and sums between this host's ranks: shared memory beside gloo.")
def node(
    sweep: NodeSweep,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="4, or as many as a launcher has started.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Exits with 1 when a row is wrong: see docs/collectives.md."""
    from megatron_sparse.bench.node import command as runner

    raise typer.Exit(runner.run(sweep, ranks, json))


@command(bench, "Collectives, dense gradient to dense sum, beside the backend's dense one.")
def collectives(sweep: Sweep, place: NodePlace, json: JsonFile = None) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong. See docs/testbed.md."""
    from megatron_sparse.bench.collectives import command as runner

    raise typer.Exit(runner.run(sweep, place, json))


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
    from megatron_sparse.bench.stragglers import command as runner

    raise typer.Exit(runner.run(sweep, place, json, figure))


@command(bench, "Iterations of a small Megatron GPT: plain Megatron beside compressed gradients.")
def training(
    options: TrainingOptions,
    overrides: Overrides = None,
    out: RunsFolder = Path("runs/bench_training"),
    json: JsonFile = None,
) -> None:
    """See docs/testbed.md."""
    from megatron_sparse.bench.study import training as runner

    runner.run(options.given(out, overrides), json)


@command(bench, "Seconds of training until a small GPT reaches plain Megatron's losses.")
def time_to_loss(
    options: RaceOptions,
    overrides: Overrides = None,
    out: RunsFolder = Path("runs/time_to_loss"),
    figures: Figures = None,
    json: JsonFile = None,
) -> None:
    """A finished run is not repeated. See docs/results/time-to-loss.md."""
    from megatron_sparse.bench.study import time_to_loss as runner

    runner.run(options.given(out, overrides), figures, json)


@command(bench, "Final validation loss of small models, compressed beside dense.")
def convergence(
    options: ConvergenceOptions,
    overrides: Overrides = None,
    out: RunsFolder = Path("runs/convergence"),
    figures: Figures = None,
    report: Annotated[
        bool, typer.Option("--report", help="Train nothing: report the finished runs.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """A finished run is not repeated. See docs/results/convergence.md."""
    from megatron_sparse.bench.study import convergence as runner

    runner.run(options.given(out, overrides), figures, json, trains=not report)


@bench.command("cost-models", help="What the cost models predict, beside what collectives take.")
def cost_models(
    scheme: Annotated[str, typer.Option(metavar="NAME,...", help="Of docs, or all.")] = "all",
    kind: Annotated[
        str, typer.Option(metavar="KIND,...", help="Gradients: of docs/cost-models.md.")
    ] = "uniform,skewed,overlapping,disjoint,embedding",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Fractions of a rank's gradient.")
    ] = "0.001,0.01,0.1,0.5",
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Virtual ranks.")] = "2,4,8,16,32,64",
    cluster: Annotated[
        str, typer.Option(metavar="NAME,...", help="Model clusters; with --measured a file.")
    ] = "ethernet_25gbit,ethernet_100gbit,perlmutter",
    op: Annotated[str, typer.Option(help="all_reduce | reduce_scatter")] = "all_reduce",
    level: Annotated[str, typer.Option(help="rank | node: the sums that selection sees.")] = "rank",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the fp32 bucket.")] = "64M",
    measured: Annotated[
        Path | None,
        typer.Option(metavar="ROWS", help="Compare with these rows of `bench collectives`."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """See docs/cost-models.md."""
    from megatron_sparse.bench.cost_models import command as runner
    from megatron_sparse.bucket import CollectiveOp
    from megatron_sparse.collectives import over_groups
    from megatron_sparse.config.checks import one_of
    from megatron_sparse.pricing.cluster import find

    one_of("--op", op, tuple(map(str, CollectiveOp)))
    if measured is not None:
        runner.report(runner.measured_rows(measured, find(cluster)), json)
        return
    sweep = runner.CostSweep(
        schemes=list(over_groups()) if scheme == "all" else scheme.split(","),
        kinds=kind.split(","),
        densities=parse_densities("--density", density),
        world_sizes=parse_counts("--ranks", ranks),
        clusters=cluster.split(","),
        op=CollectiveOp(op),
        full_numel=parse_size("--size", size) // 4,
        level=level,
    )
    runner.report(sweep.rows(), json)


@command(bench, "Compare the planner's choice with the best of all schemes.")
def planner(options: PlannerOptions, json: JsonFile = None) -> None:
    """Exits with 1 when the planner is worse than it claims. See docs/planner.md."""
    from megatron_sparse.bench.planner import start

    raise typer.Exit(start.run(options, json))
