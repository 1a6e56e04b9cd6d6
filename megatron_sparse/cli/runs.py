"""Commands that set up and start runs: options, checks and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.outputs import JsonFile, writable_file, writable_folder
from megatron_sparse.errors import ConfigError


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
    """Exits with 1 if a part that training needs is missing. For a job's ranks: `calibrate`."""
    if memory:
        from megatron_sparse.doctor import memory as plugin_memory

        raise typer.Exit(plugin_memory.run(overrides or [], json))
    if overrides:
        raise ConfigError(
            "doctor takes a run's overrides with --memory only",
            expected="doctor --memory OVERRIDE...",
            got=" ".join(overrides),
            remedy="add --memory",
        )
    from megatron_sparse.doctor import checks as report

    raise typer.Exit(report.run(json))


def sweep(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The sweep's runs_dir.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", callback=writable_file(".csv"), help="Write the table."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """For `train --multirun`. See docs/slurm.md."""
    from megatron_sparse.run import sweep as runs

    runs.report(folder, output, json)


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
    """Prints the corpus' size."""
    from megatron_sparse.megatron import corpus as maker

    made = maker.prepare(kind, output, vocab_size)  # type: ignore[arg-type] - checked there
    print(f"{output}: {made.n_documents} documents, {made.n_tokens} tokens of {made.vocab_size}")


def build(
    cuda: Annotated[str, typer.Option(help="auto | on | off")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Print every compiler command.")] = False,
) -> None:
    """Exits with the build's exit code."""
    from importlib import import_module

    builder = import_module("megatron_sparse.cuda_ext.build")
    raise typer.Exit(builder.main(["--cuda", cuda, *(["--verbose"] if verbose else [])]))
