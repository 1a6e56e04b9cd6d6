"""Pruning with leaky error feedback: the oracle of `prune_`.

`x = g + e; drop = |x| <= t; out = drop ? 0 : round(x); e' = drop ? leak x : x - out`, all in fp32.
An element with |x| = t > 0 is not dropped when `(h >> 8) / 2^24 < chance`.

`round` goes to the values that both the gradient's dtype and the wire's can hold. Stochastic
rounding goes up with the probability of the part cut off. Where a value is cut by d bits of its
mantissa, it goes up when `fraction + (h mod 2^d) / 2^d >= 1`; under the smallest normal fp16, where
the step is fixed at 2^-24, it goes up when `(h >> 8) / 2^24 < fraction`. h is the counter hash of
the element's index in the bucket.

`prune_limited` prunes to at most a given number of elements a segment, `prune_encode`'s capacity.
The first non-zero elements of a segment are sent. For each later one, let v be the value that would
have been sent and e' its rounding error. Its residual becomes leak (v + e'), rounded as any
residual is. If the sum v + e' is infinite or NaN, the residual becomes 0 and the last value that
is sent becomes NaN; if none is sent, the residual becomes NaN.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.triton_kernels.counter_hash import (
    DRAW_RESIDUAL,
    DRAW_TIE,
    DRAW_VALUE,
    counter_hash,
)

FP32, BF16, FP16 = range(3)
CODE_OF = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
DTYPES = tuple(CODE_OF)
_NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


@dataclass(frozen=True)
class Grid:
    """A set of values: `precision` bits of mantissa, no step under 2^`least_step`, up to `limit`.

    `fixed_step`: under the smallest normal value, rounding compares as the file's head says.
    """

    precision: int
    least_step: int
    limit: float
    fixed_step: bool


_GRIDS = {
    frozenset({FP32}): Grid(24, -149, float(torch.finfo(torch.float32).max), False),
    frozenset({BF16}): Grid(8, -133, float(torch.finfo(torch.bfloat16).max), False),
    frozenset({FP16}): Grid(11, -24, 65504.0, True),
    frozenset({BF16, FP16}): Grid(8, -24, 65280.0, True),
}


def grid_of(*dtype_codes: int) -> Grid:
    """The values that all of these dtypes hold; fp32 holds all of the others'."""
    return _GRIDS[frozenset(dtype_codes) - {FP32} or frozenset({FP32})]


def round_to(x_N: torch.Tensor, grid: Grid, random_N: torch.Tensor | None) -> torch.Tensor:
    """Rounds finite fp32 values to `grid`, stochastically by `random_N` or else to nearest even.

    Args:
        x_N: finite, fp32.
        grid: the values to round to.
        random_N: the counter hash of each element; None rounds to nearest even.

    Returns:
        fp32, exactly on the grid, saturated at its limit.
    """
    # A magnitude is `whole + fraction` steps of the grid; `up` says whether it gets one more.
    magnitude = x_N.double().abs()
    exponent = torch.frexp(magnitude).exponent.long() - 1
    step_exponent = (exponent - (grid.precision - 1)).clamp(min=grid.least_step)
    step = torch.ldexp(torch.ones_like(magnitude), step_exponent)
    whole = (magnitude / step).floor()
    fraction = magnitude / step - whole
    if random_N is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (whole % 2 == 1))
    else:
        draws = 2 ** (24 - grid.precision)  # one for each value of the bits that are cut off
        up = fraction + (random_N % draws).double() / draws >= 1
        if grid.fixed_step:
            smallest_normal = 2.0 ** (grid.least_step + grid.precision - 1)
            chance = (random_N >> 8).double() / 2**24
            up = torch.where(magnitude < smallest_normal, chance < fraction, up)
    rounded = ((whole + up) * step).clamp(max=grid.limit)
    return torch.copysign(rounded, x_N.double()).float()


