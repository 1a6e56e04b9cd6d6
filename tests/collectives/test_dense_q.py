"""`dense_q`: every element in few bits, sums exact over what was sent, the rest in the residual."""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import base, direct
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.planner import Planner
from tests.collectives.cases import same_on_all_ranks
from tests.reduction.virtual_level import VirtualRanks, settings

OPS = list(CollectiveOp)


def ranks_of(n, op, numel, **overrides):
    """Ranks that warm up for two steps in few bits and then prune to a tenth."""
    given = {"scheme": "direct", "level": "rank", "warmup_iters": 2, "density": 0.1}
    in_bits = {"value_bits": 4, "sum_bits": None}
    return VirtualRanks(settings(**given | in_bits | overrides), (n,), op, numel)


def step_of(run, step, given):
    """What each rank has sent, as fp32 [n, N], the whole sum, and each rank's record."""
    before = [run.residual(rank) for rank in range(run.n)]
    found = run.step(given, step)
    sent = [given[rank].float() + before[rank] - run.residual(rank) for rank in range(run.n)]
    parts = [run.part_of_result(*ranked) for ranked in enumerate(found.results)]
    return torch.stack(sent), same_on_all_ranks(run.buckets[0].op, parts), found.records


def gradients(n, numel, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=generator) for _ in range(n)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_warm_up_and_the_target_lose_nothing_but_to_the_residual(bits, n, op):
    """Two steps of `dense_q` and one of `direct`: sums are those of the sent values."""
    run = ranks_of(n, op, 840 * n, value_bits=bits)
    for step in range(3):
        given = gradients(n, 840 * n, step)
        before = [run.residual(rank) for rank in range(n)]
        sent_nN, sum_N, _ = step_of(run, step, given)
        for rank in range(n):
            # Bit for bit: what was sent and what stays are the gradient and what stayed before.
            assert torch.equal(sent_nN[rank] + run.residual(rank), given[rank] + before[rank])
        # fp32 sums of at most 8 numbers below 16, in rank order.
        exact_N = sent_nN.double().sum(0)
        torch.testing.assert_close(
            sum_N.double(), exact_N, rtol=0, atol=8 * 2**-20, msg=f"step {step}"
        )
        if step < 2:
            step_size = 2 * 5 / (2 ** (max(bits, 4) - 1) - 1)
            assert (sent_nN - torch.stack(given)).abs().max() < step * step_size + step_size


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("sum_bits", "factor"), [(None, 1.25), (None, 0.5), (8, 1.25), (4, 1.25)])
def test_messages_of_fixed_size_are_the_same_and_agree_on_nothing(
    sum_bits, factor, op, monkeypatch
):
    """Sizes follow from the number of elements: with slots only the agreements go."""
    agreements: list[int] = []

    def exchange_sizes(sizes, identity, transport, **options):
        agreements.append(transport.rank)
        return base.exchange_sizes(sizes, identity, transport, **options)

    monkeypatch.setattr(direct, "exchange_sizes", exchange_sizes)
    n, numel = 4, 4 * 840
    free, fixed = (
        ranks_of(n, op, numel, capacity=capacity, sum_bits=sum_bits) for capacity in (None, factor)
    )
    for step in range(2):
        given = gradients(n, numel, step)
        sent_nN, sum_N, records = step_of(free, step, given)
        assert agreements
        agreements.clear()
        fixed_nN, fixed_N, fixed_records = step_of(fixed, step, given)
        assert not agreements
        assert torch.equal(sent_nN, fixed_nN)
        assert torch.equal(sum_N, fixed_N)
        for own, other in zip(records, fixed_records, strict=True):
            assert (own.message_bytes, own.wire_bytes) == (other.message_bytes, other.wire_bytes)


@pytest.mark.parametrize(("bits", "expected"), [(8, 8), (4, 4), (3, 4), (2, 4)])
def test_plans_and_bytes(bits, expected):
    """Less than a percent of a message is headers."""
    for op in OPS:
        n, numel = 4, 2**17
        run = ranks_of(n, op, numel, value_bits=bits)
        plan = run.reducers[0].job(run.buckets[0], 0).plan
        assert (plan.scheme, plan.phase, plan.density) == ("dense_q", Phase.WARMUP, 1.0)
        assert plan.reason == f"warm-up in {expected} bits"
        _, _, records = step_of(run, 0, gradients(n, numel, 0))
        message = message_bytes(run.buckets[0], expected)
        assert records[0].message_bytes == pytest.approx(message, rel=0.01)
        sums = 0 if op is CollectiveOp.REDUCE_SCATTER else 3 * numel // 4 * 4
        # Not the own shard, which has none of the kept elements on most ranks.
        most = max(record.wire_bytes for record in records)
        assert most == pytest.approx(3 / 4 * message + sums, rel=0.03)


def message_bytes(bucket, bits):
    """`bits` bits an element and 32 for 128; elements that are kept whole are bf16."""
    kept = sum(piece.stop - piece.start for piece in bucket.parameters if piece.keep)
    return (bucket.numel - kept) * (bits + 0.25) / 8 + 2 * kept


def test_what_is_not_asked_to_round_stays_dense():
    bucket = ranks_of(2, CollectiveOp.ALL_REDUCE, 1000).buckets[0]
    few, whole = CompressionConfig(value_bits=4), CompressionConfig()
    for compression, scheme, expected in (
        (few, "auto", "dense_q"),
        (few, "direct", "dense_q"),
        (whole, "direct", "dense"),
        (few, "dense", "dense"),
        (few, "dense_ring", "dense"),
        (whole, "dense_q", "dense_q"),
    ):
        planner = Planner(compression, SchemeConfig(name=scheme))
        assert planner.plan_for(bucket, 0).scheme == expected, (scheme, compression.value_bits)
    alone = replace(bucket, world_size=1)
    assert Planner(few, SchemeConfig()).plan_for(alone, 0).scheme == "dense"
    off = Planner(replace(few, enabled=False), SchemeConfig(name="direct"))
    assert off.plan_for(bucket, 0).scheme == "dense"
    # By name at the target too, whatever the density.
    named = Planner(whole, SchemeConfig(name="dense_q")).plan_for(bucket, 10**6)
    assert (named.scheme, named.density) == ("dense_q", 1.0)


@pytest.mark.parametrize("op", OPS)
def test_sums_in_few_bits_take_as_many_bytes_as_messages(op):
    """Of the shards that a rank sends. Their rest stays with its owner: see test_rice.py."""
    run = ranks_of(4, op, 2**16, scheme="dense_q", sum_bits=4)
    _, _, records = step_of(run, 0, gradients(4, 2**16, 0))
    halves = 1 if op is CollectiveOp.REDUCE_SCATTER else 2
    expected = halves * 3 / 4 * message_bytes(run.buckets[0], 4)
    assert max(record.wire_bytes for record in records) == pytest.approx(expected, rel=0.2)


def test_nan_travels():
    run, given = ranks_of(3, CollectiveOp.ALL_REDUCE, 3000), gradients(3, 3000, 0)
    given[1][1000] = float("inf")
    _, sum_N, _ = step_of(run, 0, given)
    assert sum_N[1000].isnan()
    assert torch.isfinite(run.residual(1)).all()


def test_ranks_with_other_bits_do_not_meet():
    run = ranks_of(2, CollectiveOp.ALL_REDUCE, 2000)
    compression = CompressionConfig(value_bits=8, warmup_iters=2)
    run.reducers[1].planner = Planner(compression, SchemeConfig(name="direct"))
    with pytest.raises(CommunicationError, match="not in the same collective"):
        run.step(gradients(2, 2000, 0), 0)
