"""Commands that measure and plan: options, checks and calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.bench.exchange.options import CalibrationOptions, CalibrationPlace
from megatron_sparse.bench.options import parse_counts, parse_size
from megatron_sparse.cli.outputs import JsonFile, writable_file, writable_folder
from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require_figures, require_fits

Schemes = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Candidate schemes; default: all.")
]


def profile(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder with gradients/ in it, or gradients/ itself."
        ),
    ],
    kind: Annotated[
        str | None, typer.Option(help="gradient | selected; default: selected, if it was recorded.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Prints density, overlap of ranks and skewness, as ZEN defines them, of recorded gradients.

    See docs/profiling.md.
    """
    from megatron_sparse.report import profile as profile_report
    from megatron_sparse.run.rows import write_rows

    write_rows(json, profile_report.run(recording, kind))


def calibrate(
    options: CalibrationOptions,
    place: CalibrationPlace,
    output: Annotated[
        Path,
        typer.Option(metavar="FILE", callback=writable_file(makes_folder=True), help="Output."),
    ] = Path("cluster.yaml"),
) -> None:
    """Measures this cluster's links and codecs, and writes its cost model into `output`.

    Ranks start as for `bench collectives`. Exits with the runner's code. See docs/calibration.md.
    """
    from megatron_sparse.bench.calibrate import command as runner

    raise typer.Exit(runner.run(replace(options, out=output), place))


def plan(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder, or its plan.json.")
    ] = None,
    bucket_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Fp32 buckets of these sizes, such as 1M,64M."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks in the group; default: the run's.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File of `calibrate`, or a shipped model's name."),
    ] = None,
    density: Annotated[
        float, typer.Option(min=1e-9, max=1, help="Density of the gradients, with --bucket-bytes.")
    ] = 0.01,
    value_bits: Annotated[
        int | None,
        typer.Option(help="Values in 8, 4, 3 or 2 bits; default: the run's, else not quantised."),
    ] = None,
    schemes: Schemes = None,
    op: Annotated[
        str, typer.Option(help="Of --bucket-bytes: all_reduce | reduce_scatter")
    ] = "all_reduce",
    json: JsonFile = None,
) -> None:
    """Prints each scheme's predicted time for the buckets of a run, or for `bucket_bytes`.

    Times come from a cost model. See docs/planner.md.
    """
    from megatron_sparse.bucket import CollectiveOp
    from megatron_sparse.collectives.registry import check_op
    from megatron_sparse.config.checks import one_of
    from megatron_sparse.config.compression import VALUE_BITS
    from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig
    from megatron_sparse.planner import plan_rows
    from megatron_sparse.planner.plan_rows import print_plan
    from megatron_sparse.pricing.cluster import find
    from megatron_sparse.run.rows import write_rows

    one_of("--op", op, tuple(CollectiveOp))
    if value_bits is not None:
        one_of("--value-bits", value_bits, VALUE_BITS)
    candidates = _candidates(schemes)
    # The default `SchemeConfig` has the name `auto`, so the check looks at the candidates.
    check_op(SchemeConfig(), PlannerConfig(schemes=candidates), CollectiveOp(op))
    sizes = None
    if bucket_bytes is not None:
        sizes = [parse_size("--bucket-bytes", size) for size in bucket_bytes.split(",")]
    pricing = None  # without a cost model the times are those in the run's plan.json
    if cluster is not None:
        pricing = plan_rows.Pricing(find(cluster), candidates, value_bits=value_bits)
    rows = plan_rows.rows(
        run=run,
        sizes=sizes,
        ranks=ranks,
        anew=candidates is not None or value_bits is not None,  # both need new times
        pricing=pricing,
        density=density,
        op=CollectiveOp(op),
    )
    print_plan(rows)
    write_rows(json, rows)


def _candidates(schemes: str | None) -> list[str] | None:
    """Splits `--schemes` at commas, and refuses unknown names. None: all schemes."""
    from megatron_sparse.collectives.registry import check_names
    from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig

    names = None if schemes is None else schemes.split(",")
    check_names(SchemeConfig(), PlannerConfig(schemes=names))
    return names


def levels(
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A shipped model, or a file of `calibrate`.")
    ] = "ethernet_25gbit_8",
    ranks: Annotated[
        str, typer.Option(metavar="N,...", help="Data-parallel ranks.")
    ] = "2,4,8,16,32,64,128,256",
    preset: Annotated[
        str, typer.Option(metavar="NAME,...", help="Settings, at their target density.")
    ] = "safe,balanced",
    parameters: Annotated[
        float, typer.Option(metavar="N", help="Number of the model's parameters on one rank.")
    ] = 1.5e9,
    gradients: Annotated[str, typer.Option(help="fp32 | bf16")] = "fp32",
    move_bits: Annotated[
        float, typer.Option(metavar="BITS", help="Bits of a parameter sent in the exact gather.")
    ] = 2.5,
    sharded: Annotated[
        bool, typer.Option("--sharded/--replicated", help="Distributed optimizer, or all-reduce.")
    ] = True,
    instances: Annotated[
        int, typer.Option(min=1, help="Of the distributed optimizer: level instance has rows.")
    ] = 1,
    schemes: Schemes = None,
    json: JsonFile = None,
) -> None:
    """Prints the predicted time of one step's communication by ranks, preset and level.

    A level is where gradients are compressed: at each rank, node or instance. See docs/levels.md.
    """
    from megatron_sparse.config.checks import in_range, one_of
    from megatron_sparse.config.sparse import SparseConfig
    from megatron_sparse.pricing.cluster import find
    from megatron_sparse.simulate.levels import Training, level_rows, print_levels

    one_of("--gradients", gradients, ("fp32", "bf16"))
    in_range("--parameters", parameters, 1, 2**40)  # first: `round` raises on infinity
    candidates = _candidates(schemes)
    numel, gradient_bytes = round(parameters), 4 if gradients == "fp32" else 2
    training = Training(numel, gradient_bytes, sharded, move_bits, instances)
    settings = {name: SparseConfig.preset(name) for name in preset.split(",")}
    rank_counts = parse_counts("--ranks", ranks, 2)
    rows = list(level_rows(training, find(cluster), settings, rank_counts, candidates))
    print_levels(rows, training, json)


def simulate(
    paper: Annotated[str | None, typer.Option(help="spccl | zen | pccl | stragglar")] = None,
    figure: Annotated[int | None, typer.Option(help="The figure's number in the paper.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Draw all figures of all papers.")] = False,
    output: Annotated[
        Path, typer.Option(metavar="DIR", callback=writable_folder, help="Folder for PNG and CSV.")
    ] = Path("figures"),
    fast: Annotated[bool, typer.Option("--fast", help="Use a much smaller sweep.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List the figures.")] = False,
) -> None:
    """Draws figures of the papers and prints their files; with --list it only lists figures."""
    from megatron_sparse import simulate as figures

    if paper is None and not every and not list_only:
        raise ConfigError(
            "simulate: no figure is chosen",
            expected="--paper, --all or --list",
            got="none of them",
            remedy="megatron-sparse simulate --list shows which figures there are",
        )
    chosen_figures = figures.select(paper, figure)
    if not list_only:
        require_figures()
        # ZEN's figures need scipy, which fits synthetic gradients to the paper's numbers.
        if any(chosen.paper == "zen" for chosen in chosen_figures):
            require_fits()
    for chosen in chosen_figures:
        if list_only:
            print(f"--paper {chosen.paper} --figure {chosen.number}: {chosen.title}")
            continue
        for path in chosen.make(output, fast=fast):
            print(path, flush=True)
