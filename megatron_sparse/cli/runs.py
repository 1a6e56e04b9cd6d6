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
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Check the ranks of a job and their links.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Start N ranks here; default: those of srun or torchrun."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Set the environment of configs/cluster/NAME."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the ranks' answers.")] = 60,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    json: JsonFile = None,
) -> None:
    """Exits with 1 if a part that training needs is missing. For jobs see docs/slurm.md."""
    from megatron_sparse.doctor import checks as report
    from megatron_sparse.doctor import distributed as job

    if memory:
        from megatron_sparse.doctor import memory as plugin_memory

        others = (distributed, ranks is not None, cluster is not None, strict)
        if any(others):
            raise ConfigError(
                "--memory looks at a configuration, not at ranks",
                expected="doctor --memory OVERRIDE..., with --json if wanted",
                got="--memory with --distributed, --ranks, --cluster or --strict",
                remedy="leave the others out; write cluster=NAME for a cluster's configuration",
            )
        raise typer.Exit(plugin_memory.run(overrides or [], json))
    if overrides:
        raise ConfigError(
            "doctor takes a run's overrides with --memory only",
            expected="doctor --memory OVERRIDE...",
            got=" ".join(overrides),
            remedy="add --memory",
        )
    if distributed:
        raise typer.Exit(job.run(job.Request(ranks, cluster, timeout, strict, json)))
    if ranks is not None or cluster is not None or strict:
        raise ConfigError(
            "--ranks, --cluster and --strict check the ranks of a job",
            expected="--distributed with them",
            got="no --distributed",
            remedy="add --distributed",
        )
    raise typer.Exit(report.run(json))


def sweep(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The sweep's runs_dir.")],
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", callback=writable_file(), help="Write the table."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """For `train --multirun`. See docs/slurm.md."""
    from megatron_sparse.run import sweep as runs

    runs.report(folder, csv, json)


def corpus(
    kind: Annotated[str, typer.Option(help="code | prose")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", callback=writable_folder, help="Output folder, for example data/code."
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(help="Number of token ids, the end of a document included.")
    ] = 8192,
) -> None:
    """Prints the corpus' size."""
    from megatron_sparse.megatron import corpus as maker

    made = maker.prepare(kind, out, vocab_size)  # type: ignore[arg-type] - checked there
    print(f"{out}: {made.n_documents} documents, {made.n_tokens} tokens of {made.vocab_size}")


def build(
    cuda: Annotated[str, typer.Option(help="auto | on | off")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Print every compiler command.")] = False,
) -> None:
    """Exits with the build's exit code."""
    from importlib import import_module

    builder = import_module("megatron_sparse.cuda_ext.build")
    raise typer.Exit(builder.main(["--cuda", cuda, *(["--verbose"] if verbose else [])]))
