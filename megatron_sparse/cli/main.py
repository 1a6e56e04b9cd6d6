"""The command line `megatron-sparse`: the list of its commands.

`runs` and `plans` hold the options; `bench` has a list of its own. Commands import what
they need when they run, so that `--help` answers at once. The typed error of any command ends here:
its message goes to stderr, its exit code to the shell, and no traceback is printed.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from inspect import signature
from typing import Annotated

import typer

from megatron_sparse.bench.options import add_command
from megatron_sparse.cli import plans, runs
from megatron_sparse.cli.bench import bench
from megatron_sparse.config.redaction import redact_text
from megatron_sparse.errors import MegatronSparseError, StorageError
from megatron_sparse.version import __version__

MEASUREMENTS = "Measurements and models"
"""The help's panel of commands that a training run does not need."""

app = typer.Typer(
    help="Gradient compression for Megatron-LM.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(
    "train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    help="Train a model; `train --help` shows groups, options and every key.",
)(runs.train)
COMMANDS = {
    # Set up and start runs.
    runs.doctor: "Check the environment and report what is missing.",
    runs.corpus: "Make a training corpus from files of this machine.",
    runs.build: "Rebuild the native libraries.",
    # Plan.
    plans.calibrate: "Measure this cluster's links, codecs and host into a file for the planner.",
    plans.plan: "Show every scheme's predicted time for each bucket, and the chosen scheme.",
    # Show what runs have written.
    runs.report: "Write one HTML page about a run, or about several side by side.",
    runs.view: "Draw a run's progress from its folder.",
    runs.dashboard: "Make a W&B workspace: communication time first, then its causes.",
}
MEASURED = {
    plans.profile: "Measure the sparsity of recorded gradients: density, overlap, skewness.",
    plans.levels: "Price whole synchronisations at the levels rank and node: a model.",
    plans.simulate: "Draw the papers' figures anew on the virtual cluster: a model.",
}
for _commands, _panel in ((COMMANDS, None), (MEASURED, MEASUREMENTS)):
    for _action, _help in _commands.items():
        _signature = signature(_action, eval_str=True)
        add_command(app, _action.__name__, _help, _action, _signature, _panel)
app.add_typer(bench, name="bench", rich_help_panel=MEASUREMENTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code.

    `arguments` are without the program's name; None takes those of the process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Without UTF-8, print `?` for the line-drawing characters of tables instead of failing.
        sys.stdout.reconfigure(errors="replace")
    try:
        app(None if arguments is None else list(arguments), prog_name="megatron-sparse")
    except MegatronSparseError as error:
        # The message may quote secrets of the command line, and stderr may end up in a job's log.
        print(f"error: {redact_text(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # Only standard output on a full disk is handled here: its errors name no file.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        print("error: the disk that the output is written to is full", file=sys.stderr)
        # Python flushes standard output at exit, which would fail again: discard the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(StorageError.exit_code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megatron_sparse {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # Eager: answered before Typer complains about a missing command.
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    # Only declares --version, which its callback answers.
    pass


if __name__ == "__main__":
    main()
