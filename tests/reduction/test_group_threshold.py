"""One threshold for the ranks of a tensor-parallel group."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives.base import without
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SparseConfig
from megatron_sparse.cuda_ext.record_spec import KEEP_ALL
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.group_threshold import GroupThreshold
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport, VirtualCluster
from tests.ranks import run_ranks
from tests.reduction.reducers import at_target, reducer_of, residual_of

NUMEL = 10_000


def _bucket(rank, *, numel=NUMEL, keep=False, constant=False, world_size=1):
    """Gradients of rank r are r + 1 times as large as those of rank 0."""
    generator = torch.Generator().manual_seed(rank)
    grad_N = torch.randn(numel, generator=generator) * (rank + 1)
    if constant:
        grad_N = torch.full((numel,), rank + 1.0)
    pieces = [ParameterSlice("w", 0, numel, keep)]
    return Bucket("b", grad_N, pieces, CollectiveOp.ALL_REDUCE, world_size)


def _limits(density, config=None, n=4, **bucket):
    config = config or CompressionConfig(threshold_scope="tp_group", samples=NUMEL)

    def start(transport):
        own = {name: value[transport.rank] for name, value in bucket.items()}
        made = _bucket(transport.rank, **own)
        residuals, buffers = ResidualStore(torch.float32), MessageBuffers()
        group = GroupThreshold(Selector(config, residuals, transport.rank, buffers), transport)
        agreed = yield from without(group.agree(made, density, 3, StageTimer()), Gate)
        assert not agreed.residual_N.any()
        return agreed.limits

    return VirtualCluster(n).run(start)


def test_all_ranks_have_the_quantile_of_all_samples():
    found = _limits(0.1)
    assert len({tuple(limit.item() for limit in limits) for limits in found}) == 1
    threshold = found[0].thresholds
    everything = torch.cat([_bucket(rank).grad_N for rank in range(4)]).abs()
    # The samples are all elements: the threshold is exact.
    assert int((everything > threshold).sum()) == 4000
    shares = [int((_bucket(rank).grad_N.abs() > threshold).sum()) for rank in range(4)]
    assert shares == sorted(shares)
    assert shares[3] > 10 * shares[0], "who has larger gradients sends more"


def test_few_samples_are_those_of_the_bucket():
    config = CompressionConfig(threshold_scope="tp_group", samples=500)
    (threshold, *_) = _limits(0.1, config)
    everything = torch.cat([_bucket(rank).grad_N for rank in range(4)]).abs()
    kept = float((everything > threshold.thresholds).float().mean())
    # 2,000 samples: a relative error of sqrt(0.9 / (0.1 * 2000)) = 7 %; three of them.
    assert kept == pytest.approx(0.1, rel=0.2)


def test_without_pruned_parameters_everything_is_kept():
    found = _limits(0.1, keep=[True] * 4)
    assert [limits.thresholds.item() for limits in found] == [KEEP_ALL] * 4
    assert [limits.tie_chances.item() for limits in found] == [0] * 4


def test_ties_of_the_whole_group_have_one_chance():
    """Ranks hold 1, 2, 3 and 4 everywhere: a tenth of all is two fifths of the last rank's."""
    found = _limits(0.1, constant=[True] * 4)
    assert [tuple(limit.item() for limit in limits) for limits in found] == [
        (4.0, torch.tensor(0.4).item(), NUMEL)
    ] * 4


def test_ranks_with_different_samples_are_an_error():
    with pytest.raises(CommunicationError, match="different samples"):
        _limits(0.1, keep=[False, False, True, False])
    with pytest.raises(CommunicationError, match="not in the same collective"):
        _limits(0.1, numel=[NUMEL, NUMEL, 5000, NUMEL])


def _reduce(rank, world_size):
    """Both gloo ranks are a tensor-parallel group; each is alone in its data-parallel one."""
    import torch.distributed as dist

    group = {"threshold_scope": "tp_group", "samples": NUMEL}
    config = at_target(scheme="direct", timeout_s=30.0, **group)
    cpu = torch.device("cpu")
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    transports = [ProcessGroupTransport(group, 30.0, cpu) for group in (alone, dist.group.WORLD)]
    progress = ProgressThread(cpu, 30.0)
    groups = Groups(transports[0], tensor_parallel=transports[1])
    reducer = reducer_of(config, groups, progress=progress)
    kept = []
    for step in range(2):
        bucket, given = _bucket(rank), _bucket(rank).grad_N
        before_N = residual_of(reducer, bucket)
        reducer.start(bucket, step).wait()
        reducer.selector.residuals.commit()
        after_N = residual_of(reducer, bucket)
        assert torch.equal(bucket.grad_N + after_N, given + before_N), "nothing is lost"
        kept.append(int(bucket.grad_N.count_nonzero()))
    progress.close()
    for transport in transports:
        transport.close()
    return kept


def test_the_reducer_selects_by_it():
    small, large = run_ranks(_reduce, 2)
    assert small[0] + large[0] == 2000
    assert large[0] > 2 * small[0]
    assert small[1] + large[1] == 2000, "residuals are sampled too"


def test_it_is_refused_where_there_is_no_group_or_no_common_plan():
    config = SparseConfig.from_overrides(threshold_scope="tp_group")
    with pytest.raises(ConfigError, match="without a tensor-parallel group"):
        reducer_of(config, Groups(VirtualCluster(1).transports[0]))
    with pytest.raises(ConfigError, match="the same plan on the whole group"):
        SparseConfig.from_overrides(
            threshold_scope="tp_group", planner=PlannerConfig(cluster="perlmutter")
        )
