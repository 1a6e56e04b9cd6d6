"""ZEN's figures 2, 3, 8, 16 and 17 for the user's own gradients, from a recording.

Figures 2 and 3 show the recording, 17 counts its bytes, and 16 times this machine's CPU on it.
Figure 8 is a MODEL as in `simulate.zen`: bytes on the busiest port only, with up to as many ranks
as were recorded.

Deviations: the paper measured its figure 16 on a V100. Its figure 17b shows the speedup of
    training, which depends on the rest of an iteration. Here 17b shows the speedup of
    synchronisation, computed from the bytes that the busiest rank receives.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.formats.hash_partition import HASH_SEED, PermutationHash
from megatron_sparse.formats.hierarchical_hash import hierarchical_hash
from megatron_sparse.pricing.profile import union_counts
from megatron_sparse.simulate.figures import (
    MODEL,
    Canvas,
    Draw,
    Figure,
    Row,
    draw_bars,
    draw_lines,
    groups,
    line_panels,
    panels,
    shared_legend,
    styles_of,
    write_numbers,
)
from megatron_sparse.simulate.machines import BANDWIDTH_ONLY
from megatron_sparse.simulate.pricing import Job
from megatron_sparse.simulate.zen import draw_normalised, outcomes_8
from megatron_sparse.sparsity.balance import Sample
from megatron_sparse.sparsity.characteristics import counts_between, overlap_ratios, pack

MOST_SERIES, MOST_DENSITY = 6, 0.5
MOST_SIMULATED = 2**20
"""Elements that figure 8 simulates; evenly spread pieces represent a larger bucket."""
PIECE_NUMEL = 256
MOST_HASHED, REPETITIONS = 2**18, 7
"""Entries that figure 16 hashes, and the number of repetitions."""
BINS, PARTITIONS, OMNIREDUCE_BLOCK = 25, 8, 256
RECORDED = "recorded gradients"
LABELS = {
    2: RECORDED,
    3: RECORDED,
    8: MODEL,
    16: "measured on this machine's CPU",
    17: f"counted on the {RECORDED}",
}
"""The source of each figure's numbers."""


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """The figures of a recording; `Figure.make` writes them.

    Args:
        samples: of at least one bucket. Those with the most non-zero elements are drawn.
    """
    by_bucket: dict[str, list[Sample]] = {}
    for sample in samples:
        by_bucket.setdefault(sample.bucket, []).append(sample)
    nnz = {}  # of all ranks, in the first sample
    for name, members in by_bucket.items():
        nnz[name] = sum(of_rank_K.size for of_rank_K in members[0].elements)
    fullest = heapq.nlargest(MOST_SERIES, nnz, key=nnz.__getitem__)
    shown = {name: by_bucket[name] for name in sorted(fullest)}
    # A scheme synchronises single buckets, so "all" is left out; a dense bucket shows nothing.
    single = [name for name in nnz if name.rpartition("/")[2] != "all"]
    sparse = [name for name in single if by_bucket[name][0].profile.density < MOST_DENSITY]
    largest = by_bucket[max(sparse or single, key=lambda name: nnz[name])][0]
    ranks = largest.profile.world_size

    which = f"bucket {largest.bucket}, {ranks} ranks"
    port = f"bytes on the busiest port only; {which}"
    steps, free = "sizes of formats, what each step gains", "bytes, no latency or codec time"
    # Number, title, assumptions, rows and drawing; a recording has no smaller sweep.
    found: list[tuple[int, str, str, Callable[[bool], list[Row]], Draw]] = [
        (2, "overlap ratios, densification", f"{ranks} ranks", lambda _: rows_2(shown), draw_2),
        (3, "where non-zeros lie, skewness", "mean over ranks", lambda _: rows_3(shown), draw_3),
        (8, "synchronisation", port, lambda _: rows_8(largest), draw_normalised),
        (16, "cost of Algorithm 1", which, lambda _: rows_16(largest), draw_16),
        (17, steps, free, lambda _: rows_17(shown, largest), draw_17),
    ]
    return [
        Figure("zen", n, f"ZEN figure {n}: {what}", given, rows, draw, label=LABELS[n])
        for n, what, given, rows, draw in found
        if n != 8 or ranks > 1  # one rank synchronises nothing
    ]


def _row(panel: str, series: str, x: float | str, y: float) -> Row:
    return {"panel": panel, "series": series, "x": x, "y": y}


