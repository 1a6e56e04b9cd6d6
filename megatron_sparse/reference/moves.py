"""How far parameters moved, step by step in NumPy: the oracle of `formats.moves`' records.

docs/parameters.md specifies the record. A number's *move* is the difference of its old and new bit
pattern as ordered integers; the coder stores moves in zigzag order (0, -1, 1, -2, ...). `rans` is
rANS (Duda, arXiv 1311.2540) with 32 interleaved 32-bit states a chunk and 16-bit words. The old
number's exponent chooses its context: one of 16 frequency tables, for 16 adjacent exponents.
"""

import struct

import numpy as np

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import padded
from megatron_sparse.reference.checksum import mixed_sum
from megatron_sparse.wire import FORMAT_MOVES, MOVES_CODERS

STATES = 32
RANS_CHUNK = 16384
SCALE_BITS = 12
CONTEXTS = 16
DIRECT = 16
LOWEST_STATE = 1 << 16
SAMPLES = 4096
COUNT_BLOCK, COUNT_STRIDE, COUNT_ALL = 1024, 4, 1 << 19
MANTISSA_BITS = (23, 7, 10)
BITS = (32, 16, 16)
SUB_HEADER = struct.Struct("<IIIBBBB")
"""Checksum, chunks, bytes of the frequency table, base exponent, three zeros."""


def ordered(bits: np.ndarray, dtype: int) -> np.ndarray:
    """Integers in the order of the numbers, below 2^bits; -0.0 comes right before +0.0."""
    top = 1 << (BITS[dtype] - 1)
    return np.where(bits & top, ~bits, bits | top) & mask(dtype)


def mask(dtype: int) -> int:
    """All bits of a number."""
    return (1 << BITS[dtype]) - 1


def zigzag(old: np.ndarray, new: np.ndarray, dtype: int) -> np.ndarray:
    """The moves as 0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
    top = 1 << (BITS[dtype] - 1)
    move = (ordered(new, dtype) - ordered(old, dtype) + top & mask(dtype)) - top
    return np.where(move < 0, -2 * move - 1, 2 * move)


def directions(old: np.ndarray, new: np.ndarray, dtype: int, down: np.ndarray) -> np.ndarray:
    """Whether each number's last move was down: this one's, or `down` where it stays."""
    move = ordered(new, dtype) - ordered(old, dtype)
    return np.where(move == 0, down, move < 0)


def exponents(bits: np.ndarray, dtype: int) -> np.ndarray:
    """The exponent fields."""
    mantissa = MANTISSA_BITS[dtype]
    return bits >> mantissa & (1 << (BITS[dtype] - 1 - mantissa)) - 1


def base_exponent(old: np.ndarray, dtype: int) -> int:
    """Chooses from a sample of numbers the exponent that belongs to context 0.

    At most one in 256 sampled numbers may have an exponent above that of context 15.
    """
    count = min(SAMPLES, old.size)
    sampled = old[np.arange(count) * old.size // count]  # evenly spread
    counts = np.bincount(exponents(sampled, dtype), minlength=256)
    top, above = 255, 0  # the exponent of context 15, and how many numbers lie above it
    while top > 0 and above + counts[top] <= count // 256:
        above += counts[top]
        top -= 1
    return max(top - (CONTEXTS - 1), 0)


def contexts(old: np.ndarray, base: int, dtype: int) -> np.ndarray:
    """The number of the frequency table for each number."""
    return np.clip(exponents(old, dtype) - base, 0, CONTEXTS - 1)


def symbols(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits each move `z` (in zigzag order) into a symbol, a number of raw bits, and these bits.

    Below 16 the symbol is `z` itself; from 16 on there are two symbols for each power of two, one
    for each sign. The raw bits are those of `z >> 1` behind its highest.

    Example:
        >>> [int(a[0]) for a in symbols(np.array([31]))]  # z >> 1 is 15 = 8 + 7
        [17, 3, 7]
    """
    magnitude, sign = z >> 1, z & 1
    log2 = np.frexp(magnitude.astype(np.float64))[1] - 1  # exact: fewer than 53 bits
    raw_bits = np.where(z < DIRECT, 0, log2)
    symbol = np.where(z < DIRECT, z, 2 * raw_bits + 10 + sign)  # z = 16 is symbol 16
    return symbol, raw_bits, magnitude & (1 << raw_bits) - 1


