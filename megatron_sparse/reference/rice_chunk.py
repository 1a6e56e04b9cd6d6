"""The words of a chunk of a Rice record in NumPy: values, and gaps between entries.

docs/wire-format.md specifies them. Numbers of few bits are stored as planes: word p of 32 numbers
has bit p of number i as its bit i.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_sparse.reference.prune import DTYPES, with_one_nan
from megatron_sparse.reference.rice_values import GROUP, dequantise, quantise
from megatron_sparse.wire import RICE_BITS, RICE_SPANS

PLANE = 32


@dataclass(frozen=True)
class RiceForm:
    """How entries are written.

    Attributes:
        value_dtype: dtype code, 0 to 6.
        log2_span: log2 of a chunk's elements, 12 to 24.
        indices: false for a value of every element.
    """

    value_dtype: int
    log2_span: int = RICE_SPANS[0]
    indices: bool = True


class WrongWords(ValueError):
    """The words of a chunk are not those of any entries; becomes a `WireFormatError`."""


def rice_parameter(numel: int, entries: int) -> int:
    """The r of a chunk: the smallest with `numel - entries <= entries 2^(r + 1)`.

    No r has a shorter worst case of `entries (r + 1) + (numel - entries) / 2^r` bits.

    Example:
        >>> rice_parameter(4096, 41), rice_parameter(4096, 2048)
        (6, 0)
    """
    r = 0
    while numel - entries > entries << (r + 1):
        r += 1
    return r


def index_words(index_K: np.ndarray, numel: int) -> np.ndarray:
    """The words of the gaps between K ascending elements of a chunk of `numel`.

    Example:
        >>> words = index_words(np.array([1, 2, 9]), 16)  # gaps 1, 0, 6; r = 2: 1, 0, 2 and 0, 0, 1
        >>> [bin(word) for word in words]
        ['0b1', '0b100', '0b1011']
    """
    if index_K.size == 0:
        return np.zeros(0, "<u4")
    r = rice_parameter(numel, index_K.size)
    gap_K = np.diff(index_K, prepend=-1) - 1
    ones_K = np.cumsum((gap_K >> r) + 1) - 1
    bits = np.zeros(int(-(-(ones_K[-1] + 1) // PLANE)) * PLANE, np.uint8)
    bits[ones_K] = 1
    unary = np.packbits(bits, bitorder="little").view("<u4")
    return np.concatenate([planes(gap_K & (1 << r) - 1, r), unary])


def planes(numbers_K: np.ndarray, bits: int) -> np.ndarray:
    """Bit planes: `bits` words for each 32 numbers, the last ones filled up with zeros.

    Example:
        >>> planes(np.array([1, 2, 3]), 2).tolist()
        [5, 6]
    """
    padded = np.zeros(_planes_of(numbers_K.size) * PLANE, np.uint32)
    padded[: numbers_K.size] = numbers_K
    rows = padded.reshape(-1, 1, PLANE) >> np.arange(bits, dtype=np.uint32).reshape(1, -1, 1) & 1
    packed = np.packbits(rows.astype(np.uint8).reshape(-1, PLANE), axis=1, bitorder="little")
    return packed.view("<u4").reshape(-1)


def value_words(x_K: torch.Tensor, form: RiceForm) -> tuple[np.ndarray, np.ndarray]:
    """The words of a chunk's values, and the fp32 values that they stand for."""
    if form.value_dtype not in RICE_BITS:
        dtype = DTYPES[form.value_dtype]
        values_K = x_K if x_K.dtype == dtype else with_one_nan(x_K, dtype)
        data = values_K.reshape(-1, 1).view(torch.uint8).numpy().tobytes()
        words = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), "<u4")
        return words, values_K.float().numpy()
    bits = RICE_BITS[form.value_dtype]
    words, sent = [np.zeros(0, "<u4")], [np.zeros(0, np.float32)]
    for begin in range(0, x_K.numel(), GROUP):
        group = quantise(x_K[begin : begin + GROUP].numpy(), bits, indices=form.indices)
        words += [np.array([group.scale_word], "<u4"), planes(group.codes, bits)]
        sent.append(group.sent)
    return np.concatenate(words), np.concatenate(sent)


def whole_words(numel: int, form: RiceForm) -> int:
    """Words of a record without indices."""
    span = 1 << form.log2_span
    full = words_of_values(span, form.value_dtype) * (numel // span)
    return full + words_of_values(numel % span, form.value_dtype)


def read_chunk(
    words: np.ndarray, entries: int, numel: int, form: RiceForm
) -> tuple[np.ndarray, np.ndarray]:
    """The elements of the chunk and their values."""
    values_end = words_of_values(entries, form.value_dtype)
    if not form.indices:
        return np.arange(numel), _read_values(words, entries, form.value_dtype)
    r = rice_parameter(numel, entries) if entries else 0
    unary_at = values_end + r * _planes_of(entries)
    if len(words) < unary_at + 1 if entries else len(words) > 0:
        raise WrongWords(f"{len(words)} words for {entries} entries")
    values = _read_values(words[:values_end], entries, form.value_dtype)
    if entries == 0:
        return np.zeros(0, np.int64), values
    remainders = from_planes(words[values_end:unary_at], r).astype(np.int64)
    if remainders[entries:].any():
        raise WrongWords("the padding of remainders is not zero")
    unary = words[unary_at:]
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    if ones.size != entries or unary[-1] == 0:
        raise WrongWords(f"{ones.size} ones for {entries} entries, last word {unary[-1]:#x}")
    gaps = (np.diff(ones, prepend=-1) - 1 << r) + (remainders[:entries] if r else 0)
    index = np.cumsum(gaps + 1) - 1
    if index[-1] >= numel:
        raise WrongWords(f"element {index[-1]} of {numel}")
    return index, values


def _read_values(words: np.ndarray, count: int, value_dtype: int) -> np.ndarray:
    if count == 0:
        return np.zeros(0, np.float32)
    if value_dtype not in RICE_BITS:
        data = bytearray(words.tobytes())
        return torch.frombuffer(data, dtype=DTYPES[value_dtype], count=count).float().numpy()
    bits, values, at = RICE_BITS[value_dtype], [], 0
    for begin in range(0, count, GROUP):
        size = min(GROUP, count - begin)
        end = at + 1 + bits * _planes_of(size)
        codes = from_planes(words[at + 1 : end], bits)[:size]
        values.append(dequantise(int(words[at]), codes, bits))
        at = end
    return np.concatenate(values)


def from_planes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `planes`: uint32 numbers, with those that fill up the last 32."""
    if bits == 0:
        return np.zeros(0, np.uint32)
    rows = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, bits, PLANE)
    weights = np.uint32(1) << np.arange(bits, dtype=np.uint32).reshape(1, -1, 1)
    return (rows * weights).sum(axis=1, dtype=np.uint32).reshape(-1)


def _planes_of(count: int) -> int:
    return -(-count // PLANE)


def words_of_values(count: int, value_dtype: int) -> int:
    """Words of the values of a chunk.

    Example:
        >>> words_of_values(130, 4)  # two scales, 4 words for each of 5 times 32
        22
    """
    if value_dtype in RICE_BITS:
        return -(-count // GROUP) + RICE_BITS[value_dtype] * _planes_of(count)
    return -(-count * DTYPES[value_dtype].itemsize // 4)
