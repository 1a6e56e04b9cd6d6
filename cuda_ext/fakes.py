"""Shapes, dtypes and devices of every op's result, for tracing without data."""

from __future__ import annotations

import torch


def register() -> None:
    """Registers the fakes; called once, right after the library that holds the schemas."""
    for name, fake in (
        ("prune_", _prune),
        ("sample_threshold", _sample_threshold),
        ("encode", _encode),
        ("prune_encode", _prune_encode),
        ("decode_add_", _decode_add),
    ):
        torch.library.register_fake(f"megatron_sparse::{name}", fake)


def _prune(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
) -> torch.Tensor:
    return thresholds.new_empty(thresholds.shape, dtype=torch.int64)


def _sample_threshold(
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities: torch.Tensor,
    samples: int,
    keys: torch.Tensor,
) -> torch.Tensor:
    return grad.new_empty(densities.shape, dtype=torch.float32)


def _encode(
    grad: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz: torch.Tensor,
    value_dtype: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    kind: int,
    block_size: int,
) -> torch.Tensor:
    return nnz.new_empty(nnz.shape)


def _prune_encode(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    kind: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = segment_offsets.new_empty(segment_dense.shape)
    return sizes, segment_offsets.new_empty(segment_dense.shape)


def _decode_add(
    acc: torch.Tensor,
    message: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    epoch: int,
    base: int,
    fresh: bool = False,
) -> torch.Tensor:
    return segment_offsets.new_empty(4)
