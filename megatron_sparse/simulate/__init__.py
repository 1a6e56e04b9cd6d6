"""The papers' figures, regenerated on the virtual cluster with the parameters of their clusters.

`levels` belongs to no paper: it prices a synchronisation at each level.

A MODEL, not a measurement: messages and codecs are real, time is alpha-beta (`pricing`). One module
for each paper, with its figures in `FIGURES`; docs/results/figures.md shows them and compares them
with the papers.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sparse.errors import ConfigError
from megatron_sparse.simulate import pccl, spccl, stragglar, zen
from megatron_sparse.simulate.figures import Figure

__all__ = ["FIGURES", "Figure", "select"]

FIGURES: Sequence[Figure] = (*spccl.FIGURES, *zen.FIGURES, *pccl.FIGURES, *stragglar.FIGURES)
"""All figures, paper by paper."""


def select(paper: str | None, number: int | None) -> list[Figure]:
    """The figures of `paper` (spccl, zen, pccl or stragglar), or of all papers if it is None.

    `number`: only the figure with this number in the paper, which must then be given.

    Raises:
        ConfigError: there is no such figure, or a number has no paper.

    Example:
        >>> [figure.name for figure in select("zen", None)]
        ['zen-figure-8', 'zen-figure-15']
    """
    found = [
        figure
        for figure in FIGURES
        if paper in (None, figure.paper) and number in (None, figure.number)
    ]
    if not found or (number is not None and paper is None):
        raise ConfigError(
            "there is no such figure",
            expected=", ".join(f"{figure.paper} {figure.number}" for figure in FIGURES),
            got=f"--paper {paper} --figure {number}",
            remedy="megatron-sparse simulate --list",
        )
    return found
