"""Inputs of sampled thresholds that the tests of all its kernels share."""

import torch

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
