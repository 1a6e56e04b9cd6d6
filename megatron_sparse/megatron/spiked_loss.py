"""Spikes of the gradient on demand, for the study of docs/results/convergence.md, Spikes."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from typing import Any

from megatron_sparse.errors import ConfigError

SPIKES = "MEGATRON_SPARSE_SPIKES"
"""An environment variable: with `FACTOR:SHARE` the loss is multiplied by the factor in so large a
share of the iterations, for `train` with the plugin or without."""


def loss_factor(arguments: Callable[[], Any]) -> float:
    """The factor on the loss in this iteration, the same on every rank: see `SPIKES`.

    Args:
        arguments: returns Megatron's; called only if the variable is set.

    Raises:
        ConfigError: the variable cannot be read.
    """
    given = os.environ.get(SPIKES)
    if given is None:
        return 1.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?):(0?\.\d+)", given)
    if found is None:
        raise ConfigError(f"{SPIKES} cannot be read", expected="FACTOR:SHARE", got=repr(given))
    args = arguments()
    drawn = random.Random(f"{args.seed}:{args.curr_iteration}").random()
    return float(found[1]) if drawn < float(found[2]) else 1.0