def rows_2(shown: dict[str, list[Sample]]) -> list[Row]:
    """a: probability density of the overlap ratios of all pairs; b: mean densification ratio."""
    rows = []
    for name, members in shown.items():
        ratios: list[float] = []
        for sample in members:
            # A bitmap of each rank's non-zero elements.
            words_nW = np.stack([pack(of_rank_K, sample.numel) for of_rank_K in sample.elements])
            ratios += overlap_ratios(words_nW, len(words_nW) ** 2)  # of all pairs: no limit
        heights, edges = np.histogram(ratios, bins=BINS, range=(0, 1))
        width = 1 / BINS
        rows += [
            _row("a", name, float(edge) + width / 2, height / max(len(ratios), 1) / width)
            for edge, height in zip(edges[:-1], heights.tolist(), strict=True)
        ]
        rows += [
            _row("b", name, k, statistics.fmean(s.profile.densification[k] for s in members))
            for k in union_counts(members[0].profile.world_size)
        ]
    return rows


def rows_3(shown: dict[str, list[Sample]]) -> list[Row]:
    """a: percent of the non-zero elements in each of eight partitions; b: skewness ratio."""
    rows = []
    for name, members in shown.items():
        cuts = even_cuts(members[0].numel, PARTITIONS)
        counts = np.zeros(PARTITIONS, dtype=np.int64)
        for sample in members:
            for of_rank_K in sample.elements:
                counts += np.array(counts_between(of_rank_K, cuts))
        total = max(int(counts.sum()), 1)
        rows += [
            _row("a", name, number, 100 * count / total)
            for number, count in enumerate(counts.tolist(), 1)
        ]
        rows += [
            _row("b", name, p, statistics.fmean(s.profile.skewness[p] for s in members))
            for p in members[0].profile.skewness
        ]
    return rows