def quantise(counts: np.ndarray) -> np.ndarray:
    """Scales counts of symbols to frequencies that sum to 2^SCALE_BITS, as rANS needs.

    A symbol that occurs gets at least 1. If rounding misses the sum, the largest frequencies are
    changed. Without any count all are 0.
    """
    total = int(counts.sum())
    frequencies = np.zeros(counts.size, np.int64)
    if total == 0:
        return frequencies
    for symbol, count in enumerate(map(int, counts)):
        if count:
            rounded = ((count << SCALE_BITS) + total // 2) // total
            frequencies[symbol] = max(1, rounded)
    rest = (1 << SCALE_BITS) - int(frequencies.sum())
    if rest > 0:
        frequencies[np.argmax(frequencies)] += rest
    for _ in range(-rest):
        frequencies[np.argmax(frequencies)] -= 1  # the first of the largest
    return frequencies


def rans_encode(
    z: np.ndarray, context: np.ndarray, frequencies: np.ndarray, starts: np.ndarray
) -> bytes:
    """Encodes a chunk by rANS: the states from which decoding begins, then its words; no padding.

    The decoder reads, for every 32 numbers, the words of all states for the symbols, then those for
    the lower 16 raw bits, then those for the upper ones. rANS encodes in the reverse of that order.
    Suffix L: a lane for each of the 32 states.

    Args:
        z: the moves, as `zigzag` makes them.
        context: for each number the row of its frequency table.
        frequencies: [contexts, symbols].
        starts: [contexts, symbols], the sums of the frequencies before each symbol.
    """
    words: list[np.ndarray] = []
    state = np.full(STATES, LOWEST_STATE, np.int64)

    def emit(full: np.ndarray) -> None:
        """Moves the lower 16 bits of the `full` states, which have no room left, to the words."""
        nonlocal state
        words.append((state & 0xFFFF)[full])
        state = np.where(full, state >> 16, state)

    symbol, raw_bits, raw = symbols(z)
    for begin in reversed(range(0, z.size, STATES)):
        step = slice(begin, begin + STATES)
        idle = STATES - z[step].size  # lanes without a number
        busy_L = np.arange(STATES) < STATES - idle
        bits_L, raw_L, symbol_L, context_L = (
            np.pad(numbers[step], (0, idle)) for numbers in (raw_bits, raw, symbol, context)
        )
        low_bits_L = np.minimum(bits_L, 16)
        lower = low_bits_L, raw_L & (1 << low_bits_L) - 1  # how many raw bits, and these bits
        upper = bits_L - low_bits_L, raw_L >> low_bits_L
        for bits, value in (upper, lower):
            emit(busy_L & (state >> 32 - bits != 0))  # no room for `bits` more in 32
            state = np.where(busy_L, state << bits | value, state)
        frequency_L, start_L = frequencies[context_L, symbol_L], starts[context_L, symbol_L]
        emit(busy_L & (state >> 32 - SCALE_BITS >= frequency_L))  # `coded` would exceed 32 bits
        frequency_L = np.maximum(frequency_L, 1)  # idle lanes must not divide by 0
        coded = (state // frequency_L << SCALE_BITS) + state % frequency_L + start_L
        state = np.where(busy_L, coded, state)
    # In the decoder's order; the empty array is for a chunk without words.
    stream = np.concatenate([*words[::-1], np.empty(0)]).astype("<u2")
    return state.astype("<u4").tobytes() + stream.tobytes()


def checksum(body: bytes) -> int:
    """The sum of mixed words of what follows a header, without the first: the checksum's own."""
    return mixed_sum(body[4:], 1)


def encode(
    old: np.ndarray, new: np.ndarray, dtype: int, epoch: int, down: np.ndarray | None = None
) -> bytes:
    """Encodes the moves from `old` to `new`, both given as unsigned bit patterns.

    Numbers whose last move was `down` (booleans; None: none of them) are mirrored, both the old and
    the new ones: their signs flip, so their moves turn round.

    Each chunk of a "rans" record is coded by rANS or raw, whichever is shorter. Where the "rans"
    record would not be shorter than the raw numbers, the record is "raw".
    """
    old, new = old.astype(np.int64), new.astype(np.int64)
    raw = padded(_raw(new, dtype))
    sections, base, chunks, table = raw, 0, 0, b""  # for a record without numbers
    if old.size:
        mirror = 0 if down is None else np.where(down, 1 << (BITS[dtype] - 1), 0)
        z = zigzag(old ^ mirror, new ^ mirror, dtype)
        slices = [slice(begin, begin + RANS_CHUNK) for begin in range(0, old.size, RANS_CHUNK)]
        base = base_exponent(old, dtype)
        context = contexts(old, base, dtype)
        frequencies = _frequencies(z, context, dtype)
        starts = np.cumsum(frequencies, axis=1) - frequencies
        table = _pack_table(frequencies)
        written = []
        for chunk in slices:
            coded = padded(rans_encode(z[chunk], context[chunk], frequencies, starts))
            written.append(min(padded(_raw(new[chunk], dtype)), coded, key=len))  # raw in a tie
        ends = np.cumsum([len(coded) // 16 for coded in written])  # in units of 16 bytes
        offsets = np.array([0, *ends]).astype("<u4").tobytes()
        sections, chunks = padded(offsets) + padded(table) + b"".join(written), len(slices)
    coder = "rans"
    if len(sections) >= len(raw):
        sections, base, chunks, table, coder = raw, 0, 0, b"", "raw"
    body = SUB_HEADER.pack(0, chunks, len(table), base, 0, 0, 0) + sections
    body = struct.pack("<I", checksum(body)) + body[4:]  # replaces the first field, so far 0
    header = Header(
        FORMAT_MOVES, dtype, old.size, 0, len(body), 0, epoch, flags=MOVES_CODERS.index(coder)
    )
    return header.pack() + body


def symbol_count(dtype: int) -> int:
    """Symbols of an alphabet: 40 for 16 bits, 72 for 32."""
    return 2 * BITS[dtype] + 8


def _frequencies(z: np.ndarray, context: np.ndarray, dtype: int) -> np.ndarray:
    """Frequencies [contexts, symbols] of the symbols of `z`; each row sums to 2^SCALE_BITS or 0."""
    count, symbol = symbol_count(dtype), symbols(z)[0]
    key, extra = context * count + symbol, 0
    if z.size > COUNT_ALL:  # counts a quarter of the blocks, and 1 more for each symbol
        key, extra = key[np.arange(z.size) // COUNT_BLOCK % COUNT_STRIDE == 0], 1
    counts = np.bincount(key, minlength=CONTEXTS * count) + extra
    return np.stack([quantise(row) for row in counts.reshape(CONTEXTS, count)])


def _pack_table(frequencies: np.ndarray) -> bytes:
    sizes = [int(np.max(np.flatnonzero(row), initial=-1)) + 1 for row in frequencies]
    rows = [row[:size] for row, size in zip(frequencies, sizes, strict=True)]
    return bytes(sizes) + np.concatenate(rows).astype("<u2").tobytes()


def _raw(bits: np.ndarray, dtype: int) -> bytes:
    return bits.astype(f"<u{BITS[dtype] // 8}").tobytes()
