"""Decides which parameters are pruned, sent whole, or sent without loss (all but zeros)."""

import math
import re
from collections.abc import Sequence

import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig


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
        """Makes the slice of a parameter at [start, stop) of its bucket, and decides its kind."""
        lossless = any(pattern.search(name) for pattern in self._lossless)
        is_small = len(shape) < 2 or math.prod(shape) < self._min_numel
        is_kept = any(pattern.search(name) for pattern in self._kept)
        keep = (replicated or is_small or is_kept) and not lossless
        return ParameterSlice(name, start, stop, keep, lossless)
