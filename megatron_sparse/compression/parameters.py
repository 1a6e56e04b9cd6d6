"""Decides which parameters are pruned, sent whole, or sent without loss."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError


class ParameterFilter:
    """Decides for each parameter which of its elements may be left out.

    A parameter is lossless if one of `lossless_patterns` finds its name: all its elements that are
    not zero are sent. Of the others, these are always sent whole: one-dimensional parameters
    (norms, biases), small ones, those whose name one of `keep_patterns` finds, and those that
    tensor parallelism replicates. Ranks of a tensor-parallel group would prune different entries
    of a replicated parameter, and its copies would drift apart.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self._min_numel = config.keep_below_numel
        self._kept = [re.compile(pattern) for pattern in config.keep_patterns]
        self._lossless = [re.compile(pattern) for pattern in config.lossless_patterns]

    def slice_of(
        self, name: str, start: int, stop: int, shape: Sequence[int] | torch.Size, replicated: bool
    ) -> ParameterSlice:
        """The parameter's slice [start, stop) of its bucket, marked as lossless or kept whole.

        Raises:
            ConfigError: a keep pattern and a lossless pattern find its name.
        """
        kept, lossless = _found(self._kept, name), _found(self._lossless, name)
        if kept and lossless:
            raise ConfigError(
                f"parameter {name} is both kept whole and lossless",
                expected="its name found by compression.keep_patterns or "
                "compression.lossless_patterns, not by both",
                got=f"{', '.join(kept)} and {', '.join(lossless)}",
                remedy="make one of the two patterns narrower",
            )
        is_small = len(shape) < 2 or math.prod(shape) < self._min_numel
        is_whole = replicated or is_small or bool(kept)
        keep = is_whole and not lossless
        return ParameterSlice(name, start, stop, keep, bool(lossless))


def _found(patterns: Sequence[re.Pattern[str]], name: str) -> list[str]:
    return [pattern.pattern for pattern in patterns if pattern.search(name)]
