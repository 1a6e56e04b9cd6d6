"""Commands that show what a run has written: options and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.outputs import (
    FOLDER,
    PICTURES,
    figures_folder,
    of_kind,
    outputs,
    picture,
    view_picture,
    writable_file,
)
from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require, require_figures


def stragglers(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.png|FILE.csv",
            callback=outputs({**dict.fromkeys(PICTURES, picture), ".csv": writable_file(".csv")}),
            help="Draw the delays' CDF, or write a line for each bucket and iteration; "
            "may be repeated.",
        ),
    ] = None,
) -> None:
    """Needs a run with straggler.mode=observe, persistent or dynamic."""
    from megatron_sparse.telemetry import straggler_report

    named = output or []
    straggler_report.run(run, of_kind(named, *PICTURES), of_kind(named, ".csv"))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.html|DIR",
            callback=outputs(
                {".html": writable_file(".html", makes_folder=True), FOLDER: figures_folder}
            ),
            help="The page, one self-contained file; default: report.html. A folder gets every "
            "chart as PNG. May be repeated.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Compare the others with this run; default: the first one."
        ),
    ] = None,
) -> None:
    """Prints the files that it has written. A run may still be going on."""
    require("jinja2", "makes the page", "figures")
    require_figures()
    from megatron_sparse.report import page

    named = output or []
    html = of_kind(named, ".html") or Path("report.html")
    for path in page.run(runs, html, of_kind(named, FOLDER), baseline):
        print(path)


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    iteration: Annotated[
        int | None, typer.Option(min=1, help="Show the state after it; default: the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, to the run's end.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|FILE.png", callback=view_picture, help="Draw a picture instead."
        ),
    ] = None,
    columns: Annotated[
        int | None, typer.Option(min=20, help="Width; default: the terminal's, 100 in a picture.")
    ] = None,
) -> None:
    """For runs in a batch job, whose terminal is elsewhere. See docs/tracking.md."""
    if follow and (output is not None or iteration is not None):
        raise ConfigError(
            "view --follow goes on to the end",
            expected="--follow alone, or --iteration and --output without it",
            got="--follow with " + ("--iteration" if output is None else "--output"),
            remedy="leave one of them out",
        )
    if follow:
        from megatron_sparse.report import view_follow

        view_follow.run(run, columns)
        return
    from megatron_sparse.report import live_view

    live_view.run(run, iteration, output, columns)


def dashboard(
    target: Annotated[
        str, typer.Argument(metavar="ENTITY/PROJECT", help="The W&B project of the runs.")
    ],
    name: Annotated[str, typer.Option(help="Name of the workspace.")] = "megatron_sparse",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not talk to W&B.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=writable_file(), help="Write the workspace's specification."
        ),
    ] = None,
) -> None:
    """See docs/tracking.md."""
    from megatron_sparse.telemetry import dashboard as maker

    print(maker.run(target, name, json, dry_run=dry_run))
