"""Local-to-global index matching: the versions of "Sparse All-Reduce in PyTorch" against the merge.

Each version gets the row indices of one rank and the union of all ranks', and returns where each
local index stands in the union. On the CPU, in torch operations; the blog's kernels run on a GPU,
so what carries over is how the work grows, not the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_sparse.formats import row_sparse

BROADCAST_LIMIT = 2**28
"""Comparisons, and bytes, that the broadcast version may take."""


@dataclass(frozen=True)
class MatchTiming:
    """One version's result on one problem.

    Attributes:
        version: its name.
        count: local indices.
        union: indices in the union.
        time_us: median of the repetitions.
        wrong: positions that differ from `torch.searchsorted`'s.
    """

    version: str
    count: int
    union: int
    time_us: float
    wrong: int


def match_broadcast(local_K: torch.Tensor, union_U: torch.Tensor) -> torch.Tensor:
    """Version 4: compares each local index with each of the union; U K bytes of memory."""
    return torch.eq(union_U.unsqueeze(1), local_K.unsqueeze(0)).byte().argmax(0)


def match_tiles(
    local_K: torch.Tensor, union_U: torch.Tensor, block: int = 64, tile: int = 4096
) -> torch.Tensor:
    """Version 6, the last: blocks of local indices against tiles of the union.

    As there, a block starts at the first tile that can hold a match (an index never stands further
    left in the union than in a subset of it) and stops when all of its indices are found.
    """
    position_K = torch.empty_like(local_K)
    for begin in range(0, local_K.numel(), block):
        wanted = local_K[begin : begin + block]
        left, at = wanted.numel(), begin // tile * tile
        while left:
            hits = (wanted.unsqueeze(1) == union_U[at : at + tile].unsqueeze(0)).nonzero()
            position_K[begin + hits[:, 0]] = at + hits[:, 1]
            left -= hits.shape[0]
            at += tile
    return position_K


def match_search(local_K: torch.Tensor, union_U: torch.Tensor) -> torch.Tensor:
    """A binary search for each local index: O(K log U)."""
    return torch.searchsorted(union_U, local_K)


VERSIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "v4 broadcast": match_broadcast,
    "v6 tiles": match_tiles,
    "searchsorted": match_search,
    "merge": row_sparse.match,
}


def compare_matching(
    num_rows: int, rows_per_rank: int, ranks: int, *, repetitions: int = 5, seed: int = 0
) -> list[MatchTiming]:
    """Times every version on random rows of `ranks` ranks.

    Args:
        num_rows: rows of the embedding.
        rows_per_rank: rows that each rank touched, at most `num_rows`.
        ranks: how many ranks.
        repetitions: timed calls after one for warming up.
        seed: of the rows.

    Returns:
        One result for each version; the broadcast is left out where it would make more than
        `BROADCAST_LIMIT` comparisons.
    """
    generator = torch.Generator().manual_seed(seed)
    sets = [
        torch.randperm(num_rows, generator=generator)[:rows_per_rank].sort().values
        for _ in range(ranks)
    ]
    union_U = row_sparse.union(sets, num_rows)
    local_K, expected = sets[0], match_search(sets[0], union_U)
    results = []
    for name, version in VERSIONS.items():
        if version is match_broadcast and local_K.numel() * union_U.numel() > BROADCAST_LIMIT:
            continue
        wrong = int((version(local_K, union_U) != expected).sum())
        times = []
        for _ in range(repetitions):
            start_s = time.perf_counter()
            version(local_K, union_U)
            times.append((time.perf_counter() - start_s) * 1e6)
        median_us = statistics.median(times)
        results.append(MatchTiming(name, local_K.numel(), union_U.numel(), median_us, wrong))
    return results
