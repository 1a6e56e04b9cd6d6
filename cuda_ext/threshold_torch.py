"""Sampled thresholds in plain torch operations, for GPUs without the extension's CUDA part.

The same bits as the compiled op (`csrc/threshold.cpp`): positions are integer arithmetic, and
magnitudes are ordered by their fp32 bits. No host synchronisation: sizes come from CPU tensors, and
the few numbers that each range needs go to the device in one small copy.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext.codec_cuda import to_device
from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.triton_kernels.counter_hash import DRAW_SAMPLE, DRAW_TIE, hash_seed

_MASK_32 = 2**32 - 1
_INFINITY = 0x7F800000


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> Limits:
    """See `cuda_ext.ops.sample_threshold`, which checks the arguments."""
    device = grad_N.device
    offsets, densities = range_offsets.tolist(), densities_R.tolist()
    limits_R = Limits.keep_all((len(densities),), device)
    rows, wanted = [], []
    for r, (density, key) in enumerate(zip(densities, keys_R.tolist(), strict=True)):
        numel = offsets[r + 1] - offsets[r]
        if numel and density < 1:
            count = min(numel, samples)
            wanted.append(density * count)
            rank = min(int(wanted[-1]), count - 1)
            rows.append((r, offsets[r], numel, count, rank, *hash_seed(key, DRAW_SAMPLE)))
    if not rows:
        return limits_R

    table = to_device(torch.tensor(rows, dtype=torch.int64), device)
    range_A, start_A, numel_A, count_A, rank_A, seed_a_A, seed_b_A = table.unbind(1)
    last_A = count_A.cumsum(0) - 1  # of each range's samples, which are adjacent
    first_A = last_A + 1 - count_A
    total = sum(row[3] for row in rows)
    owner_K = torch.repeat_interleave(
        torch.arange(len(rows), device=device), count_A, output_size=total
    )
    sample_K = torch.arange(total, device=device) - first_A[owner_K]
    random_K = _hash(sample_K, seed_a_A[owner_K], seed_b_A[owner_K])
    inside_K = _position(numel_A[owner_K], count_A[owner_K], sample_K, random_K)
    position_K = start_A[owner_K] + inside_K

    x_K = grad_N[position_K].float()
    if residual_N is not None:
        x_K = x_K + residual_N[position_K].float()
    # One sort serves all ranges: by range, then by magnitude.
    ordered_K = ((owner_K << 32) | _magnitude_bits(x_K)).sort().values
    chosen_A = ordered_K[last_A - rank_A]
    after_A = torch.searchsorted(ordered_K, chosen_A, right=True)
    equal_A = after_A - torch.searchsorted(ordered_K, chosen_A)
    wanted_A = to_device(torch.tensor(wanted, dtype=torch.float64), device)
    found_A = _limits(chosen_A & _MASK_32, wanted_A, last_A + 1 - after_A, equal_A)
    for all_R, some_A in zip(limits_R, found_A, strict=True):
        all_R.index_copy_(0, range_A, some_A)
    return limits_R


def threshold_of_samples(magnitudes_K: torch.Tensor, density: float) -> Limits:
    """See `cuda_ext.ops.threshold_of_samples`, which checks the arguments."""
    count = magnitudes_K.numel()
    if count == 0 or density >= 1:
        return Limits.keep_all((), magnitudes_K.device)
    wanted = density * count
    bits_K = _magnitude_bits(magnitudes_K)
    chosen = bits_K.kthvalue(count - min(int(wanted), count - 1)).values
    return _limits(chosen, wanted, (bits_K > chosen).sum(), (bits_K == chosen).sum())


def drawn_ties(first: int, count: int, key: int, device: torch.device) -> torch.Tensor:
    """The 24-bit draws, over 2^24, of `count` elements from `first` on: fp32 in [0, 1).

    A tie is kept where its draw is less than its chance; `csrc/limit.h` has the definition.
    """
    a, b = hash_seed(key, DRAW_TIE)
    index = torch.arange(first, first + count, device=device)
    high = index >> 32
    seed_a = (high * 0x85EBCA6B & _MASK_32) ^ a
    bits = _hash(index & _MASK_32, seed_a, b + high * 0xC2B2AE35)
    return (bits >> 8).float() * 2.0**-24


def _magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """fp32 bits of |x| as int64, which order as the magnitudes do; NaN counts as infinite."""
    return (x.view(torch.int32) & 0x7FFFFFFF).clamp(max=_INFINITY).long()


def _limits(
    chosen: torch.Tensor, wanted: torch.Tensor | float, above: torch.Tensor, equal: torch.Tensor
) -> Limits:
    """The limits of thresholds `chosen` (fp32 bits), which that many samples exceed and equal."""
    chances = ((wanted - above.double()) / equal).float()
    has_chance = (chosen > 0) & (chosen < _INFINITY)
    return Limits(chosen.int().view(torch.float32), chances.where(has_chance, 0), equal)


def _position(
    numel: torch.Tensor, count: torch.Tensor, sample: torch.Tensor, random: torch.Tensor
) -> torch.Tensor:
    """An element of stratum `sample` of `count`; the splits keep products under 2^63."""
    quotient, remainder = numel // count, numel % count
    begin = sample * quotient + sample * remainder // count
    end = (sample + 1) * quotient + (sample + 1) * remainder // count
    width, half = end - begin, random >> 1
    return begin + half * (width >> 31) + (half * (width & 0x7FFFFFFF) >> 31)


def _hash(index: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The counter hash of indices under 2^32; `csrc/counter_hash.h` is its definition."""
    # int64 products wrap, which leaves their lower 32 bits right.
    x = index ^ a
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD & _MASK_32
    x = x ^ (x >> 15)
    x = x + b & _MASK_32
    x = x * 0xD35A2D97 & _MASK_32
    return x ^ (x >> 15)
