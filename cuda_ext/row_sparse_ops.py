"""The ops of row-sparse gradients, typed: what `formats.row_sparse` calls.

Shape suffixes: K rows of one rank, U rows of the union, D elements of a row. All tensors of a call
are on one device, tables of offsets too, and so are the results, which have the same bits on every
device and for every number of threads (but for the payload of a NaN that is a sum). On CUDA each
call waits for the device. Arguments that do not fit together are an `ExtensionError` with what was
expected and what came.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext.arguments import call


def sum_rows(rows_KD: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums groups of rows, each group in the order given, in fp32, rounded once.

    A group of one row is copied bit for bit.

    Args:
        rows_KD: fp32, bf16 or fp16, contiguous. Only read.
        order: int64 row numbers, group after group.
        offsets: int64, U + 1 offsets into `order`; no group is empty.

    Returns:
        The U sums, in the dtype of the rows.
    """
    return call("row_sparse_sum", rows_KD, order, offsets)


def union(
    indices: torch.Tensor, offsets: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, tuple[int, int, int] | None]:
    """The sorted union of sets that are each strictly ascending; checks every entry.

    Time O(K log2(sets)) for K entries in all, in slices that threads merge independently.

    Args:
        indices: int64, all sets back to back, not trusted.
        offsets: int64 offsets of the sets.
        num_rows: bound of the indices.

    Returns:
        The union, int64; and None, or (set, position in it, value) of the first wrong entry.
    """
    merged, status = call("row_sparse_union", indices, offsets, num_rows)
    wrong, which, position, value = status.tolist()
    return merged, (which, position, value) if wrong else None


def match(local_K: torch.Tensor, union_U: torch.Tensor) -> torch.Tensor:
    """Where each local index stands in the union: a merge, O(K + U) reads of 8 bytes.

    Both are int64 and strictly ascending. A local index that is not in the union is refused.

    Returns:
        int64 positions, K of them.
    """
    return call("row_sparse_match", local_K, union_U)


def expand(local_K: torch.Tensor, rows_KD: torch.Tensor, union_U: torch.Tensor) -> torch.Tensor:
    """The compacted buffer [U, D]: the local row where there is one, zeros elsewhere.

    Match and scatter in one merge; every byte of the result is written once.

    Returns:
        In the dtype of the rows, whose bits are unchanged.
    """
    return call("row_sparse_expand", local_K, rows_KD, union_U)
