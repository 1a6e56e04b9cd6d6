"""Peers of `bench codecs`: the same operation in torch.

Each function returns the peers of one operation, by name. No peer writes a record. Error feedback
adds a residual to the gradient. Sums that are not selected, times `leak`, are the new residual.
"""

from __future__ import annotations

import torch

from megatron_sparse.bench.table import Action


def prune_encode(grad_N: torch.Tensor, limit: float) -> dict[str, Action]:
    """The peer selects above `limit` with error feedback, leak 0, in whole-tensor operations."""
    residual_N = torch.zeros(grad_N.numel(), device=grad_N.device)

    def in_torch() -> tuple[torch.Tensor, torch.Tensor]:
        sum_N = grad_N + residual_N
        index_K = (sum_N.abs() > limit).nonzero().squeeze(1)
        values_K = sum_N[index_K].to(grad_N.dtype)
        # The plugin scales for any leak, so leak 0 is a multiplication here as well.
        residual_N.copy_(sum_N).index_fill_(0, index_K, 0).mul_(0.0)
        return index_K.int(), values_K

    return {"torch ops": in_torch}


def prune(grad_N: torch.Tensor, limit: float) -> dict[str, Action]:
    """The peer prunes a copy with leak 1: zeroes magnitudes up to `limit`; rounds to nearest."""
    copy_N = grad_N.clone()
    residual_N, sum_N = torch.zeros(2, *grad_N.shape, device=grad_N.device)

    def in_torch() -> None:
        torch.add(copy_N, residual_N, out=sum_N)
        copy_N.copy_(sum_N.masked_fill(sum_N.abs() <= limit, 0))
        residual_N.copy_(sum_N.sub_(copy_N))

    return {"torch ops": in_torch}


def encode(pruned_N: torch.Tensor) -> dict[str, Action]:
    """The peer finds the indices and values of the elements that are not zero."""

    def nonzero_and_index() -> tuple[torch.Tensor, torch.Tensor]:
        index_K = pruned_N.nonzero().squeeze(1)
        return index_K, pruned_N[index_K]

    return {"torch nonzero": nonzero_and_index}


def decode_add(pruned_N: torch.Tensor) -> dict[str, Action]:
    """The peer adds the non-zero elements to an fp32 accumulator; finding them is not timed."""
    acc_N = torch.zeros(pruned_N.numel(), device=pruned_N.device)
    index_K = pruned_N.nonzero().squeeze(1)
    values_K = pruned_N[index_K].float()
    return {"torch index_add_": lambda: acc_N.index_add_(0, index_K, values_K)}
