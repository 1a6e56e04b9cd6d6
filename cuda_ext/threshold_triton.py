"""Sampled thresholds on GPUs without the extension's CUDA part: two launches of Triton.

The same bits as the compiled op. What the host knows, ranges, densities and keys, goes to the
device in one small copy; the host never waits. Needs Triton, as `ops.prune_` does on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.cuda_ext.codec_cuda import to_device
from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.triton_kernels.counter_hash import DRAW_SAMPLE, DRAW_TIE, hash_bits, hash_seed


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> Limits:
    """The limits of each range; arguments as of `cuda_ext.ops.sample_threshold`, which says more.

    The gradient is on a CUDA device, or Triton interprets its kernels. Each range becomes a row of
    the kernels' plan (`triton_kernels.threshold.sample_threshold` lists its columns).
    """
    from megatron_sparse.triton_kernels import threshold

    offsets, densities, keys = range_offsets.tolist(), densities_R.tolist(), keys_R.tolist()
    rows: list[tuple[int, ...]] = []
    wanted: list[float] = []  # samples to select from each range
    total = most = 0  # samples of all ranges so far, and of the range with the most
    draws = range_draws(keys).tolist()
    for r, (density, key) in enumerate(zip(densities, keys, strict=True)):
        begin, numel = offsets[r], offsets[r + 1] - offsets[r]
        count = min(numel, samples) if density < 1 else 0
        wanted.append(density * count)
        rank = min(int(wanted[-1]), max(count - 1, 0))  # of the threshold, descending
        # The 0 is the place of `wanted`, set below.
        rows.append((begin, numel, count, rank, 0, *hash_seed(key, DRAW_SAMPLE), total, draws[r]))
        total, most = total + count, max(most, count)
    plan = torch.tensor(rows, dtype=torch.int64).view(len(rows), threshold.PLAN_COLUMNS.value)
    # This column is fp64 among integers: it holds the bits.
    plan[:, 4] = torch.tensor(wanted, dtype=torch.float64).view(torch.int64)
    found = threshold.sample_threshold(
        grad_N, residual_N, to_device(plan, grad_N.device), total, most
    )
    return Limits(*found)


def range_draws(keys: Sequence[int]) -> torch.Tensor:
    """For each range's key the 24-bit draw that decides a single tie: int64 [R], on the CPU."""
    seeds = torch.tensor([hash_seed(key, DRAW_TIE) for key in keys]).view(-1, 2)
    return hash_bits(seeds[:, 0], seeds[:, 1], torch.zeros(len(keys), dtype=torch.int64)) >> 8
