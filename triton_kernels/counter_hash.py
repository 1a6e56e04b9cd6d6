"""The seeds of the counter hash for kernels that are launched from Python.

`csrc/counter_hash.h` is the definition of the hash; the names of the draws are repeated from there.
"""

from __future__ import annotations

DRAW_VALUE, DRAW_RESIDUAL, DRAW_SAMPLE, DRAW_TIE = range(4)
_MASK_64 = 2**64 - 1


def hash_seed(key: int, draw: int) -> tuple[int, int]:
    """The two 32-bit words that all hashes of one (key, draw) share."""
    s = (key + (draw + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    s = ((s ^ (s >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    s = ((s ^ (s >> 27)) * 0x94D049BB133111EB) & _MASK_64
    s ^= s >> 31
    return s & 0xFFFFFFFF, s >> 32
