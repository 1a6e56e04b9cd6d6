"""The counter hash, a random generator without state: in torch, and its seeds for Triton kernels.

`cuda_ext/csrc/counter_hash.h` is the definition; the names of the draws are repeated from there.
"""

from __future__ import annotations

import torch

DRAW_VALUE, DRAW_RESIDUAL, DRAW_SAMPLE, DRAW_TIE = range(4)
_MASK_64 = 2**64 - 1
_MASK_32 = 2**32 - 1


def hash_seed(key: int, draw: int) -> tuple[int, int]:
    """The two 32-bit words that all hashes of one (key, draw) share, the lower one first.

    They are the halves of output number draw + 1 of the generator SplitMix64 with seed `key`.
    """
    s = (key + (draw + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    s = ((s ^ (s >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    s = ((s ^ (s >> 27)) * 0x94D049BB133111EB) & _MASK_64
    s ^= s >> 31
    return s & _MASK_32, s >> 32


def counter_hash(key: int, draw: int, index_N: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index, a pure function of the arguments.

    Args:
        key: selects the random stream.
        draw: one of the `DRAW_*`: bits for different purposes are independent.
        index_N: int64, non-negative.

    Returns:
        int64 values in [0, 2^32).
    """
    a, b = hash_seed(key, draw)
    low, high = index_N & _MASK_32, index_N >> 32
    # int64 products wrap, which leaves their lower 32 bits right.
    x = low ^ a ^ (high * 0x85EBCA6B & _MASK_32)
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD & _MASK_32
    x = x ^ (x >> 15)
    x = x + b + high * 0xC2B2AE35 & _MASK_32
    x = x * 0xD35A2D97 & _MASK_32
    return x ^ (x >> 15)
