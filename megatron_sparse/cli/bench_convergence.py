"""The command `megatron-sparse bench convergence`, which `cli` registers beside `bench_cli`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.bench import JsonFile
from megatron_sparse.errors import ConfigError


def convergence(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="NAME,...", help="gpt | starcoder")] = (
        "gpt,starcoder"
    ),
    setting: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of docs/results/convergence.md, or all.")
    ] = "all",
    seeds: Annotated[str, typer.Option(metavar="N,...", help="Each trains every setting.")] = "1,2",
    iters: Annotated[int, typer.Option(help="Iterations of each run.")] = 1500,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the runs' folders.")] = Path(
        "runs/convergence"
    ),
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures and their CSV here.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Train nothing: report what is there.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """More arguments are overrides of `train`. A run that is there already is not repeated."""
    from megatron_sparse.bench.convergence import command as runner
    from megatron_sparse.bench.convergence import report as reporter
    from megatron_sparse.bench.convergence.settings import BY_NAME, Study

    study = Study(
        models=model.split(","),
        settings=list(BY_NAME) if setting == "all" else setting.split(","),
        seeds=parse_seeds(seeds),
        iters=iters,
        out=out,
        overrides=context.args,
    )
    results = runner.found(study) if report else runner.run(study)
    reporter.report(results, figures, json)


def parse_seeds(text: str) -> list[int]:
    """Whole numbers separated by commas.

    Raises:
        ConfigError: one of them is not.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            "--seeds is not a list of seeds",
            expected="whole numbers with commas between them",
            got=repr(text),
        ) from None
