"""Peers of `bench codecs`: the same in torch, numpy, scipy and zstd."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from megatron_sparse.bench.table import Action
from megatron_sparse.extras import is_installed


def prune_encode(grad_N: torch.Tensor, limit: float, *, zstd: bool) -> dict[str, Action]:
    """Selection with error feedback, leak 0, in whole-tensor operations.

    With `zstd`, also what zstd (level 3) makes of the indices and values.
    """
    residual_N = torch.zeros(grad_N.numel(), device=grad_N.device)

    def in_torch() -> tuple[torch.Tensor, torch.Tensor]:
        sum_N = grad_N + residual_N
        index_K = (sum_N.abs() > limit).nonzero().squeeze(1)
        values_K = sum_N[index_K].to(grad_N.dtype)
        residual_N.copy_(sum_N).index_fill_(0, index_K, 0).mul_(0.0)
        return index_K.int(), values_K

    if not zstd or not is_installed("zstandard"):
        return {"torch ops": in_torch}
    import zstandard

    compressor = zstandard.ZstdCompressor(level=3)

    def in_torch_and_zstd() -> list[bytes]:
        return [
            compressor.compress(memoryview(part.view(torch.uint8).numpy())) for part in in_torch()
        ]

    return {"torch ops": in_torch, "torch ops, zstd": in_torch_and_zstd}


def encode(pruned_N: torch.Tensor) -> dict[str, Action]:
    """Ways to get indices and values."""

    def nonzero_and_index() -> tuple[torch.Tensor, torch.Tensor]:
        index_K = pruned_N.nonzero().squeeze(1)
        return index_K, pruned_N[index_K]

    peers: dict[str, Action] = {
        "torch nonzero": nonzero_and_index,
        "torch to_sparse": pruned_N.to_sparse,
    }
    if pruned_N.is_cuda or pruned_N.dtype == torch.bfloat16:  # numpy has none
        return peers
    array = pruned_N.numpy()

    def numpy() -> tuple[np.ndarray, np.ndarray]:
        index = np.flatnonzero(array)
        return index, array[index]

    peers["numpy"] = numpy
    sparse = _scipy_sparse()
    if sparse is not None and pruned_N.dtype == torch.float32:
        peers["scipy coo_array"] = lambda: sparse.coo_array(array)
    return peers


def decode_add(pruned_N: torch.Tensor) -> dict[str, Action]:
    """Ways to add a sparse gradient to an fp32 accumulator."""
    acc_N = torch.zeros(pruned_N.numel(), device=pruned_N.device)
    index_K = pruned_N.nonzero().squeeze(1)
    values_K = pruned_N[index_K].float()
    peers: dict[str, Action] = {"torch index_add_": lambda: acc_N.index_add_(0, index_K, values_K)}
    if pruned_N.is_cuda:
        return peers
    sum_of = pruned_N.float().to_sparse()
    index, values, array = index_K.numpy(), values_K.numpy(), acc_N.numpy()

    def numpy() -> None:
        array[index] += values

    peers |= {"torch add_ sparse": lambda: acc_N.add_(sum_of), "numpy": numpy}
    sparse = _scipy_sparse()
    if sparse is not None:
        matrix = sparse.coo_array((values, (index,)), shape=(pruned_N.numel(),))
        peers["scipy coo_array"] = lambda: np.add(array, matrix.toarray(), out=array)
    return peers


def _scipy_sparse() -> ModuleType | None:
    """`scipy.sparse`, or None if it is not installed: it is a peer, not a dependency."""
    try:
        from scipy import sparse
    except ImportError:
        return None
    return sparse
