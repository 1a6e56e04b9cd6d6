"""Run by test_triton.py, with TRITON_INTERPRET=1 set before Triton is imported."""

import itertools
import math

import torch
import triton
import triton.language as tl

from megatron_sparse.cuda_ext import threshold_triton
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.reference import threshold as oracle
from megatron_sparse.triton_kernels import prune as triton_prune
from megatron_sparse.triton_kernels import threshold as triton_threshold
from megatron_sparse.triton_kernels.counter_hash import DRAW_SAMPLE, hash_seed
from tests.cuda_ext import cases
from tests.cuda_ext.threshold_cases import (
    DENSITIES,
    KEYS,
    assert_same_limits,
    check_selection,
    seven_ranges,
)


def main() -> None:
    """Compares the kernels with oracles and the CPU's codec; prints how many cases were equal."""
    # Nothing, less than a block, and two blocks of which one is partial.
    sizes, pruned, sampled = (0, 17, triton_prune.BLOCK + 1), 0, 0
    types = list(itertools.product(cases.DTYPES, cases.RESIDUAL_DTYPES))
    for (dtype, residual_dtype), wire, numel in itertools.product(types, range(3), sizes):
        for kind, leak, key in (("spread", 0.9, 7), ("special", 1.0, -1)):
            check_prune(numel, kind, dtype, residual_dtype, wire, leak, key)
            pruned += 1
    for dtype, residual_dtype in itertools.product(cases.DTYPES, (None, *cases.DTYPES)):
        for kind, numel, samples in (("spread", 4097, 700), ("special", 701, 10**6)):
            check_oracle(kind, numel, samples, dtype, residual_dtype)
            sampled += 1
    check_oracle("spread", 0, 5, torch.float32, None)
    check_oracle("equal", 17, 1, torch.float32, None)
    for numel, samples, key in ((1, 5, 3), (2**31 + 9, 300, 2**63 - 1), (2**40, 40, 2**31)):
        check_positions(numel, samples, key)
    for dtype, residual_dtype in types:
        selection = (torch.tensor([0, 1500, 1500, 3000]), torch.tensor([0.05, 0.5, 1.0]), 500)
        tested = (threshold_triton.sample_threshold, prune_)
        check_selection(dtype, residual_dtype, selection, torch.clone, tested)
        sampled += 1
    print(f"{pruned} prunings and {sampled} samplings are equal")


def check_prune(
    numel: int,
    kind: str,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    wire: int,
    leak: float,
    key: int,
) -> None:
    """One call on unaligned views, with an empty range and borders inside a block."""
    grad = cases.unaligned(cases.make(kind, numel, dtype, seed=1))
    residual = cases.unaligned(cases.make(kind, numel, residual_dtype, seed=2))
    offsets = cases.cut(numel, 4, seed=numel)
    offsets[2] = offsets[1]
    thresholds = torch.tensor([-1.0, 5.0, math.inf, 1e-3])
    grad[1::3], residual[1::3] = -2.5, -2.5
    grad[2::11], residual[2::11] = 0, 1e-3  # ties where the residual is fp32
    chances = None if wire == 1 else torch.tensor([1.0, 0.4, 0.5, 0.6])
    pruning = Pruning(residual, offsets, thresholds, leak, key, tie_chances_R=chances)
    expected = prune_oracle.prune(grad, pruning, wire)
    limits = (thresholds, chances)
    nnz = triton_prune.prune_(grad, residual, offsets, limits, leak, wire, key)
    what = f"{numel} {kind} {dtype} {residual_dtype} wire {wire} key {key}"
    cases.assert_same_bits(grad, expected[0], f"{what}: grad")
    cases.assert_same_bits(residual, expected[1], f"{what}: residual")
    assert torch.equal(nnz, expected[2]), what


def check_oracle(
    kind: str, numel: int, samples: int, dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    """One call on unaligned views, with ranges that are empty, short, kept whole and tied."""
    arguments = (*seven_ranges(kind, numel, dtype, residual_dtype), DENSITIES, samples, KEYS)
    found = threshold_triton.sample_threshold(*arguments)
    expected = oracle.sample_threshold(*arguments)
    assert_same_limits(found, expected, f"{kind} {numel} {dtype} {residual_dtype}")


@triton.jit
def _positions_kernel(out, numel, count, a, b, BLOCK: tl.constexpr):
    sample_B = tl.arange(0, BLOCK).to(tl.int64)
    random_B = triton_prune._hash_bits(
        tl.load(a).to(tl.uint32), tl.load(b).to(tl.uint32), sample_B.to(tl.uint32)
    )
    position_B = triton_threshold._sample_position(
        tl.load(numel), tl.load(count), sample_B, random_B
    )
    tl.store(out + sample_B, position_B, mask=sample_B < tl.load(count))


def check_positions(numel: int, samples: int, key: int) -> None:
    """The positions, up to the longest bucket."""
    expected = oracle.sample_positions(numel, samples, key)
    numbers = (numel, len(expected), *hash_seed(key, DRAW_SAMPLE))
    out = torch.zeros(512, dtype=torch.int64)
    _positions_kernel[(1,)](out, *(torch.tensor([n]) for n in numbers), BLOCK=512)  # pyright: ignore[reportIndexIssue]
    assert out[: len(expected)].tolist() == expected, (numel, samples, key)


def prune_(values: torch.Tensor, pruning: Pruning, wire: int) -> torch.Tensor:
    """`ops.prune_`, by Triton."""
    limits = (pruning.thresholds_R, pruning.tie_chances_R)
    place = (pruning.residual_N, pruning.range_offsets, limits)
    return triton_prune.prune_(values, *place, pruning.leak, wire, pruning.key)


if __name__ == "__main__":
    main()
