"""The commands `megatron-sparse bench ...`.

A command imports its runner, a module of `megatron_sparse.bench`, only when it is called.
"""

from __future__ import annotations

from dataclasses import replace
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
from megatron_sparse.bench.options import Options, add_command
from megatron_sparse.bench.study.options import (
    ConvergenceOptions,
    OverheadOptions,
    RaceOptions,
    StudyOptions,
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
_STUDY: dict[str, Any] = {"overrides": Overrides, "output": RunsFolder}
DECLARED: tuple[tuple[type[Options], dict[str, Any]], ...] = (
    (CodecSweep, {}),
    (ParameterSweep, {}),
    (BucketSweep, {}),
    (GatherSweep, {"place": NodePlace}),
    (CollectiveSweep, {"place": NodePlace}),
    (OverheadOptions, {}),
    (TrainingOptions, _STUDY),
    (RaceOptions, _STUDY | {"folder": Figures}),
    (ConvergenceOptions, _STUDY | {"folder": Figures}),
)
"""The benches: the options that say what is measured, and the command's other parameters with their
types. A bench exits with 1 when a row is wrong or misses its target."""


def _declare(kind: type[Options], more: dict[str, Any]) -> None:
    """Registers the command of one bench: its name, help and runner all come from `kind`.

    `more` are parameters beside the fields of `kind` and `--json`. A bench of whole runs gets its
    folder and its overrides as fields of the options, every other parameter is its runner's.
    """

    def action(sweep: Any, **given: Any) -> None:
        """Calls the runner with the parsed options, and exits."""
        if isinstance(sweep, StudyOptions):
            out, overrides = given.pop("output"), given.pop("overrides") or ()
            sweep = replace(sweep, out=out, overrides=overrides)
        outcome = import_module(f"megatron_sparse.bench.{kind.RUNNER}").run(sweep, **given)
        # A bench of this process ends by its rows, one of several ranks by its exit code.
        is_code = isinstance(outcome, int)
        raise typer.Exit(outcome if is_code else int(any(row.bad for row in outcome)))

    # `add_command` turns a dataclass into one option a field.
    types = {"sweep": kind, **more, "json_path": JsonFile}
    defaults = {"output": getattr(kind, "out", None)}
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in types.items()
    ]
    help = (kind.__doc__ or "").partition("\n")[0]
    add_command(bench, kind.NAME.removeprefix("bench "), help, action, Signature(parameters))


for _each in DECLARED:
    _declare(*_each)
