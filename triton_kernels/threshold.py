"""Sampled thresholds in Triton: the same bits as the compiled op (`csrc/threshold.cpp`).

Two launches for all ranges of a bucket. The first gathers the samples with the whole grid: they lie
apart in memory, so many must be on their way at once. The second takes a program for each range; it
finds the magnitude of the wanted rank by four passes over the bytes of the samples, the highest
first, each with a histogram; the last one counts the ties. Positions, ranks and magnitudes are
integers, so the result does not depend on the machine.

Read from the bucket: 4 to 8 bytes a sample. Scratch: 4 bytes a sample are written and read four
times, from the caches.

Shape suffixes: N elements of the bucket, R ranges, K samples, B samples of a block, D digits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_sparse.triton_kernels.prune import _CODE_OF, _hash_bits, _raw, _widen

PLAN_COLUMNS = tl.constexpr(9)
SAMPLE_BLOCK = 256
SELECT_BLOCK = 2048
_NO_RESIDUAL = -1
_INFINITY = tl.constexpr(0x7F800000)
_DIGITS = tl.constexpr(256)


def sample_threshold(
    grad_N: torch.Tensor, residual_N: torch.Tensor | None, plan: torch.Tensor, total: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finds the limits of every range of a plan; `cuda_ext.threshold_triton` makes the plan.

    Launches two kernels on the current stream; no host synchronisation.

    Args:
        grad_N: only read.
        residual_N: fp32, bf16 or fp16; None for zeros. Only read.
        plan: int64 [R, 9] on the same device: begin and length of the range, number of samples (0
            keeps all of the range), rank of the threshold, the bits of the fp64 number of wanted
            samples, two words of the hash, the place of the first sample in the scratch memory,
            and the 24-bit draw that decides a single tie.
        total: samples of all ranges.
        most: samples of a range, at most.

    Returns:
        thresholds_R fp32, tie_chances_R fp32 and ties_R int64; see `cuda_ext.record_spec.Limits`.
    """
    ranges, device = plan.shape[0], grad_N.device
    thresholds_R = torch.empty(ranges, dtype=torch.float32, device=device)
    chances_R = torch.empty(ranges, dtype=torch.float32, device=device)
    ties_R = torch.empty(ranges, dtype=torch.int64, device=device)
    if ranges == 0:
        return thresholds_R, chances_R, ties_R
    magnitudes_K = torch.empty(max(total, 1), dtype=torch.int32, device=device)
    blocks = triton.cdiv(most, SAMPLE_BLOCK)  # programs of each range
    sample: Any = _sample_kernel  # Triton types a launch as the call of the Python function
    select: Any = _select_kernel
    with torch.cuda.device_of(grad_N):
        if most:
            sample[(ranges * blocks,)](
                _raw(grad_N),
                # Not read with RESIDUAL below 0.
                _raw(grad_N if residual_N is None else residual_N),
                plan,
                magnitudes_K,
                blocks,
                GRAD=_CODE_OF[grad_N.dtype],
                RESIDUAL=_NO_RESIDUAL if residual_N is None else _CODE_OF[residual_N.dtype],
                BLOCK=SAMPLE_BLOCK,
            )
        select[(ranges,)](
            plan, magnitudes_K, thresholds_R, chances_R, ties_R, BLOCK=SELECT_BLOCK, num_warps=8
        )
    return thresholds_R, chances_R, ties_R


@triton.jit
def _sample_position(numel, count, sample_B, random_B):
    """The element of a range of `numel` that each sample of `count` takes, by its random bits.

    Stratum j begins at floor(j numel / count); the upper 31 random bits choose inside it.
    `csrc/sample_position.h` is the definition. The splits keep every product under 2^63.
    """
    quotient = numel // count
    remainder = numel % count
    begin_B = sample_B * quotient + sample_B * remainder // count
    end_B = (sample_B + 1) * quotient + (sample_B + 1) * remainder // count
    width_B = end_B - begin_B
    half_B = (random_B >> 1).to(tl.int64)
    return begin_B + half_B * (width_B >> 31) + ((half_B * (width_B & 0x7FFFFFFF)) >> 31)


