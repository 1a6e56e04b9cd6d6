"""Peers of `bench codecs`: the same operation in torch, and selection in Triton.

Each function returns the peers of one operation, by name. Triton's kernels select where the
compiled library is not there: `Triton prune_` with the same threshold, and `Triton selection`,
which samples the threshold too. No peer writes a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_sparse.bench.codec.frame import CPU, KEY, Case, differing
from megatron_sparse.bench.table import Action
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.cuda_ext import ops, threshold_triton
from megatron_sparse.cuda_ext.record_spec import Limits, Pruning


def prune_encode(grad_N: torch.Tensor, limit: float) -> dict[str, Action]:
    """Selection above `limit` with error feedback, leak 0, in whole-tensor operations."""
    residual_N = torch.zeros(grad_N.numel(), device=grad_N.device)

    def in_torch() -> tuple[torch.Tensor, torch.Tensor]:
        sum_N = grad_N + residual_N
        index_K = (sum_N.abs() > limit).nonzero().squeeze(1)
        values_K = sum_N[index_K].to(grad_N.dtype)
        # As an encoder does for any leak: what was sent leaves the residual, the rest is scaled.
        residual_N.copy_(sum_N).index_fill_(0, index_K, 0).mul_(0.0)
        return index_K.int(), values_K

    return {"torch ops": in_torch}


def prune(grad_N: torch.Tensor, limit: float) -> dict[str, Action]:
    """Pruning with leak 1 in whole-tensor operations, in place on a copy; rounds to nearest."""
    copy_N = grad_N.clone()
    residual_N, sum_N = torch.zeros(2, *grad_N.shape, device=grad_N.device)

    def in_torch() -> None:
        torch.add(copy_N, residual_N, out=sum_N)
        copy_N.copy_(sum_N.masked_fill(sum_N.abs() <= limit, 0))
        residual_N.copy_(sum_N.sub_(copy_N))

    return {"torch ops": in_torch}


def encode(pruned_N: torch.Tensor) -> dict[str, Action]:
    """Indices and values of the elements that are not zero."""

    def nonzero_and_index() -> tuple[torch.Tensor, torch.Tensor]:
        index_K = pruned_N.nonzero().squeeze(1)
        return index_K, pruned_N[index_K]

    return {"torch nonzero": nonzero_and_index}


def decode_add(pruned_N: torch.Tensor) -> dict[str, Action]:
    """Adds the elements that are not zero to an fp32 accumulator; finding them is not timed."""
    acc_N = torch.zeros(pruned_N.numel(), device=pruned_N.device)
    index_K = pruned_N.nonzero().squeeze(1)
    values_K = pruned_N[index_K].float()
    return {"torch index_add_": lambda: acc_N.index_add_(0, index_K, values_K)}


def triton(case: Case, grad_N: torch.Tensor) -> dict[str, Action]:
    """Triton's selections without a record, as peers of `prune_encode`.

    Each works on copies, which pruning again does not change.
    """
    pruned_N, selected_N = grad_N.clone(), grad_N.clone()
    pruned_rest_N, selected_rest_N = torch.zeros(2, case.numel, device=case.device)
    threshold_R = torch.tensor([case.threshold]).to(case.device)
    one_range = torch.tensor([0, case.numel])
    pruning = Pruning(pruned_rest_N, one_range, threshold_R, leak=0.0, key=KEY)
    sample = threshold_triton.sample_threshold
    return {
        "Triton prune_": lambda: ops.prune_(pruned_N, pruning, case.code),
        "Triton selection": lambda: _select(sample, case, selected_N, selected_rest_N),
    }


def wrong_triton(case: Case) -> int:
    """Bytes in which Triton's selection differs from the CPU's, of gradient and residual."""
    grad_N = replace(case, device=CPU).gradient()
    samplers = (ops.sample_threshold, threshold_triton.sample_threshold)
    results = []
    for device, sample in zip((CPU, case.device), samplers, strict=True):
        sent_N, residual_N = grad_N.to(device, copy=True), torch.zeros(case.numel, device=device)
        _select(sample, case, sent_N, residual_N)
        results.append((sent_N, residual_N))
    (expected_N, expected_residual_N), (sent_N, residual_N) = results
    return differing(sent_N, expected_N) + differing(residual_N, expected_residual_N)


def _select(
    sample: Callable[..., Limits], case: Case, grad_N: torch.Tensor, residual_N: torch.Tensor
) -> None:
    """Samples a threshold for the whole gradient and prunes by it; changes gradient and residual.

    `sample` is the `sample_threshold` of `ops` or of Triton.
    """
    one_range, densities_R = torch.tensor([0, case.numel]), torch.tensor([case.density])
    samples, keys_R = CompressionConfig().samples_at(case.density), torch.tensor([KEY])
    limits = sample(grad_N, residual_N, one_range, densities_R, samples, keys_R)
    chances_R = limits.tie_chances
    pruning = Pruning(
        residual_N, one_range, limits.thresholds, leak=0.5, key=KEY, tie_chances_R=chances_R
    )
    ops.prune_(grad_N, pruning, case.code)
