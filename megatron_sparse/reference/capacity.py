"""Pruning to at most a given number of elements a segment: the oracle of `prune_encode`'s capacity.

The first non-zero elements of a segment stay. For each other element, let v be the value that would
have been sent and e' its rounding error. Its residual becomes leak (v + e'), rounded as any
residual is. If the sum v + e' is infinite or NaN, the residual becomes 0 and the last value that
stays becomes NaN; if no value stays, the residual becomes NaN.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.reference.counter_hash import DRAW_RESIDUAL, counter_hash
from megatron_sparse.reference.prune import BF16, grid_of, prune, round_to, with_one_nan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prune_limited(
    grad_N: torch.Tensor, pruning: Pruning, wire_dtype: int, segment_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sent values, in the wire's dtype, and the new residual; mutates nothing.

    Args are those of `cuda_ext.ops.prune_encode`.
    """
    pruned_N, rest_N, _ = prune(grad_N, pruning, wire_dtype)
    leak, key, capacity_S = pruning.leak, pruning.key, pruning.capacity_S
    assert capacity_S is not None, "without a limit it is `prune`"
    out_N = with_one_nan(pruned_N, _DTYPES[wire_dtype])
    for (start, stop), most in zip(
        pairwise(segment_offsets.tolist()), capacity_S.tolist(), strict=True
    ):
        nonzero_K = out_N[start:stop].nonzero().squeeze(1) + start
        over_K = nonzero_K[most:]
        x_K = out_N[over_K].float() + rest_N[over_K].float()
        finite_K = x_K.isfinite()
        given_K = torch.where(finite_K, x_K, 0) * torch.tensor(leak)
        if rest_N.dtype == torch.bfloat16:
            random_K = counter_hash(key, DRAW_RESIDUAL, over_K) if key >= 0 else None
            given_K = round_to(given_K, grid_of(BF16), random_K)
        out_N[over_K] = 0
        if most > 0 and not finite_K.all():
            out_N[nonzero_K[most - 1]] = float("nan")
        given_K = torch.where(finite_K | (most > 0), given_K, float("nan"))
        rest_N[over_K] = with_one_nan(given_K, rest_N.dtype)
    return with_one_nan(out_N, out_N.dtype), rest_N
