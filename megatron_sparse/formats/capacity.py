"""How many elements each wire segment may send in capacity mode (`cuda_ext/slots.py`)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from megatron_sparse.bucket import Layout
from megatron_sparse.cuda_ext.slots import TABLES


@lru_cache(TABLES)
def segment_capacity(layout: Layout, density: float) -> torch.Tensor:
    """How many elements each segment may send: all of a kept one, this density of the others.

    The result is cached for the next step; do not write to it.

    Returns:
        int64; the numbers are the same on every machine (one fp64 product, rounded up).
    """
    capacities = [
        numel if keep else min(math.ceil(density * numel), numel)
        for numel, keep in zip(
            layout.segment_offsets.diff().tolist(), layout.segment_keep.tolist(), strict=True
        )
    ]
    return torch.tensor(capacities, dtype=torch.int64)
