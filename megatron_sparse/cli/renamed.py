"""Commands and options that have left or were renamed, with what to use in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from megatron_sparse.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "bench cost-models": "`bench planner` compares every prediction with the time that was taken",
    "bench host": "`bench bucket --stub-nccl --scheme dense,agsparse,direct --nccl-engine "
    "--warmup 30 --iters 200`",
    "bench node": "`bench collectives --ranks 4`, which measures ranks of this host over gloo",
    "bench peer": "`bench collectives --scheme direct`, which runs over NCCL",
}
"""Such as `bench host`, with the remedy that the error gives; sorted."""

OUTPUT = "--output"
OUTPUTS = ("--out", "--png", "--csv")
"""Former names of `--output`."""


class Program(TyperGroup):
    """The commands, of which a former option's name is a typed error that has the new one."""

    def invoke(self, ctx: Any) -> object:
        """Runs the command.

        Raises:
            ConfigError: an option was renamed.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:
            # By its attribute: the class is click's, or that of Typer's own copy of click.
            former = getattr(error, "option_name", None)
            if former not in OUTPUTS:
                raise
            command = error.ctx.command  # type: ignore[attr-defined]
            if not any(OUTPUT in parameter.opts for parameter in command.params):
                raise
            raise ConfigError(
                f"{former} is now {OUTPUT}",
                expected=f"{OUTPUT} PATH, whose ending decides the format",
                got=former,
                remedy=f"write {OUTPUT} in its place; `report` and `stragglers` take it twice",
            ) from None


def answer_for_renamed(app: typer.Typer, group: str = "") -> None:
    """Lets the commands of `RENAMED` answer with their error.

    Args:
        app: the group of commands that had them.
        group: its name, such as `bench`; empty for commands of the program itself.
    """
    for name, remedy in RENAMED.items():
        its_group, _, own = name.rpartition(" ")
        if its_group == group:
            app.command(
                own,
                hidden=True,
                add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_refusal(name, remedy))


def _refusal(name: str, remedy: str) -> Callable[[], None]:
    def refuse() -> None:
        raise ConfigError(
            f"megatron-sparse {name} has left",
            expected="a command that exists",
            got=name,
            remedy=f"use {remedy}",
        )

    return refuse
