"""Inputs of sampled thresholds that the tests of all its kernels share."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning
from tests.cuda_ext import cases

KEYS = torch.tensor([0, 1, 2, 3, 2**62, 2**31, 7])
DENSITIES = torch.tensor([0.01, 0.5, 1.0, 1e-6, 0.999, 0.3, 2.0])


def seven_ranges(
    kind: str, numel: int, dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Unaligned gradient and residual, and offsets of ranges for `DENSITIES` and `KEYS`.

    Some ranges are empty, some short, one kept whole.
    """
    grad = cases.unaligned(cases.make(kind, numel, dtype, seed=1))
    residual = None
    if residual_dtype is not None:
        residual = cases.unaligned(cases.make(kind, numel, residual_dtype, seed=2))
    return grad, residual, cases.cut(numel, 7, seed=numel)


def assert_same_limits(found, expected, what: str) -> None:
    """Thresholds, chances and ties have the same bits, on whatever device they are."""
    for name, got, wanted in zip(expected._fields, found, expected, strict=True):
        cases.assert_same_bits(got.cpu(), wanted, f"{what} {name}")


def check_selection(
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    selection: tuple[torch.Tensor, torch.Tensor, int],
    place: Callable[[torch.Tensor], torch.Tensor],
    tested: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    """Three steps of sampled top-k with leaky error feedback, bit for bit the CPU codec's.

    Args:
        dtype: of the gradient, a third of which ties.
        residual_dtype: of the residual.
        selection: offsets and densities of the ranges, and samples.
        place: puts a copy where the tested functions work.
        tested: as `ops.sample_threshold` and `ops.prune_`.
    """
    ranges, densities, samples = selection
    numel, wire = int(ranges[-1]), cases.DTYPES.index(dtype)
    rests = [to(torch.zeros(numel, dtype=residual_dtype)) for to in (torch.clone, place)]
    for step in range(3):
        grad, keys = cases.make("spread", numel, dtype, seed=step), torch.arange(len(densities))
        grad[::3] = 2.0
        sent, found = [grad.clone(), place(grad)], []
        both = ((ops.sample_threshold, ops.prune_), tested)
        for values, rest, (sample, prune) in zip(sent, rests, both, strict=True):
            limits = sample(values, rest, ranges, densities, samples, keys + step)
            pruning = Pruning(
                rest, ranges, limits.thresholds, 0.9, step, tie_chances_R=limits.tie_chances
            )
            found.append((limits, prune(values, pruning, wire)))
        (wanted, nnz), (got, got_nnz) = found
        assert_same_limits(got, wanted, f"{dtype} step {step}")
        cases.assert_same_bits(sent[1].cpu(), sent[0], f"{dtype} step {step}: sent")
        cases.assert_same_bits(rests[1].cpu(), rests[0], f"{dtype} step {step}: residual")
        assert torch.equal(got_nnz.cpu(), nnz), f"{dtype} step {step}"
        assert 0 < int(nnz[0]) < numel // 10