def prune(
    grad_N: torch.Tensor, pruning: Pruning, wire_dtype: int, first_index: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prunes; returns the new gradient, the new residual and the non-zero counts nnz_R.

    Mutates nothing. Args and dtypes are those of `cuda_ext.ops.prune_`; `first_index` is the index
    in the bucket of element 0, if `grad_N` is a part of one.
    """
    residual_N, range_offsets, key = pruning.residual_N, pruning.range_offsets, pruning.key
    if pruning.old_residual_N is not None:
        residual_N = pruning.old_residual_N
    lengths = range_offsets.diff()
    threshold_N = torch.repeat_interleave(pruning.thresholds_R, lengths)
    # The threshold is clamped, so that infinity is never dropped; a NaN one keeps everything.
    threshold_N = torch.where(
        threshold_N > torch.finfo(torch.float32).max, torch.finfo(torch.float32).max, threshold_N
    )
    x_N = grad_N.float() + residual_N.float()
    drop = x_N.abs() <= threshold_N
    finite = x_N.isfinite()
    index_N = torch.arange(grad_N.numel()) + first_index
    if pruning.tie_chances_R is not None:
        chance_N = torch.repeat_interleave(pruning.tie_chances_R, lengths).double()
        drawn = (counter_hash(key, DRAW_TIE, index_N) >> 8).double() / 2**24 < chance_N
        tied = (x_N.abs() == threshold_N) & (threshold_N > 0)
        drop &= ~(tied & drawn)

    finite_x = torch.where(finite, x_N, 0)  # infinity and NaN are not rounded: see `out` below
    random = counter_hash(key, DRAW_VALUE, index_N) if key >= 0 else None  # None: to nearest
    rounded = round_to(finite_x, grid_of(CODE_OF[grad_N.dtype], wire_dtype), random)
    out = torch.where(finite, rounded, x_N)
    out = torch.where(drop, 0, out)
    error = torch.where(finite, x_N - rounded, 0)
    leaked = x_N * torch.tensor(pruning.leak, dtype=torch.float32)
    new_residual = residual_in(residual_N.dtype, torch.where(drop, leaked, error), key, index_N)

    counts = [int((out[a:b] != 0).sum()) for a, b in pairwise(range_offsets.tolist())]
    nnz_R = torch.tensor(counts, dtype=torch.int64)
    return with_one_nan(out, grad_N.dtype), new_residual, nnz_R


def residual_in(
    dtype: torch.dtype, value_K: torch.Tensor, key: int, index_K: torch.Tensor
) -> torch.Tensor:
    """Converts new residuals of some elements to the residual's dtype.

    Rounds to bf16 by random bits of the key; with a negative key, to nearest even.
    """
    if dtype == torch.bfloat16:
        random_K = counter_hash(key, DRAW_RESIDUAL, index_K) if key >= 0 else None
        value_K = round_to(value_K, grid_of(BF16), random_K)
    return value_K.to(dtype)


def with_one_nan(x_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to `dtype`, each NaN becoming the same quiet one: torch's own vary by machine."""
    result = x_N.to(dtype, copy=True)
    nan = x_N.isnan()
    if dtype == torch.float32:
        result.view(torch.int32)[nan] = 0x7FC00000
    else:
        result.view(torch.int16)[nan] = _NAN_BITS[dtype]
    return result


def prune_limited(
    grad_N: torch.Tensor, pruning: Pruning, wire_dtype: int, segment_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prunes to a capacity; returns the sent values, in the record's dtype, and the new residual.

    Mutates nothing. The file's head has the rule for elements beyond the capacity. Args are those
    of `cuda_ext.ops.prune_encode`.
    """
    pruned_N, residual_N, _ = prune(grad_N, pruning, wire_dtype)
    leak, key, capacity_S = pruning.leak, pruning.key, pruning.capacity_S
    assert capacity_S is not None, "without a limit it is `prune`"
    out_N = with_one_nan(pruned_N, DTYPES[wire_dtype])
    for (start, stop), most in zip(
        pairwise(segment_offsets.tolist()), capacity_S.tolist(), strict=True
    ):
        nonzero_K = out_N[start:stop].nonzero().squeeze(1) + start
        over_K = nonzero_K[most:]  # beyond the capacity: not sent
        x_K = out_N[over_K].float() + residual_N[over_K].float()
        finite_K = x_K.isfinite()
        residual_K = torch.where(finite_K, x_K, 0) * torch.tensor(leak)
        residual_K = residual_in(residual_N.dtype, residual_K, key, over_K)
        out_N[over_K] = 0
        # NaN and infinity must not wait in the residual: the last value that is sent becomes NaN.
        if most > 0 and not finite_K.all():
            out_N[nonzero_K[most - 1]] = float("nan")
        residual_K = torch.where(finite_K | (most > 0), residual_K, float("nan"))
        residual_N[over_K] = with_one_nan(residual_K, residual_N.dtype)
    return with_one_nan(out_N, out_N.dtype), residual_N
