"""Keys of random draws: pure functions of names and numbers, the same on every machine.

A draw (sample positions, stochastic rounding) must not depend on how parameters are grouped into
buckets, on the process, or on Python's salted `hash`, so that a resumed run repeats it exactly.
"""

from __future__ import annotations

from hashlib import blake2b


def draw_key(seed: int, step: int, *names: object) -> int:
    """A non-negative 63-bit key for the draw that `names` names in step `step`.

    Example:
        >>> draw_key(1, 2, "w") == draw_key(1, 2, "w") != draw_key(1, 3, "w")
        True
    """
    text = "\0".join([str(seed), str(step), *map(str, names)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
