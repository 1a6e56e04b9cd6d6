"""Decisions from the agreed waiting times, on virtual ranks; and the whole path on gloo ranks."""

import os
from statistics import median

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives.base import without
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import (
    CompressionConfig,
    SchemeConfig,
    SparseConfig,
    StragglerConfig,
)
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner import Plan
from megatron_sparse.planner.link_timing import MeasuredLinks
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.straggler_policy import SLOW_RANK, Delays, StragglerPolicy
from megatron_sparse.straggler.cost import dense_split, sparse_split
from megatron_sparse.straggler.detector import HISTORY, MIN_HISTORY, persistent_straggler
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.planner.planned import a_bucket
from tests.ranks import run_ranks
from tests.records import Kept
from tests.reduction.reducers import at_target, reducer_over_gloo

N = 4
NUMEL = 3 * 4096
LINK = Link(alpha_s=1e-5, beta_s=1e-8)
LINKS = MeasuredLinks((N,), "rank", LINK, LINK, LINK)
SPLIT = dense_split(N, 4.0 * NUMEL, LINK, LINK)


def _plan(scheme, density=1.0):
    return Plan(scheme, Phase.TARGET, density, None, sharded=scheme != "dense", reason="")


def _bucket(op=CollectiveOp.ALL_REDUCE):
    return a_bucket(torch.ones(NUMEL), N, op=op)


def _config(straggler, scheme="auto", capacity=None):
    return SparseConfig(
        CompressionConfig(density=0.01, value_bits=None),
        SchemeConfig(name=scheme, deterministic=False, capacity=capacity),
        straggler=straggler,
    )


class VirtualGroup:
    """A policy on each of N virtual ranks, which take steps of one bucket."""

    def __init__(self, straggler, scheme="auto", capacity=None):
        config = _config(straggler, scheme, capacity)
        self.cluster = VirtualCluster(N)
        self.sinks = [Kept() for _ in range(N)]
        self.policies = [
            StragglerPolicy(config, transport, sink, LINKS)
            for transport, sink in zip(self.cluster.transports, self.sinks, strict=True)
        ]

    def step(self, number, delays_s, bucket=None, plan=None):
        """Each rank's decision in a step to which it comes so late."""
        bucket, plan = bucket or _bucket(), plan or _plan("dense")

        def start(transport):
            policy = self.policies[transport.rank]
            policy.begin_step(number)
            transport.charge(delays_s[transport.rank])
            adapted = policy.adapt(bucket, plan)
            straggler = policy.decide(bucket, adapted)
            # Stands for the collective, after which all clocks agree.
            yield transport.all_reduce_(torch.zeros(1))
            if policy._last_step:
                yield from without(policy.gather(), Gate)
            return straggler, policy.scheme_of(adapted, straggler)

        decisions = set(self.cluster.run(start))
        assert len(decisions) == 1, "all ranks decide alike"
        return decisions.pop()


def _late(rank, delay_s):
    return [delay_s * (r == rank) for r in range(N)]


def test_a_persistent_straggler_is_named_two_steps_after_enough_history():
    group = VirtualGroup(StragglerConfig(mode="persistent"))
    delay_s = 3 * SPLIT.critical_s
    found = [group.step(number, _late(2, delay_s)) for number in range(10)]
    # The delay of step s is gathered in s + 1 and known from s + 2 on.
    first = MIN_HISTORY + 1
    assert found == [(None, "dense")] * first + [(2, "straggler")] * (10 - first)
    for sink in group.sinks:
        assert [record.step for record in sink.readiness] == list(range(8))
        assert sink.readiness[0].waited_s == pytest.approx((delay_s, delay_s, 0, delay_s))


@pytest.mark.parametrize(("factor", "named"), [(0.8, None), (1.3, 1)])
def test_it_is_named_only_where_its_delay_exceeds_the_critical_one(factor, named):
    group = VirtualGroup(StragglerConfig(mode="persistent"))
    for number in range(9):
        found = group.step(number, _late(1, factor * SPLIT.critical_s))
    assert found[0] == named


def test_ranks_that_are_last_in_turns_are_no_persistent_straggler():
    group = VirtualGroup(StragglerConfig(mode="persistent"))
    for number in range(12):
        found = group.step(number, _late(number % N, 1.0))
        assert found == (None, "dense")


def test_a_straggler_that_has_recovered_is_waited_for_again():
    """Only the last `HISTORY` steps count: of all these, it was last in most."""
    group = VirtualGroup(StragglerConfig(mode="persistent"))
    for number in range(10 * HISTORY):
        found = group.step(number, _late(2, 1.0))
    assert found[0] == 2
    for number in range(10 * HISTORY, 11 * HISTORY):
        found = group.step(number, _late(number % 2, 1e-7))
    assert found == (None, "dense")


def test_min_delay_takes_the_place_of_the_critical_delay():
    for delay_s, named in ((0.049, None), (0.051, 1)):
        group = VirtualGroup(StragglerConfig(mode="persistent", min_delay_ms=50))
        found = [group.step(number, _late(1, delay_s))[0] for number in range(9)]
        assert found[-1] == named


def test_the_pinned_mode_exchanges_nothing():
    group = VirtualGroup(StragglerConfig(mode="pinned", rank=3))
    assert group.step(0, _late(0, 9.0)) == (3, "straggler")
    assert group.step(1, [0.0] * N, plan=_plan("direct", 0.01)) == (3, "straggler_direct")
    assert group.step(2, [0.0] * N, plan=_plan("agsparse", 0.01)) == (None, "agsparse")
    assert not any(sink.readiness for sink in group.sinks)
    assert not group.cluster.pending_arrivals


