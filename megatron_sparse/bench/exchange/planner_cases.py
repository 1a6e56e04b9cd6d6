"""The planner's test cases: gradients of several kinds, on several clusters and group sizes.

Gradients are those of `simulate.gradients`, with the densities and overlaps that ZEN reports for
natural sparsity and that top-k selection has at 99 %; or those of a gradient dump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from megatron_sparse.simulate import gradients
from megatron_sparse.simulate.gradients import GradientModel
from megatron_sparse.sparsity.gradient_dump import GradientDump, Kind

ROW_NUMEL = 64
"""Of an embedding; a reduced size needs narrower rows than a real one."""
WORLD_SIZES, QUICK_WORLD_SIZES = (2, 4, 8, 16, 32, 64), (2, 4, 8)
QUICK_KINDS = ("uniform", "skewed", "overlapping", "disjoint", "embedding")

KINDS: dict[str, Callable[[int], GradientModel]] = {
    "uniform": lambda numel: gradients.uniform(numel, 0.01),
    "uniform_50": lambda numel: gradients.uniform(numel, 0.5),
    "uniform_90": lambda numel: gradients.uniform(numel, 0.9),
    "skewed": lambda numel: gradients.skewed(numel, 0.01, exponent=1.0),
    "overlapping": lambda numel: gradients.fully_overlapping(numel, 0.01),
    "disjoint": lambda numel: gradients.hardly_overlapping(numel, 0.001),
    # The densities of ZEN's LSTM and NMT (tables 1 and 2, figure 8); see `simulate.zen`.
    "embedding": lambda numel: gradients.embedding_like(numel, 0.0113, 0.187, 128, ROW_NUMEL),
    "embedding_nmt": lambda numel: gradients.embedding_like(numel, 0.0247, 0.615, 128, ROW_NUMEL),
}
"""By name: `disjoint` is ZEN's batch size of 1, at which ranks hardly overlap."""
FITTED = frozenset({"skewed", "embedding", "embedding_nmt"})
"""Kinds that are fitted with scipy."""


@dataclass(frozen=True)
class PlannerWorkload:
    """The gradients of one bucket.

    Attributes:
        kind: the kind of gradients.
        source: a rank's gradient: fp32, of `numel` elements.
        numel: elements.
        most_ranks: the number of ranks that have gradients.
    """

    kind: str
    source: Callable[[int], torch.Tensor]
    numel: int
    most_ranks: int

    def gradients(self, world_size: int) -> list[torch.Tensor]:
        """One for each rank."""
        return [self.source(rank) for rank in range(world_size)]


def synthetic(kinds: Sequence[str], numel: int) -> list[PlannerWorkload]:
    """Workloads of `KINDS`.

    Args:
        kinds: their names.
        numel: elements, a multiple of `ROW_NUMEL`.
    """
    return [PlannerWorkload(kind, partial(_synthetic, kind, numel), numel, 2**30) for kind in kinds]


def _synthetic(kind: str, numel: int, rank: int) -> torch.Tensor:
    return _model(kind, numel).gradient(rank)


@lru_cache(maxsize=1)
def _model(kind: str, numel: int) -> GradientModel:
    """Kept while its kind is tried: it holds 8 bytes for each row, and some are fitted."""
    return KINDS[kind](numel)


def recorded(path: Path) -> list[PlannerWorkload]:
    """The largest sparse bucket of a dump's last iteration; the largest if none is sparse.

    Raises:
        ProfileError: there is no dump, or it is damaged.
    """
    dump = GradientDump.open(path)
    iteration = dump.iterations[-1]

    def read(name: str) -> list[torch.Tensor]:
        kinds = dump.kinds(iteration, name)
        kind = Kind.SELECTED if Kind.SELECTED in kinds else Kind.GRADIENT
        return [g.to_dense().float() for g in dump.read(iteration, name, kind)]

    def is_sparse(ranks: Sequence[torch.Tensor]) -> bool:
        return any(2 * int(gradient.count_nonzero()) < gradient.numel() for gradient in ranks)

    found = max(map(read, dump.buckets), key=lambda ranks: (is_sparse(ranks), len(ranks[0])))
    return [PlannerWorkload(path.name, found.__getitem__, found[0].numel(), len(found))]
