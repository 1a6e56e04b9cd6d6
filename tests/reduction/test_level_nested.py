"""compression.level=node+instance on virtual ranks: two residuals, and exact sums of both."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp, Reduction
from megatron_sparse.compression.residual import OF_INSTANCES
from megatron_sparse.config.sparse import PlannerConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.memory import account, held, shares_of
from tests.reduction.virtual_level import OPTIONS, VirtualRanks, gradients, numel_of, settings

RS = CollectiveOp.REDUCE_SCATTER


def nested(sizes, instances, dtype=torch.float32, reduction=Reduction.SUM, **options):
    """`instances` times the nodes of these sizes."""
    config = settings(level="node+instance", **options)
    numel = numel_of(RS, sizes * instances)
    given = {"reduction": reduction, "instances": instances}
    return VirtualRanks(config, sizes * instances, RS, numel, dtype, **given)


def check_step(ranks, step, dtype=torch.float32, atol=0.0, **options):
    """One step: each half's sum is that of what was sent in it."""
    before = [ranks.second_residual(rank) for rank in range(ranks.n)]
    found = ranks.step(gradients(ranks, step, dtype), step, **options)
    after = [ranks.second_residual(rank) for rank in range(ranks.n)]
    for rank in range(ranks.n):
        total = 0
        for same_shard in range(rank % ranks.each, ranks.n, ranks.each):
            first = same_shard - same_shard % ranks.each
            of_instance_N = sum(found.sent[first : first + ranks.each]).to(dtype).float()
            sent_N = of_instance_N + before[same_shard] - after[same_shard]
            total = total + ranks.part_of_result(rank, sent_N)
        result = ranks.part_of_result(rank, found.results[rank])
        torch.testing.assert_close(result, total.to(dtype), rtol=0, atol=atol)
    return found


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (2, 2, 2), (1, 1), (2, 1)], ids=str)
def test_both_sums_are_exact_and_nothing_is_lost(sizes, instances):
    ranks = nested(sizes, instances)
    assert ranks.choice.level == ("node" if min(sizes) > 1 and len(set(sizes)) == 1 else "rank")
    assert ranks.choice.compresses_instances
    for step in range(3):
        found = check_step(ranks, step)
        assert 0 < found.records[0].nnz < 0.2 * found.records[0].numel
        assert ranks.second_residual(0).any()


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"residual_dtype": "bf16", "value_bits": None}], ids=str
)
def test_every_method_and_option(options):
    ranks = nested((2, 2), 2, **options)
    for step in range(4):
        check_step(ranks, step)


def test_velocities_are_not_taken_twice():
    """With DGC's momentum the sums of instances have no velocity of their own."""
    ranks = nested((2, 2), 2, method="dgc")
    stores = ranks.reducers[0].selector.method.stores
    for step in range(3):
        ranks.step(gradients(ranks, step), step)
    assert stores["momentum"].nbytes == stores["residual"].nbytes
    assert len(list(stores["momentum"].tensors())) == 1, "of the bucket alone"


@pytest.mark.parametrize("options", [{"value_bits": 4}, {"value_bits": 4, "sum_bits": 4}], ids=str)
def test_values_in_few_bits(options):
    ranks = nested((2, 2), 2, **options)
    for step in range(3):
        # fp32 sums of a few rounded values: an error of some units in the last place.
        check_step(ranks, step, atol=2e-3)


def test_gradients_in_bf16():
    ranks = nested((2, 2), 2, torch.bfloat16)
    for step in range(3):
        check_step(ranks, step, torch.bfloat16)


def test_averages_are_divided_once():
    sums, means = (nested((2, 2), 2, reduction=each) for each in (Reduction.SUM, Reduction.AVG))
    given = gradients(sums, 0)
    total, mean = sums.step(given, 0), means.step(given, 0)
    for rank in range(sums.n):
        found = means.part_of_result(rank, mean.results[rank])
        assert torch.equal(found * 8, sums.part_of_result(rank, total.results[rank]))
        assert torch.equal(means.second_residual(rank) * 8, sums.second_residual(rank))


def test_skipped_and_repeated_steps_leave_no_trace():
    once, twice = nested((2, 2), 2), nested((2, 2), 2)
    for ranks in (once, twice):
        check_step(ranks, 0)
    before = [once.second_residual(rank) for rank in range(once.n)]
    once.step(gradients(once, 1), 1, accepted=False)
    assert all(torch.equal(once.second_residual(r), before[r]) for r in range(once.n))
    given = gradients(once, 2)
    twice.step(given, 2, reported=False)
    for ranks in (once, twice):
        ranks.step(given, 2)
    for rank in range(once.n):
        assert torch.equal(once.second_residual(rank), twice.second_residual(rank))
        assert torch.equal(once.residual(rank), twice.residual(rank))


