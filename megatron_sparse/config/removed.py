"""Keys and values of the configuration that have left, each with what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_sparse.errors import ConfigError

REMOVED: Mapping[str, str] = {
    "compression.level=node+instance": "set compression.level=node, which adds up instances dense, "
    "or instance, which compresses the sum over them",
    "compression.method": "leave it out: sampled top-k with leaky error feedback is the method",
    "compression.momentum": "set the optimizer's own momentum",
    "compression.momentum_masking": "leave it out: residuals have no momentum to mask",
    "compression.ramp_shape": "leave it out: the density falls by equal factors",
    "compression.reuse_iters": "set fewer compression.samples: sampling costs less then",
    "compression=dgc": "set compression=topk999, with the optimizer's own momentum",
    "compression=sidco": "set compression=topk999 or another density: thresholds are quantiles",
    "compression=threshold_reuse": "set compression=topk99, and fewer compression.samples",
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
