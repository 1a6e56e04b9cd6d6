"""Leaky error feedback and pruning in Triton: the same bits as the compiled op.

One program prunes BLOCK consecutive elements in place, and counts those that stay non-zero for each
range that overlaps them, nearly always one. Rounding and bf16 use integer arithmetic, so the result
does not depend on the machine and is right in Triton's interpreter, whose own bf16 is wrong.

Shape suffixes: N elements of the bucket, R ranges, B elements of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_sparse.triton_kernels.counter_hash import (
    DRAW_RESIDUAL,
    DRAW_TIE,
    DRAW_VALUE,
    hash_seed,
)

BLOCK = 2048
_CODE_OF = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# A grid of values: mantissa bits cut from fp32, fp32 bits under which the step is fixed at 2^-24,
# fp32 bits of the largest value. Keyed by the 16-bit dtypes that must hold them; see csrc/dtypes.h.
_GRIDS = {
    frozenset(): (0, 0, 0x7F7FFFFF),
    frozenset({1}): (16, 0, 0x7F7F0000),
    frozenset({2}): (13, 113 << 23, 0x477FE000),
    frozenset({1, 2}): (16, 110 << 23, 0x477F0000),
}


def prune_(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    range_offsets: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor | None],
    leak: float,
    wire_dtype: int,
    key: int,
) -> torch.Tensor:
    """Prunes `grad_N` in place, and updates `residual_N`; returns the non-zero counts nnz_R.

    `cuda_ext.ops.prune_` defines the result and checks the arguments; here all tensors, the offsets
    too, are on one device. `limits` are thresholds_R, and tie_chances_R or None for no ties.
    Launches one kernel on the current stream; the CPU does not wait.
    """
    thresholds_R, tie_chances_R = limits
    numel, range_count = grad_N.numel(), thresholds_R.numel()
    nnz_R = torch.zeros(range_count, dtype=torch.int64, device=grad_N.device)
    if numel == 0:
        return nnz_R
    grad, residual = _CODE_OF[grad_N.dtype], _CODE_OF[residual_N.dtype]
    # Values are rounded to what both dtypes hold. fp32 (0) is left out: it holds all the others.
    cut, fixed_below, limit = _GRIDS[frozenset({grad, wire_dtype}) - {0}]
    # Two words for each draw, in the order of the kernel's arguments.
    draws = (DRAW_VALUE, DRAW_RESIDUAL, DRAW_TIE)
    seeds = [word for draw in draws for word in hash_seed(key, draw)]
    kernel: Any = _prune_kernel  # Triton types a launch as the call of the Python function
    with torch.cuda.device_of(grad_N):
        kernel[(triton.cdiv(numel, BLOCK),)](
            _raw(grad_N),
            _raw(residual_N),
            range_offsets,
            thresholds_R,
            # Without TIES the kernel does not read this pointer: any will do.
            thresholds_R if tie_chances_R is None else tie_chances_R,
            nnz_R,
            numel,
            range_count,
            leak,
            *map(_signed, seeds),
            GRAD=grad,
            RESIDUAL=residual,
            CUT=cut,
            FIXED_BELOW=fixed_below,
            LIMIT=limit,
            STOCHASTIC=key >= 0,
            TIES=tie_chances_R is not None,
            BLOCK=BLOCK,
        )
    return nnz_R


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits: Triton types larger integers as int64."""
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _random_bits(seed_a, seed_b, high, low_B):
    """32 random bits for each element; `high` and `low_B` are the halves of the elements' indices.

    `cuda_ext/csrc/counter_hash.h` defines this hash, its shifts and its factors.
    """
    x = low_B ^ (seed_a.to(tl.uint32, bitcast=True) ^ high * 0x85EBCA6B)
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x += seed_b.to(tl.uint32, bitcast=True) + high * 0xC2B2AE35
    x *= 0xD35A2D97
    x ^= x >> 15
    return x


