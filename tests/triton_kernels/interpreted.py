"""Run by test_triton.py, with TRITON_INTERPRET=1 set before Triton is imported."""

import itertools
import math

import torch

from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.triton_kernels import prune as triton_prune
from tests.cuda_ext import cases


def main() -> None:
    """Compares the kernel with the oracle; prints how many cases were equal."""
    # Nothing, less than a block, and two blocks of which one is partial.
    sizes, pruned = (0, 17, triton_prune.BLOCK + 1), 0
    types = list(itertools.product(cases.DTYPES, cases.RESIDUAL_DTYPES))
    kinds = (("spread", 0.9, 7), ("special", 1.0, -1))
    for case in itertools.product(types, range(3), sizes, kinds):
        (dtype, residual_dtype), wire, numel, (kind, leak, key) = case
        # Unaligned views, with an empty range and borders inside a block.
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
        cases.assert_same_bits(grad, expected[0], f"{case}: grad")
        cases.assert_same_bits(residual, expected[1], f"{case}: residual")
        assert torch.equal(nnz, expected[2]), case
        pruned += 1
    print(f"{pruned} prunings are equal")


if __name__ == "__main__":
    main()
