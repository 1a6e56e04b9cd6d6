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
    copy_N, residual_N, sum_N = grad_N.clone(), *torch.zeros(2, *grad_N.shape, device=grad_N.device)

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
    """Of `prune_encode`; each works on copies, which pruning again does not change."""
    sent_N, selected_N = grad_N.clone(), grad_N.clone()
    rests = torch.zeros(2, case.numel, device=case.device)
    threshold_R = torch.tensor([case.threshold]).to(case.device)
    pruning = Pruning(rests[0], torch.tensor([0, case.numel]), threshold_R, 0.0, KEY)
    sample = threshold_triton.sample_threshold
    return {
        "Triton prune_": lambda: ops.prune_(sent_N, pruning, case.code),
        "Triton selection": lambda: _select(sample, case, selected_N, rests[1]),
    }


def wrong_triton(case: Case) -> int:
    """Bytes in which Triton's selection differs from the CPU's, of gradient and residual."""
    grad_N = replace(case, device=CPU).gradient()
    results, samples = [], (ops.sample_threshold, threshold_triton.sample_threshold)
    for device, sample in zip((CPU, case.device), samples, strict=True):
        sent_N, rest_N = grad_N.to(device, copy=True), torch.zeros(case.numel, device=device)
        _select(sample, case, sent_N, rest_N)
        results.append((sent_N, rest_N))
    return sum(differing(got, wanted) for wanted, got in zip(*results, strict=True))


def _select(
    sample: Callable[..., Limits], case: Case, grad_N: torch.Tensor, residual_N: torch.Tensor
) -> None:
    """Samples the threshold and prunes, with leak 0.5; mutates both."""
    offsets, densities_R = torch.tensor([0, case.numel]), torch.tensor([case.density])
    samples, keys_R = CompressionConfig().samples_at(case.density), torch.tensor([KEY])
    limits = sample(grad_N, residual_N, offsets, densities_R, samples, keys_R)
    chances_R = limits.tie_chances
    pruning = Pruning(residual_N, offsets, limits.thresholds, 0.5, KEY, tie_chances_R=chances_R)
    ops.prune_(grad_N, pruning, case.code)
