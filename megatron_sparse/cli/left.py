"""Commands that have left `megatron-sparse`, each with what to use in its place."""

from __future__ import annotations

from collections.abc import Mapping

import click
from typer.core import TyperGroup

from megatron_sparse.errors import ConfigError

LEFT: Mapping[str, str] = {
    "bench node": "bench collectives --ranks 4 measures ranks of this host, over gloo",
}
"""`command`, or `bench command`, with the remedy that the error gives; sorted."""


class Commands(TyperGroup):
    """A group of commands that knows those that have left it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group`.

        Raises:
            ConfigError: the command has left.
        """
        inside = ctx.command_path.split()[1:]
        name = " ".join([*inside, cmd_name])
        if name in LEFT:
            raise ConfigError(
                f"megatron-sparse {name} has left",
                expected="a command that --help lists",
                got=name,
                remedy=LEFT[name],
            )
        return super().get_command(ctx, cmd_name)
