"""The command line `megatron-sparse`.

Commands import what they need when they run, so that `--help` answers at once. A typed error of any
command ends here: its message on stderr, its exit code, no traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.bench import JsonFile, bench, parse_densities, parse_size
from megatron_sparse.cli.bench_convergence import convergence
from megatron_sparse.cli.bench_planner import planner
from megatron_sparse.cli.bench_stragglers import stragglers
from megatron_sparse.config.redaction import redact_text
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.version import __version__

app = typer.Typer(
    help="Gradient compression for Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench.command(help="What is left to do when the last rank arrives, scheme by scheme.")(stragglers)
bench.command(help="The planner's choice beside the best of all schemes.")(planner)
bench.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Final validation loss of small models, compressed beside dense.",
)(convergence)
app.add_typer(bench, name="bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    try:
        app(None if arguments is None else list(arguments), prog_name="megatron-sparse")
    except MegatronSparseError as error:
        # The message may quote the command line, and the log of a job keeps it.
        print(f"error: {redact_text(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megatron_sparse {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # Eager: answered before a missing command is complained about.
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    help="Train a model; `train --help` shows groups, options and every key.",
)
def train(context: typer.Context) -> None:
    """Hands everything to Hydra."""
    from megatron_sparse.run import application

    application.train(context.args)


@app.command(help="Say what this machine has of all that can be used, and what is missing.")
def doctor(
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Look at the ranks of a job and their links.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Start so many here; else those of srun, torchrun.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Set the variables of configs/cluster/NAME.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that ranks may take to answer.")] = 60,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    json: JsonFile = None,
) -> None:
    """Exits with 1 when a part is missing that training needs. See docs/slurm.md for a job's."""
    from megatron_sparse.doctor import checks as report
    from megatron_sparse.doctor import distributed as job

    if distributed:
        raise typer.Exit(job.run(job.Request(ranks, cluster, timeout, strict, json)))
    if ranks is not None or cluster is not None or strict:
        raise ConfigError(
            "--ranks, --cluster and --strict are for a job's ranks",
            expected="--distributed with them",
            got="none",
            remedy="add --distributed",
        )
    raise typer.Exit(report.run(json))


@app.command(help="All runs of a sweep in one table.")
def sweep(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The runs_dir of the sweep.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="The table.")] = None,
    json: JsonFile = None,
) -> None:
    """For `train --multirun`. See docs/slurm.md."""
    from megatron_sparse.run import sweep as runs

    runs.report(folder, csv, json)


@app.command(help="Make a training corpus from what is installed.")
def corpus(
    kind: Annotated[str, typer.Option(help="code | prose")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="For example data/code.")],
    vocab_size: Annotated[int, typer.Option(help="Token ids, end of document included.")] = 8192,
) -> None:
    """Prints what was made."""
    from megatron_sparse.megatron import corpus as maker

    made = maker.prepare(kind, out, vocab_size)  # type: ignore[arg-type] - checked there
    print(f"{out}: {made.n_documents} documents, {made.n_tokens} tokens of {made.vocab_size}")


@app.command(help="Rebuild the native libraries.")
def build(
    cuda: Annotated[str, typer.Option(help="auto | on | off")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Print every command.")] = False,
) -> None:
    """Exits with the build's code."""
    from importlib import import_module

    builder = import_module("megatron_sparse.cuda_ext.build")
    raise typer.Exit(builder.main(["--cuda", cuda, *(["--verbose"] if verbose else [])]))


@app.command(help="Measure the sparsity of recorded gradients: density, overlap, skewness.")
def profile(
    recording: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder with gradients/, or that folder.")
    ],
    kind: Annotated[
        str | None, typer.Option(help="gradient | selected; the latter by default, if recorded.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(metavar="D", help="Take each rank's largest gradients only.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw ZEN's figures: PNG and CSV.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """See docs/profiling.md."""
    from megatron_sparse.report import profile as profile_report
    from megatron_sparse.run.json_lines import write_rows

    write_rows(json, profile_report.run(recording, kind=kind, density=density, out=out))


@app.command(help="Measure links, codec and host of this cluster into a file for the planner.")
def calibrate(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="cluster.yaml; none for virtual ranks.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="2, or as many as a launcher has started.")
    ] = None,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[int | None, typer.Option(min=1, help="Rate of the test bed's links.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="On the test bed.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Less precise, in seconds.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Find adaptive_ring's thresholds, add them to FILE.")
    ] = False,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Sweep on virtual ranks: a model.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Of the virtual ranks.")
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="Of the sweep: coo, pici.")
    ] = "coo,pici",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bucket of the sweep.")] = "16M",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Gradients of the sweep.")
    ] = "0.05,0.2,0.4",
    timeout: Annotated[float, typer.Option(help="Seconds that an operation may take.")] = 120,
) -> None:
    """Ranks are those of `bench collectives`. See docs/calibration.md."""
    from megatron_sparse.calibration import command as runner

    request = runner.Request(
        out=out if out or virtual else Path("cluster.yaml"),
        quick=quick,
        force=force,
        formats=format.split(",") if sweep else [],
        size_bytes=parse_size("--size", size),
        densities=tuple(parse_densities(density)),
        timeout_s=timeout,
    )
    place = runner.Place(ranks, netbed, mbit, ranks_per_node, cluster if virtual else None)
    if virtual is not (cluster is not None) or (virtual and not sweep):
        raise ConfigError(
            "--virtual does not fit the rest",
            expected="--sweep --virtual --cluster NAME|FILE, or none of --virtual and --cluster",
            got=" ".join(
                flag
                for flag, is_set in (
                    ("--sweep", sweep),
                    ("--virtual", virtual),
                    ("--cluster", cluster is not None),
                )
                if is_set
            ),
            remedy="only thresholds can be found on virtual ranks",
        )
    raise typer.Exit(runner.run(request, place))


