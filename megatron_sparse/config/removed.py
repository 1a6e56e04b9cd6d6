"""Keys and values of the configuration that have left, each with what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_sparse.errors import ConfigError

REMOVED: Mapping[str, str] = {
    "tracking.record_parameters_iters": "leave it out: `megatron-sparse bench parameters` measures "
    "the coders on synthetic moves",
}
"""`section.key`, `section.key=value` or `group=option`, with the remedy that the error gives."""


def removed(key: str, value: object = None) -> ConfigError | None:
    """The error for a key, or for one of its values, that has left; None if it has not.

    Args:
        key: `section.key`, or a group of Hydra's.
        value: what the user gave it; None asks for the key alone.
    """
    name = key if value is None else f"{key}={value}"
    if name not in REMOVED:
        return None
    return ConfigError(
        f"{name} has left megatron_sparse",
        expected="a configuration without it",
        got=name,
        remedy=REMOVED[name],
    )
