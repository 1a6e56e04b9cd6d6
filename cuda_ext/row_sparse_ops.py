"""The op that sums equal rows of a row-sparse gradient, typed: what `formats.row_sparse` calls.

Shape suffixes: K rows, U groups of them, D elements of a row. All tensors of a call are on one
device, tables of offsets too, and so are the results, which have the same bits on every device and
for every number of threads (but for the payload of a NaN that is a sum). On CUDA each call waits
for the device. Arguments that do not fit together are an `ExtensionError` with what was expected
and what came.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext.arguments import call


def sum_rows(rows_KD: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums groups of rows, each in the order of `order`, in fp32, rounded once to the rows' dtype.

    A group of one row is copied bit for bit.

    Args:
        rows_KD: fp32, bf16 or fp16, contiguous. Only read.
        order: int64 row numbers, group after group.
        offsets: int64, U + 1 offsets into `order`; no group is empty.

    Returns:
        The U sums, in the dtype of the rows.
    """
    return call("row_sparse_sum", rows_KD, order, offsets)
