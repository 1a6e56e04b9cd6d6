"""The quantiser of Rice records, group by group in NumPy: an oracle.

docs/wire-format.md specifies it. All arithmetic is fp32, each operation rounded to nearest even.
A group of at most 128 values has a base and a step, both bf16. A code is a sign and a number j from
0 to T = 2^(bits - 1) - 1; it stands for base + j step, with that sign.
"""

from dataclasses import dataclass

import numpy as np

GROUP = 128
NAN_WORD = 0x7FC0_0000
TOO_LARGE = np.float32(2.0**120)
BASE_LIMIT = np.float32(2.0**16)
"""A base below step / 2^16 becomes 0: else `x - sent` could have too many bits."""
FITTED = {3: (np.float32(0.35), np.float32(1.1)), 2: (np.float32(0.6), np.float32(1.8))}
"""A and B, by bits: base is lo + A (mean - lo), step B (mean - lo), where lo allows it."""


@dataclass(frozen=True)
class QuantisedGroup:
    """A quantised group of values x, and its quantisation error.

    Attributes:
        scale_word: bits of base, upper half, and of step, lower half.
        codes: uint32, sign << (bits - 1) | j.
        sent: fp32, the values that every decoder computes from scale and codes.
        residual: fp32, x - sent; 0 where sent is NaN.
    """

    scale_word: int
    codes: np.ndarray
    sent: np.ndarray
    residual: np.ndarray


def levels_of(bits: int) -> int:
    """T, the largest j: 127, 7, 3 or 1."""
    return 2 ** (bits - 1) - 1


def down(value: np.float32) -> np.float32:
    """The bf16 of a number that is not negative, rounded towards 0."""
    return _float(_bits(value) & 0xFFFF_0000)


def up(value: np.float32) -> np.float32:
    """Rounds a number of 0 or more up to a bf16 value.

    Example:
        >>> float(up(np.float32(1.001))), float(down(np.float32(1.001)))
        (1.0078125, 1.0)
    """
    return _float((_bits(value) + 0xFFFF) & 0xFFFF_0000)


def mean_of(magnitude_K: np.ndarray) -> np.float32:
    """The mean in fp32. Pads to 128, and adds one half to the other seven times, as kernels do."""
    tree = np.zeros(GROUP, np.float32)
    tree[: magnitude_K.size] = magnitude_K
    while tree.size > 1:
        tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
    return tree[0] / np.float32(magnitude_K.size)


def scale_of(magnitude_K: np.ndarray, bits: int, *, indices: bool) -> int:
    """Chooses base and step for a group of K finite magnitudes below 2^120; returns the scale word.

    Args:
        magnitude_K: fp32, 1 to 128 of them.
        bits: of each code, its sign included.
        indices: whether the record has indices; if not, every element is sent, and base is 0.
    """
    levels, high, low = np.float32(levels_of(bits)), magnitude_K.max(), magnitude_K.min()
    base = np.float32(0)
    if not indices:
        step = high / levels
    elif bits in FITTED:
        a, b = FITTED[bits]  # base is about low + a (mean - low), step b (mean - low)
        spread = mean_of(magnitude_K) - low
        # 2 low and high / 2 keep `x - sent` exact: base is at most twice the smallest magnitude,
        # and the highest level at least half of the largest one.
        base = down(min(low + a * spread, np.float32(2) * low))
        step = max(b * spread, (high / np.float32(2) - base) / levels)
    else:
        base = down(low)
        step = (high - base) / levels
    step = up(step) if step > 0 else np.float32(0)
    with np.errstate(over="ignore"):  # an overflow to infinity compares right
        # With so small a base `x - sent` could need more bits than fp32 has.
        base = np.float32(0) if base * BASE_LIMIT < step else base
    return _bits(base) | _bits(step) >> 16


def quantise(x_K: np.ndarray, bits: int, *, indices: bool) -> QuantisedGroup:
    """Quantises a group of up to 128 fp32 values; with NaN or 2^120 or more in it, all become NaN.

    Example:
        >>> group = quantise(np.array([1.0, -1.25, 8.0], np.float32), 4, indices=True)
        >>> hex(group.scale_word), group.codes.tolist(), group.sent.tolist()
        ('0x3f803f80', [0, 8, 7], [1.0, -1.0, 8.0])
        >>> group.residual.tolist()
        [0.0, -0.25, 0.0]
    """
    magnitude_K = np.abs(x_K)
    if not np.all(magnitude_K < TOO_LARGE):
        codes = np.zeros(x_K.size, np.uint32)
        sent = dequantise(NAN_WORD, codes, bits)
        return QuantisedGroup(NAN_WORD, codes, sent, np.zeros_like(x_K))
    scale_word = scale_of(magnitude_K, bits, indices=indices)
    base, step = base_and_step(scale_word)
    # With step 0 the base is the only level: dividing by infinity gives every value j = 0.
    quotient = (magnitude_K - base) / (step if step > 0 else np.float32(np.inf))
    j = np.clip(np.rint(quotient), 0, levels_of(bits)).astype(np.uint32)
    codes = np.signbit(x_K).astype(np.uint32) << (bits - 1) | j
    sent = dequantise(scale_word, codes, bits)
    return QuantisedGroup(scale_word, codes, sent, x_K - sent)


def dequantise(scale_word: int, codes: np.ndarray, bits: int) -> np.ndarray:
    """Decodes codes to fp32 numbers; product and sum are each rounded (no fused multiply-add).

    The highest of a code's bits is the sign; the others are the level.
    """
    base, step = base_and_step(scale_word)
    j = (codes & levels_of(bits)).astype(np.float32)
    with np.errstate(all="ignore"):  # a peer's scale is not checked, and may be infinite
        value = base + j * step
    # abs: with a damaged scale a value may be below zero, and the sign is the code's.
    return np.where(codes >> (bits - 1) & 1, -np.abs(value), value)


def base_and_step(scale_word: int) -> tuple[np.float32, np.float32]:
    """The two halves of a scale word, as fp32."""
    return _float(scale_word & 0xFFFF_0000), _float(scale_word << 16 & 0xFFFF_FFFF)


def _bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)