@triton.jit
def _widen(raw_B, DTYPE: tl.constexpr):
    """Converts raw bits, of fp32, bf16 or fp16 (DTYPE 0, 1 or 2), to fp32."""
    if DTYPE == 0:
        return raw_B.to(tl.float32, bitcast=True)
    elif DTYPE == 1:
        wide_B = raw_B.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return wide_B.to(tl.float32, bitcast=True)
    else:
        return raw_B.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _store_bits(bits_B, DTYPE: tl.constexpr):
    """Converts bits of fp32 values to those of a dtype that holds them; DTYPE as in `_widen`."""
    if DTYPE == 0:
        return bits_B.to(tl.int32, bitcast=True)
    elif DTYPE == 1:
        return (bits_B >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        half_B = bits_B.to(tl.float32, bitcast=True).to(tl.float16).to(tl.uint16, bitcast=True)
        # The hardware's conversion may give NaN any payload; 0x7E00 is the codec's.
        half_B = tl.where((bits_B & 0x7FFFFFFF) > 0x7F800000, 0x7E00, half_B.to(tl.uint32))
        return half_B.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _round_magnitude(
    u_B,
    random_B,
    CUT: tl.constexpr,
    FIXED_BELOW: tl.constexpr,
    LIMIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Rounds finite fp32 magnitudes, as bits `u_B`, by cutting off CUT bits; at most to LIMIT.

    With STOCHASTIC it rounds by `random_B`, else to nearest even. Below FIXED_BELOW (0: never) it
    rounds to multiples of 2^-24, the step of fp16's denormals. `csrc/elementwise.h` does the same.
    """
    MASK: tl.constexpr = (1 << CUT) - 1  # pyright: ignore[reportOperatorIssue]
    # The sum carries into the bits that stay where the value is rounded up; a tie goes to even.
    added_B = (random_B & MASK) if STOCHASTIC else ((u_B >> CUT) & 1) + (MASK >> 1)
    rounded_B = u_B + added_B
    rounded_B = (rounded_B >> CUT) << CUT
    rounded_B = tl.where(rounded_B > LIMIT, LIMIT, rounded_B).to(tl.uint32)
    if FIXED_BELOW != 0:
        # Whole multiples of 2^-24 (16777216 is 2^24), and the fraction of one.
        small_B = tl.where(u_B < FIXED_BELOW, u_B, 0).to(tl.uint32)
        scaled_B = small_B.to(tl.float32, bitcast=True) * 16777216.0
        whole_B = scaled_B.to(tl.int32)
        rest_B = scaled_B - whole_B.to(tl.float32)
        if STOCHASTIC:
            chance_B = (random_B >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
            up_B = chance_B < rest_B
        else:
            up_B = (rest_B > 0.5) | ((rest_B == 0.5) & ((whole_B & 1) == 1))
        fixed_B = (whole_B + up_B.to(tl.int32)).to(tl.float32) * (1.0 / 16777216.0)
        rounded_B = tl.where(u_B < FIXED_BELOW, fixed_B.to(tl.uint32, bitcast=True), rounded_B)
    return rounded_B


@triton.jit
def _find_range(range_offsets, range_count, element):
    """Finds an element's range (never an empty one): the last that begins at it or before."""
    low = tl.zeros((), tl.int64)
    high = low + range_count
    while high - low > 1:
        middle = low + (high - low) // 2
        begins_before = tl.load(range_offsets + middle) <= element
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle)
    return low


@triton.jit(
    # Else Triton compiles anew (for a second) where an argument is 1 or a multiple of 16.
    do_not_specialize=[
        "numel",
        "range_count",
        "seed_a",
        "seed_b",
        "residual_seed_a",
        "residual_seed_b",
        "tie_seed_a",
        "tie_seed_b",
    ]
)
def _prune_kernel(
    grad,
    residual,
    range_offsets,
    thresholds,
    tie_chances,
    nnz,
    numel,
    range_count,
    leak,
    seed_a,
    seed_b,
    residual_seed_a,
    residual_seed_b,
    tie_seed_a,
    tie_seed_b,
    GRAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CUT: tl.constexpr,
    FIXED_BELOW: tl.constexpr,
    LIMIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prunes BLOCK elements in place; adds each range's non-zero results to its count in `nnz`.

    `grad` and `residual` point to raw bits of the dtypes GRAD and RESIDUAL (codes as in `_widen`).
    g, e and `x = g + e` are those of `cuda_ext.ops.prune_`, which has the rule.
    """
    block_begin = tl.program_id(0).to(tl.int64) * BLOCK
    block_end = tl.minimum(block_begin + BLOCK, numel)
    at_B = block_begin + tl.arange(0, BLOCK)
    inside_B = at_B < numel
    g_B = tl.load(grad + at_B, mask=inside_B, other=0)
    e_B = tl.load(residual + at_B, mask=inside_B, other=0)

    # Limits of each element: of every range r in the block, written from its begin to the block's
    # end; the next range then overwrites its own elements.
    first_range = _find_range(range_offsets, range_count, block_begin)
    threshold_B = tl.zeros((BLOCK,), tl.float32)
    chance_B = tl.zeros((BLOCK,), tl.float32)
    r = first_range
    begin = block_begin
    while begin < block_end:
        end = tl.load(range_offsets + r + 1)
        threshold_B = tl.where(at_B >= begin, tl.load(thresholds + r), threshold_B)
        if TIES:
            chance_B = tl.where(at_B >= begin, tl.load(tie_chances + r), chance_B)
        begin = end
        r += 1
    # Capped at the largest fp32, so infinity is never dropped. A NaN threshold drops nothing.
    threshold_B = tl.where(threshold_B > 3.4028234663852886e38, 3.4028234663852886e38, threshold_B)

    x_B = _widen(g_B, GRAD) + _widen(e_B, RESIDUAL)
    bits_B = x_B.to(tl.uint32, bitcast=True)
    magnitude_B = bits_B & 0x7FFFFFFF
    sign_B = bits_B ^ magnitude_B
    drop_B = magnitude_B.to(tl.float32, bitcast=True) <= threshold_B
    finite_B = magnitude_B < 0x7F800000  # the bits of infinity; those of NaN are above

    # BLOCK divides 2^32: the upper half of the index is constant in a block.
    high = (block_begin >> 32).to(tl.uint32)
    low_B = at_B.to(tl.uint32)
    if TIES:
        tied_B = magnitude_B.to(tl.float32, bitcast=True) == threshold_B
        tied_B = tied_B & (threshold_B > 0) & (chance_B > 0)
        if tl.max(tied_B.to(tl.int32), axis=0) > 0:
            # 24 random bits over 2^24, compared with the chance.
            draw_B = _random_bits(tie_seed_a, tie_seed_b, high, low_B) >> 8
            draw_B = draw_B.to(tl.int32).to(tl.float32)
            drop_B = drop_B & ~(tied_B & (draw_B * (1.0 / 16777216.0) < chance_B))
    kept_B = magnitude_B
    if CUT != 0:
        random_B = _random_bits(seed_a, seed_b, high, low_B)
        kept_B = _round_magnitude(magnitude_B, random_B, CUT, FIXED_BELOW, LIMIT, STOCHASTIC)
    # Infinity is not rounded; every NaN becomes the codec's.
    special_B = tl.where(magnitude_B > 0x7F800000, 0x7FC00000, bits_B).to(tl.uint32)
    kept_B = tl.where(finite_B, kept_B | sign_B, special_B)
    out_B = tl.where(drop_B, 0, kept_B).to(tl.uint32)

    remainder_B = tl.where(finite_B, x_B - kept_B.to(tl.float32, bitcast=True), 0.0)
    residual_B = tl.where(drop_B, x_B * leak, remainder_B).to(tl.uint32, bitcast=True)
    if RESIDUAL == 1:
        random_B = _random_bits(residual_seed_a, residual_seed_b, high, low_B)
        residual_magnitude_B = residual_B & 0x7FFFFFFF
        # Round to bf16: 16 bits are cut off, and the largest value is 0x7F7F.
        residual_B = (residual_B ^ residual_magnitude_B) | _round_magnitude(
            residual_magnitude_B, random_B, 16, 0, 0x7F7F0000, STOCHASTIC
        )

    tl.store(grad + at_B, _store_bits(out_B, GRAD), mask=inside_B)
    tl.store(residual + at_B, _store_bits(residual_B, RESIDUAL), mask=inside_B)

    # Count the non-zero results of each range in the block.
    nonzero_B = inside_B & ((out_B & 0x7FFFFFFF) != 0)
    r = first_range
    begin = block_begin
    while begin < block_end:
        end = tl.load(range_offsets + r + 1)
        mine_B = nonzero_B & (at_B >= begin) & (at_B < end)
        count = tl.sum(mine_B.to(tl.int32), axis=0)
        if count > 0:
            tl.atomic_add(nnz + r, count.to(tl.int64), sem="relaxed")
        begin = end
        r += 1