def test_what_is_switched_off_empties_both_residuals():
    ranks = nested((2, 2), 2)
    check_step(ranks, 0)
    for reducer in ranks.reducers:
        reducer.planner.enabled = False
    check_step(ranks, 1)
    for rank in range(ranks.n):
        assert not ranks.residual(rank).any()
        assert not ranks.second_residual(rank).any()


def test_bytes_between_instances_are_few():
    """Dense sums of shards against compressed ones; all other bytes are the same."""
    crossing = []
    for level in ("node", "node+instance"):
        config = settings(level=level, density=0.01, samples=40_000)
        ranks = VirtualRanks(config, (2, 2) * 2, RS, 2**19, instances=2)
        ranks.step(gradients(ranks, 0), 0)
        nodes = ranks.cluster.topology.nodes
        crossing.append(
            sum(
                nbytes
                for (source, target), nbytes in ranks.cluster.link_bytes.items()
                if nodes[source] // 2 != nodes[target] // 2
            )
        )
    dense_bytes = 2 * 2**19 * 4  # each instance sends its sum once
    assert crossing[0] >= dense_bytes
    assert crossing[1] < 0.03 * crossing[0]


def test_the_second_residual_is_a_shard_and_the_account_has_it():
    config = settings(level="node+instance", capacity=1.5, value_bits=None)
    sizes = (2, 2) * 2
    ranks = VirtualRanks(config, sizes, RS, numel_of(RS, sizes), instances=2)
    ranks.step(gradients(ranks, 0), 0)
    reducer, bucket = ranks.reducers[1], ranks.buckets[1]
    stores = reducer.selector.method.stores
    assert stores[OF_INSTANCES].nbytes == bucket.numel // 4 * 4
    counted = account(config, shares_of(reducer, [bucket]), undo=False)
    found = held(stores, [reducer])
    items = ("residual", "messages", "received", "sums", "workspace")
    assert [counted.nbytes.get(item) for item in items] == [found.get(item) for item in items]
    assert counted.parameters == sum(p.stop - p.start for p in bucket.parameters)


def test_the_plan_has_a_row_for_each_half():
    ranks = nested((2, 2), 2)
    first, second = ranks.reducers[0].reports(ranks.buckets[0], 0)
    assert (first["bucket"], second["bucket"]) == ("0", "0.instances")
    assert (first["world_size"], first["lanes"]) == (2, 2)
    assert (second["world_size"], second["lanes"]) == (2, 4)


def test_a_priced_planner_plans_both_halves():
    ranks = nested((2, 2), 2, scheme="auto", planner=PlannerConfig(cluster="ethernet_25gbit"))
    for step in range(3):
        check_step(ranks, step)
    rows = ranks.reducers[0].reports(ranks.buckets[0], 3)
    assert all(row["predicted_us"] for row in rows)


def test_without_a_second_sum_there_is_no_second_residual():
    sizes = (2, 2)
    config = settings(level="node+instance")
    ranks = VirtualRanks(config, sizes, RS, numel_of(RS, sizes))
    assert list(ranks.reducers[0].selector.method.stores) == ["residual"]


@pytest.mark.parametrize(
    ("nodes", "instances", "level", "second"),
    [
        ((0, 0, 1, 1), 2, "node", True),
        ((0, 1, 2, 3), 2, "rank", True),
        ((0, 0, 0, 1), 2, "rank", True),
        ((0, 0, 0, 0), 2, "instance", False),
        ((0, 0, 1, 1), 1, "node", False),
        ((0, 1, 2, 3), 1, "rank", False),
    ],
)
def test_which_level_runs(nodes, instances, level, second):
    choice = choose_level(settings(level="node+instance"), nodes, instances)
    assert (choice.level, choice.compresses_instances) == (level, second)
    assert not second or choice.reason.endswith("and between 2 instances")


def test_dense_runs_stay_the_backends_own():
    config = settings(level="node+instance", scheme="dense")
    choice = choose_level(config, (0, 0, 1, 1), 2)
    assert (choice.level, choice.compresses_instances) == ("rank", False)


def test_measured_times_are_refused():
    with pytest.raises(ConfigError, match="two plans for a bucket"):
        SparseConfig.from_overrides(
            level="node+instance",
            deterministic=False,
            planner=PlannerConfig(cluster="ethernet_25gbit"),
        )
