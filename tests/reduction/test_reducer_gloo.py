"""The whole data path on real gloo ranks, different data on each, compared exactly."""

import itertools
from functools import partial

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES
from tests.collectives.cases import same_on_all_ranks
from tests.planner.planned import a_bucket
from tests.ranks import run_ranks
from tests.records import Kept
from tests.reduction.reducers import at_target, integers, reducer_over_gloo, residual_of
from tests.straggler.settings import section_for

NUMEL = 12 * 1009
DENSITIES, NAMES = (0.01, 0.3, 1.0), ("agsparse", "dense")
CASES = list(itertools.product(CollectiveOp, ("fp32", "bf16"), (None, "bf16"), DENSITIES, NAMES))
# The other schemes have their matrix on virtual ranks; here, a sample over real sockets.
CASES += [
    (op, dtype, wire, density, name)
    for name, scheme in SCHEMES.items()
    for op, dtype, wire, density in (
        (CollectiveOp.ALL_REDUCE, "fp32", None, 0.01),
        (CollectiveOp.ALL_REDUCE, "fp32", "bf16", 0.3),
        (CollectiveOp.REDUCE_SCATTER, "bf16", None, 0.3),
    )
    if name not in ("agsparse", "dense") and op in scheme.ops
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _parameters():
    """Pruned and kept parameters with padding between some of them."""
    sizes = [(5000, False), (37, True), (3000, False), (64, True), (3500, False)]
    pieces, start = [], 0
    for index, (size, keep) in enumerate(sizes):
        pieces.append(ParameterSlice(f"w{index}", start, start + size, keep))
        start += size + 3
    return pieces


def _gradient(rank, round_, dtype):
    """Different on each rank, and in each round."""
    return integers(_parameters(), NUMEL, 100 * round_ + rank, dtype, largest=7)


def _config(scheme, density, wire_dtype=None, capacity="auto"):
    fixed = {"samples": 500, "leak": 1.0, "straggler": section_for(scheme), "scheme": scheme}
    sent = {"density": density, "wire_dtype": wire_dtype, "capacity": capacity}
    return at_target(timeout_s=30.0, **fixed, **sent)


def two_steps(scheme, op, gradient_of, pieces, density, **options):
    """Two steps of a scheme on this rank of a gloo world, with another gradient in each.

    Returns of each step: this rank's part of the sum in fp32, what the rank sent, and the record.
    """
    import torch.distributed as dist

    rank, found, carried = dist.get_rank(), [], 0
    with reducer_over_gloo(_config(scheme, density, **options), sink := Kept()) as reducer:
        for step in range(2):
            gradient = gradient_of(rank, step)
            bucket = Bucket("b", gradient.clone(), pieces, op, dist.get_world_size())
            reducer.start(bucket, step).wait()
            reducer.selector.residuals.commit()
            after = residual_of(reducer, bucket)
            sent, carried = gradient.float() + carried - after, after
            own = slice(None) if op is CollectiveOp.ALL_REDUCE else bucket.shard(rank)
            found.append((bucket.grad_N[own].float().clone(), sent, sink.buckets[-1]))
    return found


def _matrix(rank, world_size, cases):
    found = []
    for op, dtype, wire, density, scheme in cases:
        draw = partial(_gradient, dtype=DTYPES[dtype])
        found.append(two_steps(scheme, op, draw, _parameters(), density, wire_dtype=wire))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_gets_the_exact_sum_of_what_all_selected(world_size):
    by_rank = run_ranks(_matrix, world_size, CASES)
    for case, results in zip(CASES, zip(*by_rank, strict=True), strict=True):
        op, _, _, density, scheme = case
        for step in range(2):
            expected = sum(steps[step][1] for steps in results)
            pieces = [steps[step][0] for steps in results]
            assert torch.equal(same_on_all_ranks(op, pieces), expected), (case, step)
        if scheme != "agsparse":
            continue
        for rank, steps in enumerate(results):
            for step, (_, sent, record) in enumerate(steps):
                if density == 1.0:  # the threshold is bypassed: nothing is left behind
                    assert torch.equal(sent, _gradient(rank, step, torch.float32)), case
                if density == 0.01:
                    assert record.nnz < 0.05 * NUMEL
                    assert world_size == 1 or record.wire_bytes < record.dense_bytes


REPEATS = 2
IN_FLIGHT = ("agsparse", "direct", "ssar_rd", "sparse_ring", "dense_allpairs")


def _many_buckets(rank, world_size):
    """Buckets of very different size in flight together; the result must not depend on timing."""
    sums = {}
    for scheme in IN_FLIGHT:
        with reducer_over_gloo(_config(scheme, 0.1)) as reducer:
            for repeat in range(REPEATS):
                buckets, pendings = [], []
                for index in range(12):
                    numel = 10 if index % 3 else 100_000
                    drawn = torch.Generator().manual_seed(1000 * rank + index)
                    gradient = torch.randn(numel, generator=drawn)
                    buckets.append(a_bucket(gradient, world_size, str(index)))
                    pendings.append(reducer.start(buckets[-1], step=0))
                for pending in pendings:
                    pending.wait()
                reducer.selector.residuals.rollback()
                sums[scheme, repeat] = [bucket.grad_N.clone() for bucket in buckets]
    return sums


def test_buckets_in_flight_together_stay_bit_identical_on_all_ranks():
    first, *others = run_ranks(_many_buckets, 3)
    for (scheme, repeat), buckets in first.items():
        for index, bucket in enumerate(buckets):
            assert bucket.any()
            # Every repeat sums the same selection, whatever was in flight beside it.
            assert torch.equal(bucket, first[scheme, 0][index]), (scheme, repeat, index)
            for other in others:
                assert torch.equal(bucket, other[scheme, repeat][index]), (scheme, repeat, index)
