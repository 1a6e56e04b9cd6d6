"""Measures the sparsity of one bucket's gradients: ZEN's characteristics C1, C2 and C3.

ZEN (section 2.1): the density of a rank's gradient (definition 2); the overlap ratio of two ranks'
(definition 3); the densification ratio of the sum of k ranks' (definition 4); the skewness ratio
over even, contiguous partitions (definition 5). In addition, the fractions of blocks that hold a
non-zero element, which decide about the bytes that OmniReduce sends.

`profile_of` is exact; `sparsity.sampling` estimates the same numbers in training. A sum's non-zero
elements are those that are non-zero on some rank; values that cancel one another are not detected.
`-0.0` counts as zero, NaN does not.

A set of elements is held as one bit for each element, 64 in a word, so a pass over the bits of N
elements reads N / 8 bytes a rank. Shape suffixes: n ranks, W words.

Deviations: definition 4 with k below the number of ranks is the mean over groups of k neighbouring
ranks; definition 5 is the mean over ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.pricing.profile import (
    BLOCK_SIZES,
    SparsityProfile,
    partition_counts,
    quantiles,
    union_counts,
)

WORD_BITS = 64
MOST_PAIRS = 64 * 63 // 2
"""The most pairs of ranks whose overlap is measured: all pairs of 64 ranks."""


def pack(elements_K: np.ndarray, numel: int) -> np.ndarray:
    """Packs a set of elements of [0, numel), in any order, into ceil(numel / 64) uint64 words.

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

    Rank 0 follows the last rank, so that every rank is in as many unions as any other: means over
    the unions of k ranks then never fall as k grows.

    Args:
        words_nW: one set for each rank; not changed.

    Yields:
        k and its unions: [n, W], or [1, W] for k = n. Read only: may be `words_nW` itself.
    """
    n = words_nW.shape[0]
    union_gW, joined = words_nW, 1  # row r: the union of `joined` ranks from r on
    for k in union_counts(n):
        if k == n:
            yield n, np.bitwise_or.reduce(words_nW, axis=0, keepdims=True)
            return
        if k > joined:  # k is twice `joined`: join each union with that of the next ranks
            union_gW, joined = union_gW | np.roll(union_gW, -joined, axis=0), k
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
    first, second = np.triu_indices(n, k=1)  # the ranks of each pair
    if first.size > most_pairs:
        taken = np.arange(most_pairs) * first.size // most_pairs
        first, second = first[taken], second[taken]
    ratios = []
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        smaller = min(sizes[a], sizes[b])
        if smaller:
            ratios.append(size_of(words_nW[a] & words_nW[b]) / smaller)
    return ratios


def nonzero_elements(gradient: torch.Tensor) -> np.ndarray:
    """The elements that are not zero: int64, ascending, counted in row-major order.

    Args:
        gradient: dense, or torch's sparse COO (an embedding's rows too); on any device, for which
            the CPU waits.
    """
    return gradient.detach().to_dense().flatten().nonzero().squeeze(1).cpu().numpy()


def union_of(elements: Sequence[np.ndarray], numel: int) -> np.ndarray:
    """The union of each rank's elements of [0, numel): int64, ascending.

    It takes one byte of memory for each of the `numel` elements of the vector.
    """
    mask_N = np.zeros(numel, dtype=bool)
    for own_K in elements:
        mask_N[own_K] = True
    return np.flatnonzero(mask_N)


def profile_of(elements: Sequence[np.ndarray], numel: int) -> SparsityProfile:
    """The exact profile of all ranks' gradients of one bucket.

    Memory, with N elements in a gradient: N / 2 bytes for each rank, and N bytes for a mask. Time:
    n log n passes over N / 8 bytes, and one for each pair of ranks, at most `MOST_PAIRS`.

    Args:
        elements: of each rank, at least one, the non-zero elements (`nonzero_elements`): int64,
            ascending, in [0, numel).
        numel: of the whole gradient.

    Example:
        >>> profile = profile_of([np.array([0, 1]), np.array([0])], 4)
        >>> profile.density, profile.densification[2], profile.overlap[2]
        (0.375, 1.3333333333333333, 1.0)
    """
    n = len(elements)
    words_nW = np.stack([pack(own_K, numel) for own_K in elements])
    nnz = sum(own_K.size for own_K in elements)
    # k -> non-zero elements of the sum of k ranks, the mean over the groups of k neighbours.
    nnz_of_sum = {k: sum(map(size_of, sets)) / len(sets) for k, sets in unions(words_nW)}
    sum_K = union_of(elements, numel)
    mean_nnz = nnz / n
    return SparsityProfile(
        numel=numel,
        world_size=n,
        density=mean_nnz / numel if numel else 0.0,
        densification={k: size / mean_nnz if nnz else 1.0 for k, size in nnz_of_sum.items()},
        skewness=_mean([_skewness(own_K, numel, n) for own_K in elements]),
        sum_skewness=_skewness(sum_K, numel, n),
        overlap=quantiles(overlap_ratios(words_nW, MOST_PAIRS)),
        block_density=_mean([_blocks(own_K, numel) for own_K in elements]),
        sum_block_density=_blocks(sum_K, numel),
    )


def _mean(by_rank: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over ranks of the number under each key; all ranks have the same keys."""
    return {key: sum(found[key] for found in by_rank) / len(by_rank) for key in by_rank[0]}


def _skewness(elements_K: np.ndarray, numel: int, n: int) -> dict[int, float]:
    """The skewness ratio of the elements over p partitions, for each p of `partition_counts`."""
    return {
        p: skewness_ratio(counts_between(elements_K, even_cuts(numel, p)), numel)
        for p in partition_counts(numel, n)
    }


def _blocks(elements_K: np.ndarray, numel: int) -> dict[int, float]:
    """The fraction of blocks that hold an element, by size."""
    return {size: block_fraction(elements_K, numel, size) for size in BLOCK_SIZES}


def counts_between(elements_K: np.ndarray, cuts: Sequence[int]) -> list[int]:
    """How many of some ascending elements lie between each cut and the next."""
    return np.diff(np.searchsorted(elements_K, cuts)).tolist()


def skewness_ratio(counts: Sequence[float], numel: int) -> float:
    """The densest partition's density over the whole's (definition 5); 1 without any element.

    Args:
        counts: non-zero elements of each of the even partitions.
        numel: elements of them all.
    """
    total = sum(counts)
    if not total:
        return 1.0
    sizes = [stop - start for start, stop in pairwise(even_cuts(numel, len(counts)))]
    densest = max(count / size for count, size in zip(counts, sizes, strict=True))
    return densest / (total / numel)


def block_fraction(elements_K: np.ndarray, numel: int, size: int) -> float:
    """The fraction of blocks of `size` elements that hold any of `elements_K`, which ascend."""
    blocks = -(-numel // size)
    if not elements_K.size:
        return 0.0
    block_K = elements_K // size  # ascending: each change begins another block
    return (1 + int(np.count_nonzero(np.diff(block_K)))) / blocks