def test_observing_changes_nothing():
    group = VirtualGroup(StragglerConfig(mode="observe"), scheme="direct")
    for number in range(9):
        assert group.step(number, _late(2, 1.0)) == (None, "dense")
    assert len(group.sinks[0].readiness) == 7


@pytest.mark.parametrize("straggler", [StragglerConfig("persistent"), StragglerConfig("pinned", 1)])
def test_a_reduce_scatter_waits_for_all_ranks(straggler):
    group = VirtualGroup(straggler)
    scatter = _bucket(CollectiveOp.REDUCE_SCATTER)
    found = {group.step(number, _late(1, 9.0), bucket=scatter) for number in range(9)}
    assert found == {(None, "dense")}


def test_messages_with_slots_stay_with_their_scheme():
    group = VirtualGroup(StragglerConfig(mode="pinned", rank=1), capacity=1.25)
    assert group.step(0, [0.0] * N, plan=_plan("direct", 0.01)) == (None, "direct")


def test_a_rank_outside_the_group_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"straggler\.rank is not in the group"):
        VirtualGroup(StragglerConfig("pinned", 4))
    monkeypatch.setenv(SLOW_RANK, "7:100")
    with pytest.raises(ConfigError, match=f"{SLOW_RANK} is not in the group"):
        VirtualGroup(StragglerConfig())
    monkeypatch.setenv(SLOW_RANK, "7")
    with pytest.raises(ConfigError, match=f"{SLOW_RANK} cannot be read"):
        VirtualGroup(StragglerConfig())


GRADIENTS = {
    r: torch.randint(-9, 10, (NUMEL,), generator=torch.Generator().manual_seed(r)).float()
    for r in range(3)
}
SLOW_MS = 100.0


def _gloo_bucket(rank, world_size, number):
    """Of the rank's gradient, `number` + 1 times."""
    gradient, pieces = GRADIENTS[rank] * (number + 1), [ParameterSlice(f"w{number}", 0, NUMEL)]
    return Bucket(f"b{number}", gradient, pieces, CollectiveOp.ALL_REDUCE, world_size)


def _train(rank, world_size):
    """Nine steps in each mode: sums, skipped ranks, delays; threads left. Rank 1 is slow."""
    import threading

    os.environ[SLOW_RANK] = f"1:{SLOW_MS}"  # this process is one of the ranks
    results = {}
    few = {"density": 0.05, "samples": 500, "deterministic": False, "timeout_s": 20.0}
    twice = [("pinned", "straggler_direct", 1)] * 2
    for mode, scheme, pinned in (("persistent", "straggler", None), *twice):
        sink, sums = Kept(), []
        straggler = StragglerConfig(mode=mode, rank=pinned, min_delay_ms=5.0)
        config = at_target(scheme=scheme, straggler=straggler, **few)
        with reducer_over_gloo(config, sink, is_reported=False) as reducer:
            for step in range(9):
                buckets = [_gloo_bucket(rank, world_size, number) for number in range(2)]
                pending = [reducer.start(bucket, step) for bucket in buckets]
                for handle in pending:
                    handle.wait()
                sums.append([bucket.grad_N.clone() for bucket in buckets])
        result = (sums, [r.straggler for r in sink.buckets], sink.readiness)
        results.setdefault((mode, scheme), []).append(result)
    left = [t.name for t in threading.enumerate() if "arrivals" in t.name]
    return results, left


def test_on_gloo_ranks_sums_are_exact_and_the_injected_rank_is_skipped():
    total = torch.stack(list(GRADIENTS.values())).sum(0)
    by_rank = run_ranks(_train, 3)
    for results, left in by_rank:
        assert not left
        ((sums, stragglers, records),) = results["persistent", "straggler"]
        for first, second in sums:
            assert torch.equal(first, total)
            assert torch.equal(second, 2 * total)
        assert stragglers == by_rank[0][0]["persistent", "straggler"][0][1]
        delays = [r for r in records if r.bucket == "b0"]
        # The first bucket of a step is the one that waits. On a loaded machine another rank is
        # sometimes later than the injected one. Times are known two steps later.
        of_first = stragglers[::2]
        known = [[r.ready_s for r in delays[: max(step - 1, 0)]] for step in range(9)]
        assert of_first == [*map(persistent_straggler, known)]
        assert 1 in of_first
        assert [r.step for r in delays] == list(range(7))
        assert sum(record.waited_s[1] == 0 for record in delays) > len(delays) / 2
        waits_s = [min(record.waited_s[0], record.waited_s[2]) for record in delays]
        assert median(waits_s) > SLOW_MS / 2e3
        once, again = results["pinned", "straggler_direct"]
        assert once[1] == [1] * 18
        assert once[2] == []
        for first, second in zip(once[0], again[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("sizes", "kind"), [((N,), "intra"), ((2, 2), "inter")])
def test_delays_follow_the_groups_links_and_the_bytes_of_the_plan(sizes, kind):
    """At density 1 message and sum are as long as the bucket."""
    links = MeasuredLinks(sizes, "rank", Link(1e-5, 1e-9), Link(3e-5, 5e-9), Link(2e-5, 2e-8))
    cluster = VirtualCluster(N, Topology(sizes, LINK, LINK))
    config = _config(StragglerConfig(mode="persistent"))
    policy = StragglerPolicy(config, cluster.transports[0], Kept(), links)
    link, nbytes = getattr(links, kind), 4.0 * NUMEL
    for scheme, split in (
        ("straggler", dense_split(N, nbytes, link, links.dense)),
        ("straggler_direct", sparse_split(N, nbytes, nbytes, link)),
    ):
        expected = Delays(max(0.0, split.critical_s), split.early_s)
        assert policy._delays_that_pay(_bucket(), _plan(scheme)) == pytest.approx(expected)
