"""Commands that have left or were renamed, each with what to use in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer

from megatron_sparse.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "bench cost-models": "`bench planner` compares every prediction with the time that was taken",
    "bench host": "`bench bucket --stub-nccl --scheme dense,agsparse,direct --nccl-engine "
    "--warmup 30 --iters 200`",
    "bench node": "`bench collectives --ranks 4`, which measures ranks of this host over gloo",
    "bench peer": "`bench collectives --scheme direct`, which runs over NCCL",
}
"""Such as `bench host`, with the remedy that the error gives; sorted."""


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
