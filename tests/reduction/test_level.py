"""compression.level=node on virtual ranks: exact sums, one residual a node, bytes across nodes."""

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp, Reduction
from megatron_sparse.config.sparse import StragglerConfig
from megatron_sparse.errors import ConfigError
from tests.reduction.virtual_level import OPTIONS, VirtualRanks, gradients, settings

AR, RS = CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER
NODES = [(1,), (2,), (1, 1), (1, 2), (2, 2), (3, 2), (3, 3), (4, 4), (2, 2, 2, 2), (4, 4, 4, 4)]


def check_step(ranks, step, dtype=torch.float32, **options):
    """One step: the sum is that of what was sent, on all ranks."""
    found = ranks.step(gradients(ranks, step, dtype), step, **options)
    total_N = torch.stack(found.sent).sum(0).to(dtype)
    for rank, result_N in enumerate(found.results):
        own = ranks.part_of_result(rank, result_N)
        assert torch.equal(own, ranks.part_of_result(rank, total_N)), (step, rank)
    return found


@pytest.mark.parametrize("op", [AR, RS])
@pytest.mark.parametrize("sizes", NODES, ids=str)
def test_sums_are_exact_and_nothing_is_lost(sizes, op):
    ranks = VirtualRanks(settings(), sizes, op)
    even = len(set(sizes)) == 1 and sizes[0] > 1
    assert ranks.choice.level == ("node" if even else "rank")
    for step in range(3):
        found = check_step(ranks, step)
        if even and len(sizes) > 1:
            part = ranks.reducers[0].part(ranks.buckets[0])
            assert part.numel < ranks.buckets[0].numel
            assert 0 < found.records[0].nnz < 0.2 * part.numel


LEVELS = [("node", AR, 1), ("node", RS, 1), ("instance", RS, 3)]
"""With the number of instances."""


