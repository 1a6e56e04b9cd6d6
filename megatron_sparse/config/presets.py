"""Presets: settings by a name that says what a user wants, from `configs/preset/*.yaml`.

`megatron-sparse train preset=NAME` and `SparseConfig.preset` read the same files.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_sparse.config.checks import one_of

CONFIG_MODULE, FOLDER = "megatron_sparse.configs", "preset"

LOSS_POINTS = {"quantised": 0.05, "safe": 0.22, "balanced": 0.41, "extreme": 1.0}
"""Percent of the final loss that a preset was measured to cost (docs/choosing-density.md)."""
LEAST_BUDGET = {"lossless": 0, "quantised": 0.3, "safe": 0.3, "balanced": 1, "extreme": 2.5}
"""The least `compression.loss_budget` with which `density=auto` may take a preset, from the one
that costs no loss on. More than `LOSS_POINTS`: those are of small models."""


def preset_names() -> list[str]:
    """The presets, sorted."""
    names = [entry.name for entry in (files(CONFIG_MODULE) / FOLDER).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def preset_values(name: str) -> dict[str, dict[str, Any]]:
    """What a preset sets: section -> key -> value.

    Raises:
        ConfigError: there is no such preset; lists them.

    Example:
        >>> preset_values("extreme")["compression"]
        {'density': 0.015, 'value_bits': 3}
    """
    # Imported here, so that GPU tests, which use no preset, need no OmegaConf.
    from omegaconf import OmegaConf

    one_of("preset", name, preset_names())
    values = OmegaConf.to_container(
        OmegaConf.load(Path(str(files(CONFIG_MODULE) / FOLDER / f"{name}.yaml")))
    )
    assert isinstance(values, dict), "the project's own files have sections"
    return values  # type: ignore[return-value]


def allowed(loss_budget: float) -> list[str]:
    """The presets that `compression.density=auto` may choose, the one that costs least loss first.

    Args:
        loss_budget: percent of the final loss that they may cost.

    Example:
        >>> allowed(0.3)
        ['lossless', 'quantised', 'safe']
    """
    return [name for name, least in LEAST_BUDGET.items() if least <= loss_budget]
