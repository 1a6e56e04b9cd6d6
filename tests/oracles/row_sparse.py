"""Row-sparse gradients with dictionaries: the oracle of `formats.row_sparse`."""

import torch


def coalesce(indices: torch.Tensor, rows: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Sums the rows of each index, in fp32 and in order; returns the sorted indices, and sums."""
    sums: dict[int, torch.Tensor] = {}
    for index, row in zip(indices.tolist(), rows, strict=True):
        sums[index] = sums[index] + row.float() if index in sums else row.float()
    ordered = sorted(sums)
    summed = torch.stack([sums[i] for i in ordered]) if ordered else rows.float()
    return ordered, summed.to(rows.dtype)
