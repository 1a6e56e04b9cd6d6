"""Row-sparse gradients: the rows of an embedding that a batch touched.

Every step is deterministic, and gives the same bits on the CPU and on a CUDA device, except those
of a NaN that is a sum. On CUDA the CPU waits at every step, for the check of the indices and for
sizes. How ranks add them up is in `collectives/row_sparse.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext import row_sparse_ops
from megatron_sparse.cuda_ext.arguments import GRAD_DTYPES
from megatron_sparse.cuda_ext.gpu import check_kernels
from megatron_sparse.errors import ExtensionError

MAX_ROWS = 2**40


@dataclass(frozen=True)
class RowSparse:
    """Rows of a [num_rows, D] gradient; all others are zero.

    Attributes:
        indices_K: int64, strictly ascending, in [0, num_rows).
        rows_KD: fp32, bf16 or fp16, contiguous.
        num_rows: rows of the whole gradient.
    """

    indices_K: torch.Tensor
    rows_KD: torch.Tensor
    num_rows: int

    @classmethod
    def from_coo(cls, gradient: torch.Tensor) -> RowSparse:
        """Converts a torch sparse COO gradient [num_rows, D], coalesced or not (see `check_coo`).

        Rows of the same index are summed in their order in the gradient.

        Raises:
            ExtensionError: an index is out of range.

        Example:
            >>> rows = torch.tensor([[1.0], [2.0], [4.0]])
            >>> g = torch.sparse_coo_tensor([[3, 1, 3]], rows, (5, 1))
            >>> RowSparse.from_coo(g).rows_KD.tolist()
            [[2.0], [5.0]]
        """
        # The public accessors refuse tensors that are not coalesced, and torch's own coalesce
        # guarantees no order of summation.
        indices, rows = gradient._indices()[0], gradient._values()
        return coalesce(indices, rows, gradient.shape[0])

    def to_coo(self) -> torch.Tensor:
        """The gradient as a coalesced torch sparse COO tensor [num_rows, D]; shares memory."""
        return torch.sparse_coo_tensor(
            self.indices_K.unsqueeze(0),
            self.rows_KD,
            (self.num_rows, self.rows_KD.shape[1]),
            is_coalesced=True,
            check_invariants=False,  # `RowSparse` holds checked indices only
        )


def check_coo(gradient: torch.Tensor) -> None:
    """Raises an error for a gradient that `RowSparse.from_coo` cannot convert; reads no element.

    `from_coo` converts those of `torch.nn.Embedding(sparse=True)`: one sparse dimension, one dense.

    Raises:
        ExtensionError: another layout, shape, dtype or device.
        DependencyError, ExtensionError: the GPU has no kernels (`check_kernels`).
    """
    is_coo = gradient.layout == torch.sparse_coo
    is_row_sparse = is_coo and gradient.sparse_dim() == gradient.dense_dim() == 1
    if not is_row_sparse:
        raise ExtensionError(
            "this is no row-sparse gradient",
            expected="a sparse COO tensor with one sparse and one dense dimension",
            got=f"{gradient.layout} of shape {tuple(gradient.shape)}",
            remedy="make the embedding with sparse=True",
        )
    if gradient.device.type not in ("cpu", "cuda"):
        got = gradient.device
        raise ExtensionError("the gradient has the wrong device", expected="cpu or cuda", got=got)
    if gradient.is_cuda:
        check_kernels(gradient.device)
    if gradient.dtype not in GRAD_DTYPES:
        expected = "float32, bfloat16 or float16"
        raise ExtensionError("the rows have the wrong dtype", expected=expected, got=gradient.dtype)
    if gradient.shape[0] > MAX_ROWS:
        got = gradient.shape[0]
        raise ExtensionError("the gradient has too many rows", expected="at most 2^40", got=got)


def coalesce(indices: torch.Tensor, rows: torch.Tensor, num_rows: int) -> RowSparse:
    """Sorts rows by index and sums the rows of each index, in their order in `rows`.

    Takes O(K log K) comparisons of indices and one pass over the rows. If the indices already
    ascend, each is compared once and the result shares memory with the arguments. Sums are taken in
    fp32 and rounded once; a row that occurs once keeps its bits.

    Args:
        indices: int64 [K], in any order, repeated or not.
        rows: fp32, bf16 or fp16 [K, D].
        num_rows: rows of the whole gradient.

    Raises:
        ExtensionError: an index is out of range.
    """
    rows = rows.contiguous()
    indices = indices.contiguous()
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= num_rows:
            raise ExtensionError(
                "a row index is out of range",
                expected=f"0 to {num_rows - 1}",
                got=low if low < 0 else high,
            )
    if bool((indices[1:] > indices[:-1]).all()):
        return RowSparse(indices, rows, num_rows)
    ordered, order = torch.sort(indices, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    # Where the rows of each unique index begin in `order`, and where the last ones end.
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return RowSparse(unique, row_sparse_ops.sum_rows(rows, order, offsets), num_rows)
