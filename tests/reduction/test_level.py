"""compression.level=node on virtual ranks: exact sums, one residual a node, bytes across nodes."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.sparse import SparseConfig
from tests.reduction.virtual_level import VirtualRanks, parameters

AR, RS = CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER
NODES = [
    (1,),
    (2,),
    (1, 1),
    (3,),
    (1, 2),
    (4,),
    (2, 2),
    (1, 1, 1, 1),
    (3, 2),
    (1, 1, 1, 1, 1),
    (4, 4),
    (2, 2, 2, 2),
    (3, 3, 2),
    (4, 4, 4, 4),
    (2,) * 8,
    (4, 3, 3, 3, 3),
]


def settings(**overrides):
    """A configuration whose every step prunes."""
    given = {
        "level": "node",
        "density": 0.05,
        "warmup_iters": 0,
        "ramp_iters": 0,
        "keep_below_numel": 0,
        "samples": 200,
        "scheme": "direct",
    }
    return SparseConfig.from_overrides(**given | overrides)


def numel_of(op, sizes):
    """Of an all-reduce no multiple of the ranks of a node."""
    n = sum(sizes)
    return 12 * 101 * n if op is RS else 12 * 101 * n + 1


def gradients(ranks, step, dtype=torch.float32):
    """Small integers, different on each rank, zero in the padding."""
    numel = ranks.buckets[0].numel
    mask_N = torch.zeros(numel)
    for piece in parameters(numel):
        mask_N[piece.start : piece.stop] = 1
    drawn = []
    for rank in range(ranks.n):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        drawn_N = torch.randint(-9, 10, (numel,), generator=generator)
        drawn.append((drawn_N * mask_N).to(dtype))
    return drawn


def check_step(ranks, step, dtype=torch.float32, **options):
    """One step: the sum is that of what was sent, on all ranks."""
    found = ranks.step(gradients(ranks, step, dtype), step, **options)
    total_N = sum(found.sent).to(dtype)
    for rank, result_N in enumerate(found.results):
        own = ranks.part_of_result(rank, result_N)
        assert torch.equal(own, ranks.part_of_result(rank, total_N)), (step, rank)
    return found


@pytest.mark.parametrize("op", [AR, RS])
@pytest.mark.parametrize("sizes", NODES, ids=str)
def test_sums_are_exact_and_nothing_is_lost(sizes, op):
    ranks = VirtualRanks(settings(), sizes, op, numel_of(op, sizes))
    even = len(set(sizes)) == 1 and sizes[0] > 1
    assert ranks.choice.level == ("node" if even else "rank")
    for step in range(3):
        found = check_step(ranks, step)
        if even and len(sizes) > 1:
            part = ranks.reducers[0].part(ranks.buckets[0])
            assert part.numel < ranks.buckets[0].numel
            assert 0 < found.records[0].nnz < 0.2 * part.numel
