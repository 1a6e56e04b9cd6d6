"""The two-shot collectives over peer memory, in torch operations: the oracle of `csrc/peer.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from megatron_sparse.reference.prune import with_one_nan
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_PICI, payload_bytes


def sum_in_rank_order(grads: Sequence[torch.Tensor], value_dtype: torch.dtype) -> torch.Tensor:
    """The fp32 sum of the values in the ranks' records, from rank 0 on.

    Args:
        grads: one for each rank; rounded to `value_dtype`, as records are.
        value_dtype: of the records.

    Example:
        >>> sum_in_rank_order([torch.tensor([1.0, 0]), torch.tensor([2.0, -0.0])], torch.float32)
        tensor([3., 0.])
    """
    total = torch.zeros(grads[0].shape)
    for grad in grads:
        total += _rounded(grad, value_dtype).float()
    return total


def all_reduce(grads: Sequence[torch.Tensor], value_dtype: torch.dtype) -> torch.Tensor:
    """Every rank's result: the sum, rounded to the records' dtype and then to the gradient's."""
    total = sum_in_rank_order(grads, value_dtype)
    return _rounded(_rounded(total, value_dtype), grads[0].dtype)


def reduce_scatter(
    grads: Sequence[torch.Tensor], value_dtype: torch.dtype, shard: slice
) -> torch.Tensor:
    """The result of the shard's owner: the sum, rounded to the gradient's dtype only."""
    return _rounded(sum_in_rank_order(grads, value_dtype)[shard], grads[0].dtype)


def record_formats(
    values_M: torch.Tensor,
    offsets: Sequence[int],
    dense: Sequence[bool],
    record_format: int,
    value_dtype: int,
    dense_from: float,
) -> list[int]:
    """The format of each of a shard's records.

    Args:
        values_M: the shard.
        offsets: of its segments, from its begin.
        dense: segments that are always dense.
        record_format: that of COO, Pici or dense; any other code selects the smallest.
        value_dtype: dtype code of the values.
        dense_from: at or above this density of all sparse segments, they become dense.
    """
    pieces = [values_M[a:b] for a, b in pairwise(offsets)]
    counts = [int(piece.count_nonzero()) for piece in pieces]
    sparse = [i for i, is_dense in enumerate(dense) if not is_dense]
    numel = sum(pieces[i].numel() for i in sparse)
    if sum(counts[i] for i in sparse) >= dense_from * numel:
        sparse = []
    formats = []
    for i, piece in enumerate(pieces):
        wanted = (
            (record_format,)
            if record_format in (FORMAT_COO, FORMAT_PICI)
            else (FORMAT_COO, FORMAT_PICI)
        )
        size = payload_bytes(FORMAT_DENSE, piece.numel(), counts[i], value_dtype)
        chosen = FORMAT_DENSE
        for candidate in wanted if i in sparse and record_format != FORMAT_DENSE else ():
            candidate_size = payload_bytes(candidate, piece.numel(), counts[i], value_dtype)
            if candidate_size < size:
                chosen, size = candidate, candidate_size
        formats.append(chosen)
    return formats


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values if values.dtype == dtype else with_one_nan(values, dtype)
