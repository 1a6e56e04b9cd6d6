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

import megatron_sparse
from megatron_sparse.bench_cli import JsonFile, bench, parse_size
from megatron_sparse.errors import ConfigError, MegatronSparseError

app = typer.Typer(
    help="Gradient compression for Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    try:
        app(None if arguments is None else list(arguments), prog_name="megatron-sparse")
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megatron_sparse {megatron_sparse.__version__}")
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
    from megatron_sparse import application

    application.train(context.args)


@app.command(help="Say what this machine has of all that can be used, and what is missing.")
def doctor(json: JsonFile = None) -> None:
    """Exits with 1 when a part is missing that training needs."""
    from megatron_sparse import doctor as report

    raise typer.Exit(report.run(json))


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


@app.command(help="Regenerate figures of the papers on the virtual cluster: a model.")
def simulate(
    paper: Annotated[str | None, typer.Option(help="spccl | zen | pccl")] = None,
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
