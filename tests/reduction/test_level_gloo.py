"""compression.level=node on four gloo ranks that count as two nodes; several buckets on the way."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.config.straggler import StragglerConfig
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.level_parts import in_whole_bucket
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport
from tests.ranks import run_ranks
from tests.reduction.reducers import integers, reducer_of, residual_of
from tests.reduction.virtual_level import parameters, settings

NODES = (0, 0, 1, 1)
NUMELS = (4 * 5001, 4 * 300, 4 * 9000)
STEPS = 3


def _train(rank, world_size, op, config):
    """Whether each sum was exact, and all ranks' sums had the same bits."""
    import torch.distributed as dist

    cpu = torch.device("cpu")
    choice = choose_level(config, NODES)
    every = range(world_size)
    wanted = dict.fromkeys([*map(choice.inside, every), *map(choice.across, every)])
    made = {members: dist.new_group(list(members)) for members in wanted}
    groups = dist.group.WORLD, made[choice.inside(rank)], made[choice.across(rank)]
    transports = [ProcessGroupTransport(group, 30.0, cpu) for group in groups]
    whole, inside, across = transports
    level = LevelGroups(inside, across)
    progress = ProgressThread(cpu, 30.0)
    reducer = reducer_of(config, Groups(whole, level=level), progress=progress)
    residuals = reducer.selector.residuals
    buckets = [
        Bucket(str(number), torch.zeros(numel), parameters(numel), op, world_size)
        for number, numel in enumerate(NUMELS)
    ]
    exact = []
    for step in range(STEPS):
        given, before = [], []
        for bucket in buckets:
            seed = 100 * step + 10 * rank + int(bucket.name)
            given.append(integers(bucket.parameters, bucket.numel, seed))
            bucket.grad_N.copy_(given[-1])
            before.append(_residual(reducer, bucket))
        for pending in [reducer.start(bucket, step) for bucket in buckets]:
            pending.wait()
        residuals.commit()
        for bucket, given_N, before_N in zip(buckets, given, before, strict=True):
            total_N = given_N + before_N - _residual(reducer, bucket)
            dist.all_reduce(total_N)
            own = slice(None) if op is CollectiveOp.ALL_REDUCE else bucket.shard(rank)
            exact.append(torch.equal(bucket.grad_N[own], total_N[own]))
    progress.close()
    for transport in transports:
        transport.close()
    return exact, residuals.nbytes - residuals.undo_nbytes


def _residual(reducer, bucket):
    """The residual of this rank's part, at its place in the bucket."""
    return in_whole_bucket(residual_of(reducer, bucket), reducer.part(bucket), bucket)


ALL_REDUCE, REDUCE_SCATTER = CollectiveOp


PINNED = {"straggler": StragglerConfig(mode="pinned", rank=1)}
PERSISTENT = {
    "straggler": StragglerConfig(mode="persistent", min_delay_ms=1.0),
    "deterministic": False,
}


@pytest.mark.parametrize(
    ("overrides", "op"),
    [
        ({}, ALL_REDUCE),
        ({}, REDUCE_SCATTER),
        ({"scheme": "agsparse"}, ALL_REDUCE),
        (PINNED, ALL_REDUCE),
        (PERSISTENT, ALL_REDUCE),
    ],
)
def test_four_ranks_as_two_nodes(overrides, op):
    config = settings(timeout_s=30.0, warmup_iters=1, samples=500, **overrides)
    for exact, nbytes in run_ranks(_train, 4, op, config):
        assert exact == [True] * len(NUMELS) * STEPS
        assert nbytes == 4 * sum(NUMELS) // 2, "half of the buckets"