@app.command(help="Every scheme's predicted time for each bucket, and which one is chosen.")
def plan(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder, or its plan.json.")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A gradient dump: a run's folder, or its gradients/."),
    ] = None,
    bucket_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE,...", help="Fp32 buckets, such as 1M,64M.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the group; the run's by default.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of calibrate, or a shipped one's name.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(min=1e-9, max=1, help="Of sizes or gradients; 0.01 for sizes.")
    ] = None,
    schemes: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The candidates; all by default.")
    ] = None,
    op: Annotated[str, typer.Option(help="all_reduce | reduce_scatter")] = "all_reduce",
    json: JsonFile = None,
) -> None:
    """The times are those of a cost model. See docs/planner.md."""
    from megatron_sparse.bucket import CollectiveOp
    from megatron_sparse.config.checks import one_of
    from megatron_sparse.config.sparse import PlannerConfig
    from megatron_sparse.planner import plan_rows
    from megatron_sparse.planner.cluster import find
    from megatron_sparse.planner.plan_table import print_plan
    from megatron_sparse.run.json_lines import write_rows

    one_of("--op", op, tuple(CollectiveOp))
    names = PlannerConfig(schemes=None if schemes is None else schemes.split(",")).schemes
    sizes = None
    if bucket_bytes is not None:
        sizes = [parse_size("--bucket-bytes", size) for size in bucket_bytes.split(",")]
    rows = plan_rows.rows(
        run=run,
        dump=recording,
        sizes=sizes,
        ranks=ranks,
        pricing=None if cluster is None else plan_rows.Pricing(find(cluster), names),
        density=density,
        op=CollectiveOp(op),
    )
    print_plan(rows)
    write_rows(json, rows)


@app.command(help="Make, check and show a straggler-aware all-reduce's schedule.")
def schedule(
    ranks: Annotated[int, typer.Option(help="Of the group; at least 2.")],
    straggler: Annotated[
        int | None, typer.Option(help="Its rank; the last one by default.")
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Buffer of the cost table.")] = "64M",
    alpha_us: Annotated[float, typer.Option(min=0, help="Of a message, for the costs.")] = 10.0,
    gbit: Annotated[float, typer.Option(min=1e-6, help="Of a link, for the costs.")] = 25.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the schedule.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """The costs are those of the alpha-beta model, not measured."""
    from megatron_sparse.straggler import report
    from megatron_sparse.transport import Link

    link = Link(alpha_us * 1e-6, 8 / (gbit * 1e9))
    report.run(ranks, straggler, parse_size("--size", size), link, output, json)


@app.command("stragglers", help="Who came last in a run, how late, and whether again.")
def straggler_delays(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the delays' CDF.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="A line for each bucket and iteration.")
    ] = None,
) -> None:
    """For runs with straggler.mode=observe, persistent or dynamic."""
    from megatron_sparse.telemetry import straggler_report

    straggler_report.run(run, output, csv)


@app.command("report", help="One HTML page of a run, or of several side by side.")
def write_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE.html", help="The page; nothing beside it is needed.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every chart as PNG, too.")
    ] = None,
) -> None:
    """Prints the files that it wrote. A run may still be going on."""
    from megatron_sparse.report import page

    for path in page.run(runs, output, png):
        print(path)


@app.command(help="The live view of a run, from its folder: here, or as a picture.")
def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    iteration: Annotated[
        int | None, typer.Option(min=1, help="When it had ended; the last one by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw it there instead.")
    ] = None,
    columns: Annotated[
        int | None, typer.Option(min=20, help="The terminal's by default, 100 in a picture.")
    ] = None,
) -> None:
    """For a run whose terminal is elsewhere. See docs/tracking.md."""
    from megatron_sparse.report import live_view

    live_view.run(run, iteration, output, columns)


@app.command(help="Make a W&B workspace: communication time first, then what explains it.")
def dashboard(
    target: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Where runs are.")],
    name: Annotated[str, typer.Option(help="Of the workspace.")] = "megatron_sparse",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not talk to W&B.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the workspace's specification.")
    ] = None,
) -> None:
    """See docs/tracking.md."""
    from megatron_sparse.telemetry import dashboard as maker

    print(maker.run(target, name, json, dry_run=dry_run))


@app.command(help="Regenerate figures of the papers on the virtual cluster: a model.")
def simulate(
    paper: Annotated[str | None, typer.Option(help="spccl | zen | pccl | stragglar")] = None,
    figure: Annotated[int | None, typer.Option(help="Its number in the paper.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All figures of all papers.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For PNG and CSV.")] = Path("figures"),
    fast: Annotated[bool, typer.Option("--fast", help="A much smaller sweep.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Say which there are.")] = False,
) -> None:
    """Prints the files that it wrote."""
    from megatron_sparse import simulate as figures

    if paper is None and not every and not list_only:
        raise ConfigError(
            "no figure is named",
            expected="--paper, --all or --list",
            got="none of them",
            remedy="--list says which there are",
        )
    for chosen in figures.select(paper, figure):
        if list_only:
            print(f"--paper {chosen.paper} --figure {chosen.number}: {chosen.title}")
            continue
        for path in chosen.make(out, fast=fast):
            print(path, flush=True)


if __name__ == "__main__":
    main()
