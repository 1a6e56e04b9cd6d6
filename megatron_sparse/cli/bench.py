"""The commands `megatron-sparse bench ...`.

A command imports its runner, a module of `megatron_sparse.bench`, only when it is called.
"""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_sparse.bench.codec.options import CodecSweep, ParameterSweep
from megatron_sparse.bench.exchange.options import (
    BucketSweep,
    CollectiveSweep,
    GatherSweep,
    NodePlace,
)
from megatron_sparse.bench.options import Options, add_command, command
from megatron_sparse.bench.study.options import (
    ConvergenceOptions,
    OverheadOptions,
    RaceOptions,
    TrainingOptions,
)
from megatron_sparse.cli.outputs import JsonFile, figures_folder, writable_folder

bench = typer.Typer(help="Measures one part on this machine.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Overrides of `train`.")
]
RunsFolder = Annotated[
    Path, typer.Option(metavar="DIR", callback=writable_folder, help="For the runs' folders.")
]
Figures = Annotated[
    Path | None,
    typer.Option(
        "--figures", metavar="DIR", callback=figures_folder, help="Write pictures and their CSV."
    ),
]


DECLARED: tuple[tuple[type[Options], type[Options] | None], ...] = (
    (CodecSweep, None),
    (ParameterSweep, None),
    (BucketSweep, None),
    (GatherSweep, NodePlace),
    (CollectiveSweep, NodePlace),
    (OverheadOptions, None),
)
"""The benches that take nothing but declared options, and the place of their ranks. They exit with
1 when a row is wrong or misses its target."""


def _declare(kind: type[Options], place: type[Options] | None) -> None:
    """Registers the command of one bench: its name, help and runner all come from `kind`.

    The fields of `kind` are the options that say what is measured, those of `place` where the ranks
    run; None: no such options.
    """

    def action(**arguments: Any) -> None:
        """Calls the runner with the parsed options; `_exit` turns the result into an exit code."""
        _exit(import_module(f"megatron_sparse.bench.{kind.RUNNER}").run(**arguments))

    # Parameters of every runner's `run`; `add_command` turns a dataclass into one option a field.
    types: dict[str, Any] = {"sweep": kind, "place": place, "json_path": JsonFile}
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in types.items()
        if annotation is not None
    ]
    help = (kind.__doc__ or "").partition("\n")[0]
    add_command(bench, kind.NAME.removeprefix("bench "), help, action, Signature(parameters))


def _exit(outcome: Any) -> None:
    """Ends a bench of this process by its rows, one of several ranks by its exit code."""
    is_code = isinstance(outcome, int)
    raise typer.Exit(outcome if is_code else int(any(row.bad for row in outcome)))


for _each in DECLARED:
    _declare(*_each)


@command(bench, "Iterations of a small Megatron GPT: plain Megatron beside compressed gradients.")
def training(
    options: TrainingOptions,
    overrides: Overrides = None,
    output: RunsFolder = Path("runs/bench_training"),
    json: JsonFile = None,
) -> None:
    """Trains with each setting, each run in its own folder in `output`. See docs/testbed.md."""
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
    """Trains with each setting, each run in its own folder in `output`.

    A run that a former call finished is not repeated. See docs/results/time-to-loss.md.
    """
    from megatron_sparse.bench.study import time_to_loss as runner

    runner.run(options.given(output, overrides), figures, json)


@command(bench, "Final validation loss of small models, compressed beside dense.")
def convergence(
    options: ConvergenceOptions,
    overrides: Overrides = None,
    output: RunsFolder = Path("runs/convergence"),
    figures: Figures = None,
    json: JsonFile = None,
) -> None:
    """Trains with each setting, each run in its own folder in `output`.

    A run that a former call finished is not repeated. See docs/results/convergence.md.
    """
    from megatron_sparse.bench.study import convergence as runner

    runner.run(options.given(output, overrides), figures, json)
