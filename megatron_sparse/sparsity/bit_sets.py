"""Sets of elements, one bit for each element: their sizes, unions and overlaps.

Shape suffixes: n ranks, W words. A word is 64 bits of a set, so a pass over the bits of N elements
reads N / 8 bytes a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_sparse.pricing.profile import union_counts

WORD_BITS = 64


def pack(elements_K: np.ndarray, numel: int) -> np.ndarray:
    """The set of some elements of [0, numel): uint64 words, ceil(numel / 64) of them.

    Args:
        elements_K: integers, in any order.
        numel: elements of the whole vector.

    Example:
        >>> pack(np.array([0, 65]), 70).tolist()
        [1, 2]
    """
    mask_N = np.zeros(-(-numel // WORD_BITS) * WORD_BITS, dtype=bool)
    mask_N[elements_K] = True
    return np.packbits(mask_N, bitorder="little").view("<u8").astype(np.uint64, copy=False)


def size_of(words_W: np.ndarray) -> int:
    """The number of elements in a set."""
    return int(np.bitwise_count(words_W).sum(dtype=np.int64))


def unions(words_nW: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The unions of k neighbouring ranks' sets, for each k of `union_counts`.

    The last neighbour of the last rank is rank 0, so that every rank is in as many unions as any
    other: means over the unions of k ranks then never fall as k grows.

    Args:
        words_nW: one set for each rank; not changed.

    Yields:
        k and its unions: [n, W], or [1, W] for k = n. Valid until the next one is asked for.
    """
    n = words_nW.shape[0]
    union_gW, held = words_nW, 1
    for k in union_counts(n):
        if k == n:
            yield n, np.bitwise_or.reduce(words_nW, axis=0, keepdims=True)
            return
        if k > held:
            union_gW, held = union_gW | np.roll(union_gW, -held, axis=0), k
        yield k, union_gW


def overlap_ratios(words_nW: np.ndarray, most_pairs: int) -> list[float]:
    """The overlap ratio of pairs of ranks: the size of the intersection over the smaller set's.

    ZEN, definition 3. Pairs with an empty set are left out.

    Args:
        words_nW: one set for each rank.
        most_pairs: limit; of more pairs, this many are taken, evenly spread over their list.
    """
    n = words_nW.shape[0]
    sizes = [size_of(words_W) for words_W in words_nW]
    first, second = np.triu_indices(n, k=1)
    if first.size > most_pairs:
        taken = np.arange(most_pairs) * first.size // most_pairs
        first, second = first[taken], second[taken]
    return [
        size_of(words_nW[a] & words_nW[b]) / min(sizes[a], sizes[b])
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
        if sizes[a] and sizes[b]
    ]
