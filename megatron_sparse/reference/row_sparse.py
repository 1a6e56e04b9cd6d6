"""Row-sparse gradients with dictionaries and sets: the oracles of `formats.row_sparse`."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def coalesce(indices: torch.Tensor, rows: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The sorted indices, and the sum of each one's rows, added in fp32 one after the other."""
    sums: dict[int, torch.Tensor] = {}
    for index, row in zip(indices.tolist(), rows, strict=True):
        sums[index] = sums[index] + row.float() if index in sums else row.float()
    ordered = sorted(sums)
    summed = torch.stack([sums[i] for i in ordered]) if ordered else rows.float()
    return ordered, summed.to(rows.dtype)


def union(index_sets: Iterable[list[int]]) -> list[int]:
    """The sorted union."""
    return sorted(set().union(*index_sets))


def match(local: list[int], union: list[int]) -> list[int]:
    """Where each local index stands in the union."""
    return [union.index(index) for index in local]


def expand(local: list[int], rows: torch.Tensor, union: list[int]) -> torch.Tensor:
    """The compacted buffer, row by row."""
    buffer = rows.new_zeros((len(union), rows.shape[1]))
    for index, row in zip(local, rows, strict=True):
        buffer[union.index(index)] = row
    return buffer