def thinned(elements_K: np.ndarray, numel: int, most: int) -> tuple[np.ndarray, int]:
    """Evenly spread pieces of a gradient, put together: they keep its density, overlap and skew.

    Args:
        elements_K: its non-zero elements, ascending.
        numel: its size.
        most: the most elements of the result.

    Returns:
        The result's non-zero elements, and its size.
    """
    if numel <= most:
        return elements_K, numel
    # The numbers of the pieces that are taken, and each element's piece and its place among them.
    taken = np.arange(most // PIECE_NUMEL) * (numel // PIECE_NUMEL) // (most // PIECE_NUMEL)
    piece_K = elements_K // PIECE_NUMEL
    place_K = np.searchsorted(taken, piece_K)
    is_taken_K = taken[np.minimum(place_K, taken.size - 1)] == piece_K
    moved_K = place_K * PIECE_NUMEL + elements_K % PIECE_NUMEL
    return moved_K[is_taken_K], taken.size * PIECE_NUMEL


def rows_8(sample: Sample) -> list[Row]:
    """Time divided by the dense all-reduce's, for each number of ranks."""
    rows = []
    for n in union_counts(len(sample.elements))[1:]:
        # Of each rank the non-zero elements that are simulated, and the size.
        parts = [thinned(own_K, sample.numel, MOST_SIMULATED) for own_K in sample.elements[:n]]
        # Shards have equal size: pad the end with zeros.
        numel = -(-parts[0][1] // n) * n

        def gradient(rank: int, parts: list = parts, numel: int = numel) -> torch.Tensor:
            """Ones where the rank's thinned gradient is not zero."""
            grad_N = torch.zeros(numel)
            grad_N[torch.from_numpy(parts[rank][0])] = 1.0
            return grad_N

        job = Job(BANDWIDTH_ONLY, n, 4 * sample.numel, numel, charged=False)
        profile = sample.profile
        found = outcomes_8(job, gradient, profile.density, profile.sum_density(n))
        dense = found["AllReduce"]
        rows += [
            {
                "series": name,
                "ranks": n,
                "normalised_time": outcome.time_s / dense.time_s,
                "wire_mib": outcome.wire_bytes / 2**20,
                "simulated_numel": numel,
            }
            for name, outcome in found.items()
        ]
    return rows


def rows_16(sample: Sample) -> list[Row]:
    """Milliseconds of Algorithm 1, a: by the parallel memory r1, b: by the rehashes k."""
    whole_K = max(sample.elements, key=lambda of_rank_K: of_rank_K.size)
    every = max(-(-whole_K.size // MOST_HASHED), 1)  # evenly spread, at most MOST_HASHED of them
    indices_K = torch.from_numpy(whole_K[::every].copy())
    n, entries = max(sample.profile.world_size, 2), indices_K.numel()
    h0, values_K = PermutationHash(sample.numel, n, HASH_SEED), indices_K.float()

    def time_ms(memory: int, rehashes: int) -> float:
        """Times the fastest of several calls; n partitions share `memory` slots for each entry."""
        slots = max(-(-memory * entries // n), 1)
        times = []
        for _ in range(REPETITIONS):
            start_s = time.perf_counter()
            hierarchical_hash(h0, indices_K, values_K, parallel_slots=slots, rehashes=rehashes)
            times.append((time.perf_counter() - start_s) * 1e3)
        return min(times)  # Other processes only add to the time.

    time_ms(1, 1)  # The first call loads the extension.
    rows = [_row("a", "k = 3", memory, time_ms(memory, 3)) for memory in (1, 2, 3, 4)]
    return rows + [_row("b", "r1 = 2", k, time_ms(2, k)) for k in (1, 2, 3, 4)]


def rows_17(shown: dict[str, list[Sample]], largest: Sample) -> list[Row]:
    """a: each format's size, by density, over the dense size; b: speedups over AllReduce."""
    rows = []
    for density, blocks, servers in sorted(set(_densities(shown))):
        # COO sends an index beside each fp32 value; a bitmap takes one bit an element.
        sizes = {
            "COO": 2 * density,
            "bitmap": density + servers / 32,
            "hash bitmap": density + 1 / 32,
            f"blocks of {OMNIREDUCE_BLOCK}": blocks,
        }
        rows += [_row("a", name, density, size) for name, size in sizes.items()]
    profile, n = largest.profile, largest.profile.world_size
    one, total = profile.density, profile.sum_density(n)
    # Dense sizes that the busiest rank receives: mean sizes times the imbalance of push and pull.
    contiguous, hashed = largest.contiguous, largest.hashed
    received = {
        "contiguous shards, COO": 2 * one * contiguous.push + 2 * total * contiguous.pull,
        "Algorithm 1, COO": 2 * one * hashed.push + 2 * total * hashed.pull,
        "Algorithm 1, hash bitmap": 2 * one * hashed.push + total * hashed.pull + 1 / 32,
    }
    for name, size in received.items():  # AllReduce receives two
        rows.append(_row("b", name, largest.bucket, 2 / size if size else 0.0))
    return rows


def _densities(shown: dict[str, list[Sample]]) -> Iterable[tuple[float, float, int]]:
    """Yields density, fraction of blocks and number of servers: of each sample, then of its sum."""
    for members in shown.values():
        for sample in members:
            profile, size = sample.profile, OMNIREDUCE_BLOCK
            n = profile.world_size
            yield profile.density, profile.block_density[size], n
            yield profile.sum_density(n), profile.sum_block_density[size], n


def draw_2(rows: list[Row], canvas: Canvas) -> None:
    """Two panels of lines."""
    left, right = line_panels(canvas, rows, "panel", "x", "y").values()
    left.set(xlabel="overlap ratio of two ranks", ylabel="probability density")
    right.set(xlabel="ranks", ylabel="densification ratio")


def draw_3(rows: list[Row], canvas: Canvas) -> None:
    """A map of percentages, and lines."""
    (_, left, shares), (_, right, skews) = panels(canvas, rows, "panel")
    by_bucket = groups(shares, "series")
    grid = np.array([[row["y"] for row in members] for members in by_bucket.values()])
    left.imshow(grid, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    write_numbers(left, grid, "{:.0f}", grid > 50)
    left.set_yticks(range(len(by_bucket)), list(by_bucket), fontsize=7)
    left.set_xticks(range(PARTITIONS), list(map(str, range(1, PARTITIONS + 1))))
    left.set_xlabel("partition (% of the non-zero elements)")
    draw_lines(right, skews, "x", "y", styles_of(rows), log="xy")
    right.set(xlabel="partitions", ylabel="skewness ratio")
    shared_legend(canvas, [right])


def draw_16(rows: list[Row], canvas: Canvas) -> None:
    """Two panels of lines."""
    left, right = line_panels(canvas, rows, "panel", "x", "y", ylim=(0, None)).values()
    left.set(xlabel="parallel memory r1 (times the entries)", ylabel="time (ms)")
    right.set(xlabel="rehashes k")


def draw_17(rows: list[Row], canvas: Canvas) -> None:
    """Lines and bars."""
    (_, left, sizes), (_, right, steps) = panels(canvas, rows, "panel")
    draw_lines(left, sizes, "x", "y", styles_of(sizes))
    left.set(xlabel="density of one rank, and of the sum", ylabel="size / dense size")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.legend(fontsize=7)
    draw_bars(right, steps, "x", "y")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set_ylabel("speedup of synchronisation over AllReduce")
    right.legend(fontsize=7)