@triton.jit(do_not_specialize=["blocks"])
def _sample_kernel(
    grad,
    residual,
    plan,
    magnitudes,
    blocks,
    GRAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the magnitudes, as fp32 bits, of BLOCK samples of one range of the plan.

    `blocks` programs in a row serve one range. `sample_threshold` lists the plan's columns.
    """
    program = tl.program_id(0)
    row = plan + (program // blocks).to(tl.int64) * PLAN_COLUMNS
    begin = tl.load(row)
    numel = tl.load(row + 1)
    count = tl.load(row + 2)
    seed_a = tl.load(row + 5).to(tl.uint32)
    seed_b = tl.load(row + 6).to(tl.uint32)
    sample_B = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside_B = sample_B < count

    random_B = _hash_bits(seed_a, seed_b, sample_B.to(tl.uint32))
    at_B = begin + _sample_position(numel, tl.maximum(count, 1), sample_B, random_B)
    x_B = _widen(tl.load(grad + at_B, mask=inside_B, other=0), GRAD)
    if RESIDUAL >= 0:
        x_B += _widen(tl.load(residual + at_B, mask=inside_B, other=0), RESIDUAL)
    # Bits of magnitudes order as these do; NaN counts as infinite.
    bits_B = x_B.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    place = magnitudes + tl.load(row + 7)
    tl.store(place + sample_B, tl.minimum(bits_B, _INFINITY), mask=inside_B)


@triton.jit
def _select_kernel(plan, magnitudes, thresholds, chances, ties, BLOCK: tl.constexpr):
    """Stores the threshold, the tie chance and the ties of one range, from its samples.

    Each pass fixes 8 more bits of the threshold, the magnitude of descending rank `first_rank`:
    it counts the next digit of the samples that begin with the bits so far. `sample_threshold`
    lists the plan's columns.
    """
    r = tl.program_id(0).to(tl.int64)
    row = plan + r * PLAN_COLUMNS
    count = tl.load(row + 2)
    first_rank = tl.load(row + 3)
    wanted = tl.load(row + 4).to(tl.float64, bitcast=True)
    samples = magnitudes + tl.load(row + 7)
    # Place 256 counts what is outside of the range, or has other digits before; the rest stay
    # empty: a histogram's size is a power of two.
    digit_D = tl.arange(0, 2 * _DIGITS)
    rank = first_rank.to(tl.int32)  # among the samples that begin with the threshold's bits
    threshold = tl.zeros((), tl.int32)
    equal = tl.full((), 1, tl.int32)  # the number of those samples, after the first pass
    if count > 0:
        for shift in tl.static_range(24, -8, -8):  # the highest of four bytes first
            counts_D = tl.zeros((2 * _DIGITS,), tl.int32)
            begin = tl.zeros((), tl.int64)
            while begin < count:
                sample_B = begin + tl.arange(0, BLOCK)
                inside_B = sample_B < count
                bits_B = tl.load(samples + sample_B, mask=inside_B, other=0)
                # The sign is 0: shifts are those of whole numbers.
                same_B = inside_B & ((bits_B ^ threshold) >> shift < _DIGITS)
                found_B = tl.where(same_B, (bits_B >> shift) & (_DIGITS - 1), _DIGITS)
                counts_D += tl.histogram(found_B, 2 * _DIGITS)
                begin += BLOCK
            counts_D = tl.where(digit_D < _DIGITS, counts_D, 0)
            # Samples with a higher digit.
            above_D = tl.sum(counts_D, axis=0) - tl.cumsum(counts_D, axis=0)
            chosen_D = (above_D <= rank) & (rank < above_D + counts_D)  # exactly one digit
            threshold |= tl.sum(tl.where(chosen_D, digit_D, 0), axis=0) << shift
            equal = tl.sum(tl.where(chosen_D, counts_D, 0), axis=0)
            rank -= tl.sum(tl.where(chosen_D, above_D, 0), axis=0)
        # `rank` is now that among the samples which equal the threshold.
        above = first_rank - rank
        chance = ((wanted - above.to(tl.float64)) / equal.to(tl.float64)).to(tl.float32)
        # What ties with nothing but itself is drawn once for the range.
        draw = tl.load(row + 8).to(tl.float32) * 0.000000059604644775390625  # 2^-24
        chance = tl.where(equal == 1, (draw < chance).to(tl.float32), chance)
        has_chance = (threshold > 0) & (threshold < _INFINITY)
        tl.store(thresholds + r, threshold.to(tl.float32, bitcast=True))
        tl.store(chances + r, tl.where(has_chance, chance, 0.0))
        tl.store(ties + r, equal.to(tl.int64))
    else:
        tl.store(thresholds + r, -1.0)
        tl.store(chances + r, 0.0)
        tl.store(ties + r, tl.zeros((), tl.int64))
