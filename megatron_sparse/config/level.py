"""The key `compression.level`: its values, and their check."""

from __future__ import annotations

from megatron_sparse.config.checks import one_of

RANK, NODE, INSTANCE, AUTO = "rank", "node", "instance", "auto"
LEVELS = (RANK, NODE, INSTANCE, AUTO)
"""Allowed values of `compression.level`: which ranks' gradients are added up before selection."""


def check_level(level: object) -> None:
    """Refuses a level that does not exist.

    Raises:
        ConfigError: see above.
    """
    one_of("compression.level", level, LEVELS)
