"""Which parameters are pruned and which are always sent whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from megatron_sparse.config import CompressionConfig
from megatron_sparse.errors import ConfigError


class ParameterFilter:
    """Decides for each parameter whether it stays dense.

    Kept whole are one-dimensional parameters (norms, biases), small ones, those whose name a
    pattern of the configuration finds, and those that tensor parallelism replicates: ranks of a
    tensor-parallel group would prune different entries of the same replicated parameter, and the
    copies would drift apart.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self._min_numel = config.keep_below_numel
        try:
            self._patterns = [re.compile(pattern) for pattern in config.keep_patterns]
        except re.error as error:
            raise ConfigError(
                "compression.keep_patterns holds an invalid regular expression",
                expected="Python regular expressions",
                got=f"{error.pattern!r}: {error}",
            ) from error

    def keeps(self, name: str, shape: Sequence[int] | torch.Size, replicated: bool) -> bool:
        """Whether the parameter of this name and shape is always sent whole."""
        numel = 1
        for extent in shape:
            numel *= extent
        return (
            replicated
            or len(shape) < 2
            or numel < self._min_numel
            or any(pattern.search(name) for pattern in self._patterns)
        )