@pytest.mark.parametrize(("level", "op", "instances"), LEVELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(options, level, op, instances):
    config = settings(level=level, **options)
    ranks = VirtualRanks(config, (2, 2, 2), op, instances=instances)
    for step in range(4):
        check_step(ranks, step)
        if instances > 1:
            ranks.step(gradients(ranks, step), step, accepted=False)


@pytest.mark.parametrize(
    ("level", "op", "instances"), [each for each in LEVELS if each != ("node", RS, 1)]
)
def test_a_pinned_straggler_is_a_rank_of_each_lane(level, op, instances):
    config = settings(level=level, straggler=StragglerConfig(mode="pinned", rank=1))
    ranks = VirtualRanks(config, (2, 2, 2), op, instances=instances)
    for step in range(3):
        for record in check_step(ranks, step).records:
            assert (record.scheme, record.straggler) == ("straggler_direct", 1)


@pytest.mark.parametrize("op", [AR, RS])
@pytest.mark.parametrize("options", [{"value_bits": 4}, {"value_bits": 4, "sum_bits": 4}], ids=str)
def test_values_in_few_bits_have_the_same_bits_on_all_ranks(options, op):
    ranks = VirtualRanks(settings(**options), (2, 2, 2), op)
    for step in range(3):
        given = gradients(ranks, step)
        found = ranks.step(given, step)
        if op is AR:
            assert all(torch.equal(each, found.results[0]) for each in found.results)
            total_N = found.results[0]
        else:
            parts = [ranks.part_of_result(*each) for each in enumerate(found.results)]
            total_N = torch.cat(parts)
        # fp32 sums of a few rounded values: an error of some units in the last place.
        torch.testing.assert_close(total_N, sum(found.sent), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("op", "fp32_sums"), [(AR, False), (RS, False), (RS, True)])
def test_gradients_in_bf16(op, fp32_sums):
    ranks = VirtualRanks(settings(), (2, 2), op, dtype=torch.bfloat16)
    for bucket in ranks.buckets:
        bucket.fp32_sums = fp32_sums
    for step in range(3):
        check_step(ranks, step, torch.bfloat16)


@pytest.mark.parametrize("op", [AR, RS])
def test_a_skipped_step_leaves_no_trace(op):
    ranks = VirtualRanks(settings(), (2, 2), op)
    check_step(ranks, 0)
    before = [ranks.residual(rank) for rank in range(ranks.n)]
    ranks.step(gradients(ranks, 1), 1, accepted=False)
    assert all(torch.equal(ranks.residual(rank), before[rank]) for rank in range(ranks.n))
    check_step(ranks, 1)


@pytest.mark.parametrize(
    ("level", "op", "instances"),
    [("node", AR, 1), ("node", RS, 1), ("node", RS, 2), ("rank", RS, 2), ("instance", RS, 2)],
)
def test_averages_are_divided_once(level, op, instances):
    sizes = (2, 2) * instances
    sums, means = (
        VirtualRanks(settings(level=level), sizes, op, reduction=reduction, instances=instances)
        for reduction in (Reduction.SUM, Reduction.AVG)
    )
    given = gradients(sums, 0)
    total, mean = sums.step(given, 0), means.step(given, 0)
    for rank in range(sums.n):
        found = means.part_of_result(rank, mean.results[rank])
        assert torch.equal(found * sums.n, sums.part_of_result(rank, total.results[rank]))
        assert torch.equal(means.residual(rank) * sums.n, sums.residual(rank))


@pytest.mark.parametrize("op", [AR, RS])
@pytest.mark.parametrize("m", [2, 4])
def test_bytes_between_nodes_are_those_of_one_rank_a_node(m, op):
    numel = 2**19
    options = {"density": 0.01, "samples": 40_000}
    alone = VirtualRanks(settings(**options), (1,) * 4, op, numel)
    nodes = VirtualRanks(settings(**options), (m,) * 4, op, numel)
    crossing = []
    for ranks in (alone, nodes):
        ranks.step(gradients(ranks, 0), 0)
        crossing.append(ranks.bytes_between_nodes())
    assert max(crossing[1]) <= 1.1 * max(crossing[0])


def test_a_record_tells_the_tiers_apart():
    ranks = VirtualRanks(settings(), (2, 2), AR, 2 * 10_000)
    record = ranks.step(gradients(ranks, 0), 0).records[0]
    assert record.inside_bytes == 2 * 10_000 * 4, "a reduce-scatter and a gather of halves"
    assert 0 < record.wire_bytes - record.inside_bytes < 10_000 * 4
    assert record.numel == 10_000


def test_the_plan_of_a_group_on_one_node_says_dense():
    for sizes, chosen in (((2,), "dense"), ((2, 2), "direct")):
        ranks = VirtualRanks(settings(), sizes, AR, 2000)
        row = ranks.reducers[0].report(ranks.buckets[0], 0)
        assert row["chosen"] == chosen == ranks.step(gradients(ranks, 0), 0).records[0].scheme
        assert (row["reason"] == "all ranks are on one node") == (chosen == "dense")


def test_what_is_switched_off_empties_the_residual():
    ranks = VirtualRanks(settings(), (2, 2), RS, 20_000)
    check_step(ranks, 0)
    for reducer in ranks.reducers:
        reducer.planner.enabled = False
    check_step(ranks, 1)
    assert not any(ranks.residual(rank).any() for rank in range(4))
    assert [ranks.store(rank).nbytes for rank in range(4)] == [0] * 4


def test_a_run_without_compression_agrees_about_a_bucket_once():
    ranks = VirtualRanks(settings(level="rank", enabled=False), (4,), AR, 2000)
    nbytes = []
    for step in range(3):
        before = ranks.cluster.link_bytes.total()
        check_step(ranks, step)
        nbytes.append(ranks.cluster.link_bytes.total() - before)
    agreement = 4 * 3 * 8 * (2 + 4)
    assert nbytes == [nbytes[1] + agreement, nbytes[1], nbytes[1]]


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("level", ["node", "instance"])
def test_several_instances(level, instances):
    """`node`: selected inside an instance, and the instances are added up dense."""
    sizes = (2, 2) * instances
    ranks = VirtualRanks(settings(level=level), sizes, RS, instances=instances)
    assert ranks.choice.level == level
    for step in range(3):
        found = check_step(ranks, step)
        part = ranks.reducers[0].part(ranks.buckets[0])
        assert part.numel == ranks.buckets[0].numel // (2 if level == "node" else 4)
        assert 0 < found.records[0].nnz < 0.2 * part.numel


def test_an_instance_without_shards_is_refused():
    ranks = VirtualRanks(settings(level="instance"), (2, 2), AR, 400, instances=2)
    with pytest.raises(ConfigError, match="needs shards"):
        ranks.step(gradients(ranks, 0), 0)
