"""The options of benches that train whole runs; `cli.bench` lists them as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.bench.options import parse_densities, parse_list
from megatron_sparse.cli.outputs import JsonFile, figures_folder, writable_folder


def training(
    context: typer.Context,
    scheme: Annotated[
        str, typer.Option(metavar="NAME,...", help="plain: Megatron without the plugin.")
    ] = "plain,direct",
    density: Annotated[str, typer.Option(metavar="D,...", help="Fractions sent.")] = "0.01",
    parameters: Annotated[
        str, typer.Option(metavar="METHOD,...", help="Values of parameters.method.")
    ] = "auto",
    level: Annotated[
        str, typer.Option(metavar="LEVEL,...", help="Values of compression.level.")
    ] = "rank",
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="On each host of --netbed.")] = 1,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[int | None, typer.Option(min=1, help="Rate of the test bed's links.")] = None,
    iters: Annotated[int, typer.Option(min=1, help="Iterations that are timed.")] = 12,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations that are not.")] = 3,
    slow_rank: Annotated[
        int | None, typer.Option(min=0, help="Sleeps in every backward pass.")
    ] = None,
    slow_ms: Annotated[float, typer.Option(min=0, help="For so long.")] = 300.0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", callback=writable_folder, help="For the runs' folders.")
    ] = Path("runs/bench_training"),
    json: JsonFile = None,
) -> None:
    """More arguments are overrides of `train`. See docs/testbed.md."""
    from megatron_sparse.bench import training as runner
    from megatron_sparse.run import local_ranks

    local_ranks.check_place(netbed=netbed, virtual=False, mbit=mbit, ranks=None, started=None)
    setting = runner.Setting(
        schemes=scheme.split(","),
        densities=parse_densities("--density", density),
        parameters=parameters.split(","),
        ranks=ranks,
        mbit=mbit if netbed else None,
        warmup=warmup,
        iters=iters,
        overrides=context.args,
        slow_rank=slow_rank,
        slow_ms=slow_ms,
        levels=level.split(","),
        ranks_per_node=ranks_per_node,
    )
    runner.run(setting, out, json)


def time_to_loss(
    context: typer.Context,
    setting: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of docs/results/time-to-loss.md, or all.")
    ] = "all",
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[
        str | None, typer.Option(metavar="R,...", help="Rates of the test bed's links.")
    ] = None,
    iters: Annotated[int, typer.Option(help="Iterations of plain Megatron.")] = 200,
    batch: Annotated[int, typer.Option(help="Sequences of a rank in an iteration.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights and samples.")] = 1,
    out: Annotated[
        Path, typer.Option(metavar="DIR", callback=writable_folder, help="For the runs' folders.")
    ] = Path("runs/time_to_loss"),
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=figures_folder, help="Write the picture and its CSV here."
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """More arguments are overrides of `train`. A finished run is not repeated."""
    from megatron_sparse.bench.time_to_loss import command as runner
    from megatron_sparse.bench.time_to_loss import report as reporter
    from megatron_sparse.bench.time_to_loss.settings import BY_NAME, Race
    from megatron_sparse.run import local_ranks

    rates = parse_list("--mbit", mbit, int, "whole numbers with commas between") if mbit else ()
    local_ranks.check_place(
        netbed=netbed, virtual=False, mbit=min(rates, default=None), ranks=None, started=None
    )
    race = Race(
        settings=list(BY_NAME) if setting == "all" else setting.split(","),
        ranks=ranks,
        mbits=rates if netbed else (None,),
        iters=iters,
        batch=batch,
        seed=seed,
        out=out,
        overrides=context.args,
    )
    reporter.report(runner.run(race), figures, json)


def convergence(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="NAME,...", help="gpt | starcoder")] = (
        "gpt,starcoder"
    ),
    setting: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="all, or of docs/results/convergence.md."),
    ] = "all",
    seeds: Annotated[str, typer.Option(metavar="N,...", help="Each trains every setting.")] = "1,2",
    iters: Annotated[int, typer.Option(help="Iterations of each run.")] = 1500,
    ranks: Annotated[int, typer.Option(help="Ranks of each run; they share the batch.")] = 2,
    out: Annotated[
        Path, typer.Option(metavar="DIR", callback=writable_folder, help="For the runs' folders.")
    ] = Path("runs/convergence"),
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=figures_folder, help="Write pictures and their CSV here."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Train nothing: report the finished runs.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """More arguments are overrides of `train`. A finished run is not repeated."""
    from megatron_sparse.bench.convergence import command as runner
    from megatron_sparse.bench.convergence import report as reporter
    from megatron_sparse.bench.convergence.settings import BY_NAME, Study

    study = Study(
        models=model.split(","),
        settings=list(BY_NAME) if setting == "all" else setting.split(","),
        seeds=parse_list("--seeds", seeds, int, "seeds: whole numbers with commas between"),
        iters=iters,
        out=out,
        overrides=context.args,
        ranks=ranks,
    )
    results = runner.found(study) if report else runner.run(study)
    reporter.report(results, figures, json)
