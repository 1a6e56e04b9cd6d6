"""Commands around a run: check the machine, build, make data, train, and show results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.outputs import JsonFile, report_files, writable_folder
from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require, require_figures


def train(context: typer.Context) -> None:
    """Hands everything to Hydra."""
    from megatron_sparse.run import application

    application.train(context.args)


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OVERRIDE]...", help="With --memory: arguments of `train`."),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show what the plugin would hold in that run, item by item."),
    ] = False,
    json: JsonFile = None,
) -> None:
    """Prints a report on this machine or, with --memory, the plugin's memory in a run.

    Exits with 1 if a part that training needs is missing. It starts no ranks; `calibrate` does.
    """
    if memory:
        from megatron_sparse.doctor import memory as plugin_memory

        plugin_memory.run(overrides or [], json)
        return
    if overrides:
        raise ConfigError(
            "doctor takes a run's overrides with --memory only",
            expected="doctor --memory OVERRIDE...",
            got=" ".join(overrides),
            remedy="add --memory",
        )
    from megatron_sparse.doctor import checks as report

    raise typer.Exit(report.run(json))


def corpus(
    kind: Annotated[str, typer.Option(help="code | prose")],
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR", callback=writable_folder, help="The corpus' folder, such as data/code."
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(help="Number of token ids, the end of a document included.")
    ] = 8192,
) -> None:
    """Makes a corpus in the folder `output`, and prints its size."""
    from megatron_sparse.megatron import corpus as maker

    made = maker.prepare(kind, output, vocab_size)  # type: ignore[arg-type] - it checks `kind`
    print(f"{output}: {made.n_documents} documents, {made.n_tokens} tokens of {made.vocab_size}")


def build(
    cuda: Annotated[str, typer.Option(help="auto | on | off")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Print every compiler command.")] = False,
) -> None:
    """Builds the native libraries, and exits with the build's exit code."""
    from importlib import import_module

    builder = import_module("megatron_sparse.cuda_ext.build")
    raise typer.Exit(builder.main(["--cuda", cuda, *(["--verbose"] if verbose else [])]))


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or a sweep's runs_dir for all."),
    ],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.html|FILE.csv",
            callback=report_files,
            help="The page, one self-contained file; default: report.html. A CSV gets a line for "
            "each run. May be repeated.",
        ),
    ] = None,
) -> None:
    """Writes a page or a table of all `runs` into each `output`, and prints their paths.

    A run need not have ended.
    """
    require("jinja2", "makes the page", "figures")
    require_figures()
    from megatron_sparse.report import page

    for path in page.run(runs, output or [Path("report.html")]):
        print(path)


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, to the run's end.")
    ] = False,
    columns: Annotated[
        int | None, typer.Option(min=20, help="Width; default: the terminal's.")
    ] = None,
) -> None:
    """Draws a run's progress on this terminal from the run's files, once or until the run ends.

    So it also shows a run in a batch job, which has no terminal. See docs/tracking.md.
    """
    from megatron_sparse.report import live_view

    draw = live_view.follow if follow else live_view.run
    draw(run, columns)


def dashboard(
    target: Annotated[
        str, typer.Argument(metavar="ENTITY/PROJECT", help="The W&B project of the runs.")
    ],
    name: Annotated[str, typer.Option(help="Name of the workspace.")] = "megatron_sparse",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not talk to W&B.")] = False,
) -> None:
    """Makes a W&B workspace for runs' curves and prints its URL; a dry run prints its panels.

    See docs/tracking.md.
    """
    from megatron_sparse.telemetry import dashboard as maker

    print(maker.run(target, name, dry_run=dry_run))
