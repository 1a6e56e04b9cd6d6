"""`bench bits`: bits of an entry in a record, and errors of quantised values.

Two tables. The first has, for entries at random places, the entropy of their positions,
H(p) / p = -log2 p - (1 - p) / p log2 (1 - p) bits at a density p, then the bits that positions take
in records of format Rice (with the table of chunks and all roundings), COO and Pici, then whole
Rice records for each kind of values, header included.

The second quantises the largest part of a distribution, as pruning leaves it, in groups of 128:
root mean square of the error over that of the values, for `levels` that divide 0 to the largest
magnitude evenly, scale unrounded, and for those of Rice records (docs/wire-format.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from megatron_sparse.bench.codec.options import BitsSweep
from megatron_sparse.bench.row import CellRow, cell
from megatron_sparse.bench.table import local
from megatron_sparse.reference.rice import SUB_HEADER
from megatron_sparse.reference.rice_chunk import index_words, words_of_values
from megatron_sparse.reference.rice_values import GROUP, levels_of, quantise
from megatron_sparse.wire import (
    FORMAT_COO,
    FORMAT_PICI,
    HEADER_BYTES,
    RICE_BITS,
    pad16,
    payload_bytes,
    rice_span,
)

TARGET = 1.05
"""Bits of the positions over their entropy, at most, at densities of 0.1 to 10 %."""
VALUE_DTYPES = {"fp32": 0, "bf16": 1, "q8": 3, "q4": 4, "q3": 5, "q2": 6}
DISTRIBUTIONS = ("normal", "laplace")


@dataclass
class BitsRow(CellRow):
    """Bits an entry; one line of the first table and one JSON object.

    `rice`, `coo` and `pici` are of positions in such records; the others are of whole Rice records
    with such values (fp16 has as many bits as bf16).
    """

    count: int = cell("elements", ">10")
    density: float = cell("asked for", ">8g")
    entries: int = cell("elements that were drawn")
    entropy: float = cell("H(p) / p at entries / count", ">8.2f")
    rice: float = cell("positions", ">7.2f | rice/entropy >6.3f ratio")
    coo: float = cell("positions", ">7.2f")
    pici: float = cell("positions", ">8.2f")
    fp32: float = cell("a record", ">7.2f")
    bf16: float = cell("a record", ">7.2f")
    q8: float = cell("a record", ">7.2f")
    q4: float = cell("a record", ">7.2f")
    q3: float = cell("a record", ">7.2f")
    q2: float = cell("a record", ">7.2f")

    @property
    def bad(self) -> bool:
        """Whether positions miss their target."""
        return 0.001 <= self.density <= 0.1 and self.rice > TARGET * self.entropy


@dataclass
class ErrorRow(CellRow):
    """Relative errors; one line of the second table and one JSON object."""

    distribution: str = cell("`normal` or `laplace`", "<12")
    tail: float = cell("the largest part that is quantised", ">6g")
    bits: int = cell("of a code", ">5")
    even: float = cell("error of even levels from 0 on", ">8.4f")
    fitted: float = cell("of the levels of Rice records", ">8.4f | fitted/even >7.2f ratio")


def bits_row(count: int, density: float) -> BitsRow:
    """The row of entries at random places; at least one entry, the first element."""
    kept = np.random.default_rng(0).random(count, dtype=np.float32) < density
    kept[0] |= not kept.any()
    index, span = np.flatnonzero(kept), 1 << rice_span(density)
    begins = np.arange(0, count, span)
    borders = np.searchsorted(index, np.append(begins, count))
    parts = [index[a:b] for a, b in pairwise(borders)]
    words = sum(
        index_words(part - begin, min(span, count - begin)).size
        for begin, part in zip(begins.tolist(), parts, strict=True)
    )
    table_bytes = SUB_HEADER.size + pad16(8 * (len(parts) + 1))

    def record_bits(value_dtype: int) -> float:
        values = sum(words_of_values(part.size, value_dtype) for part in parts)
        return 8 * (HEADER_BYTES + table_bytes + pad16(4 * (values + words))) / index.size

    entries, sections = index.size, pad16(4 * index.size)
    return BitsRow(
        count=count,
        density=density,
        entries=entries,
        entropy=entropy(entries / count),
        rice=8 * (table_bytes + pad16(4 * words)) / entries,
        coo=8 * (payload_bytes(FORMAT_COO, count, entries, 0) - sections) / entries,
        pici=8 * (payload_bytes(FORMAT_PICI, count, entries, 0) - sections) / entries,
        **{name: record_bits(code) for name, code in VALUE_DTYPES.items()},
    )


def entropy(density: float) -> float:
    """Bits an entry that random positions need at least.

    Example:
        >>> entropy(0.5), round(entropy(0.01), 2)
        (2.0, 8.08)
    """
    if density == 1:
        return 0.0
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)


def error_rows(tails: Sequence[float], groups: int) -> Iterator[ErrorRow]:
    """The rows of all distributions, tails and bits."""
    for distribution, tail in product(DISTRIBUTIONS, tails):
        x = _tail(distribution, tail, groups)
        for bits in RICE_BITS.values():
            fitted = np.stack([quantise(group, bits, indices=True).residual for group in x])
            step = np.abs(x).max(axis=1, keepdims=True) / levels_of(bits)
            even = x - np.rint(x / step) * step
            size = _rms(x)
            yield ErrorRow(distribution, tail, bits, _rms(even) / size, _rms(fitted) / size)


def _tail(distribution: str, tail: float, groups: int) -> np.ndarray:
    """[groups, 128] fp32 values, the largest of random ones, in random order."""
    rng, count = np.random.default_rng(0), groups * GROUP
    drawn = math.ceil(count / tail)
    x = rng.standard_normal(drawn) if distribution == "normal" else rng.laplace(size=drawn)
    threshold = np.partition(np.abs(x), drawn - count)[drawn - count]
    return x[np.abs(x) >= threshold][:count].reshape(groups, GROUP).astype(np.float32)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def _rows(sweep: BitsSweep) -> Iterator[BitsRow | ErrorRow]:
    for case in product(sweep.elements, sweep.densities):
        yield bits_row(*case)
    yield from error_rows(sweep.tails, sweep.groups)


run = local(
    "bits an entry: entropy and positions, whole Rice records by their values; then errors of "
    "quantised values, relative, root mean square",
    _rows,
)
