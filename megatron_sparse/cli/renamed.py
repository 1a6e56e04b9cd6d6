"""Commands and options of a release that have left or were renamed, with what to use instead."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from megatron_sparse.errors import ConfigError

RENAMED: dict[str, str] = {
    "bench cost-models": "use `report RUN`, which has measured over predicted times",
    "bench host": "use `bench bucket`, whose `host_us` is the host's time for a bucket",
    "bench planner": "use `report RUN`, which has measured over predicted times",
    "bench prune": "use `bench codecs --op prune`",
    "bench stragglers": "use `bench collectives --delay-ms MS`",
    "schedule": "use `simulate --paper stragglar`, which draws what schedules cost",
    "stragglers": "use `report RUN`, which has a table; delays are in readiness.jsonl",
    "sweep": "use `report RUNS_DIR --output sweep.csv`, which has a line for each run",
}
"""Such as `bench host`, with the remedy that the error gives; sorted."""

OPTIONS: dict[str, str] = {
    "bench codecs --check": "compare `ratio` in the `--json` files of two runs",
    "bench collectives --alpha-us": "leave it out: virtual links have 10 us",
    "bench collectives --intra-gbit": "leave it out: virtual links in a node have 1600 Gbit/s",
    "bench collectives --no-prune": "leave it out: alone it is `time_us` less `prune_us`",
    "bench collectives --prune": "leave it out: selection is always timed",
    "bench convergence --out": "use `bench convergence --output`",
    "bench convergence --report": "leave it out, and name the finished ones with --setting, "
    "--model and --seeds: a finished run is not repeated",
    "bench training --out": "use `bench training --output`",
    "calibrate --out": "use `calibrate --output`",
    "calibrate --virtual": "use `calibrate --sweep`, on real links; `plan` has models",
    "corpus --out": "use `corpus --output`",
    "dashboard --json": "leave it out: --dry-run prints the panels",
    "doctor --distributed": "use `calibrate --quick` under the same launcher: it says whether all "
    "ranks have met and agree, and names the slowest link",
    "plan --recording": "use `plan RUN --cluster NAME`: a run with planner.cluster samples the "
    "sparsity of its gradients",
    "profile --density": "record at that density: `profile RUN` shows the selection",
    "profile --out": "use `profile --json`; the figures have left",
    "profile --output": "use `profile --json`, whose lines have overlap, densification, skewness; "
    "`simulate --paper zen` draws the paper's figures",
    "report --png": "use `report RUN`, whose page has the charts as SVG",
    "simulate --out": "use `simulate --output`",
    "view --iteration": "use `report RUN`, or the iteration's line in breakdown.jsonl",
    "view --output": "use `report RUN`, whose charts show the same times, or save the text",
}
"""Options of a command, such as `view --output`, with the remedy; sorted."""


class Program(TyperGroup):
    """A group of commands: a former name of one, or of an option, is an error with the new one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names.

        Raises:
            ConfigError: it was renamed, or has left.
        """
        name = _in_program(f"{ctx.command_path} {args[0]}")
        if name in RENAMED:
            raise _left(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> object:
        """Runs the command; returns what it returns.

        Raises:
            ConfigError: an option was renamed, or has left.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Errors about an option are known by this attribute. Their class is click's, or that of
            # Typer's own copy of click.
            former = getattr(error, "option_name", None)
            if former is None:
                raise
            name = f"{_in_program(error.ctx.command_path)} {former}"  # type: ignore[attr-defined]
            if name not in OPTIONS:
                raise
            raise _left(name) from None


def _in_program(command: str) -> str:
    """A command without the program's name."""
    return command.removeprefix("megatron-sparse ")


def _left(name: str) -> ConfigError:
    """The error for a key of `RENAMED` or `OPTIONS`, with its remedy."""
    return ConfigError(
        f"megatron-sparse {name} has left",
        expected="a command and options that exist",
        got=name,
        remedy=(RENAMED | OPTIONS)[name],
    )
