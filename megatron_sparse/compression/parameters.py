"""Which parameters are pruned, which are always sent whole, and which without loss."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError


class ParameterFilter:
    """Decides for each parameter what is sent of it.

    Lossless are those whose name one of `lossless_patterns` finds: all that is not zero is sent. Of
    the others are kept whole one-dimensional parameters (norms, biases), small ones, those whose
    name one of `keep_patterns` finds, and those that tensor parallelism replicates: ranks of a
    tensor-parallel group would prune different entries of the same replicated parameter, and the
    copies would drift apart.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self._min_numel = config.keep_below_numel
        self._kept = [re.compile(pattern) for pattern in config.keep_patterns]
        self._lossless = [re.compile(pattern) for pattern in config.lossless_patterns]

    def slice_of(
        self, name: str, start: int, stop: int, shape: Sequence[int] | torch.Size, replicated: bool
    ) -> ParameterSlice:
        """The parameter's slice [start, stop) of its bucket, with what is decided about it.

        Raises:
            ConfigError: patterns for both kinds find its name.
        """
        kept, lossless = _found(self._kept, name), _found(self._lossless, name)
        if kept and lossless:
            raise ConfigError(
                f"parameter {name} is to be kept whole and to be sent without loss",
                expected="its name found by compression.keep_patterns or "
                "compression.lossless_patterns, not by both",
                got=f"{', '.join(kept)} and {', '.join(lossless)}",
                remedy="make one of the two patterns narrower",
            )
        keep = not lossless and self.keeps(name, shape, replicated)
        return ParameterSlice(name, start, stop, keep, bool(lossless))

    def keeps(self, name: str, shape: Sequence[int] | torch.Size, replicated: bool) -> bool:
        """Whether the parameter is always sent whole, unless it is sent without loss."""
        numel = 1
        for extent in shape:
            numel *= extent
        return (
            replicated
            or len(shape) < 2
            or numel < self._min_numel
            or bool(_found(self._kept, name))
        )


def _found(patterns: Sequence[re.Pattern[str]], name: str) -> list[str]:
    return [pattern.pattern for pattern in patterns if pattern.search(name)]
