"""`dense_q`: every element in few bits, sums exact over what was sent, the rest in the residual."""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import Exchange, base, direct
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.compression.selection import Selector
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import Planner
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import VirtualCluster
from tests.collectives.cases import same_on_all_ranks, summed

OPS = list(CollectiveOp)
KEPT = 300
"""Elements of a parameter that is always sent whole."""


class Run:
    """All ranks of a bucket, which keep their residuals over the steps."""

    def __init__(self, n, op, numel, *, scheme=None, **compression):
        self.op, self.n, self.numel = op, n, numel
        self.config = CompressionConfig(
            **{"warmup_iters": 2, "ramp_iters": 0, "density": 0.1, "value_bits": 4} | compression
        )
        self.options = scheme or SchemeConfig(name="direct")
        self.planners = [Planner(self.config, self.options) for _ in range(n)]
        self.cluster = VirtualCluster(n)
        self.residuals = [ResidualStore(torch.float32) for _ in range(n)]
        self.buffers = [MessageBuffers() for _ in range(n)]
        self.sent_bytes, self.message_bytes = [0] * n, [0] * n

    def bucket(self, grad_N):
        pieces = [ParameterSlice("kept", 0, KEPT, keep=True), ParameterSlice("w", KEPT, self.numel)]
        return Bucket("b", grad_N, pieces, self.op, self.n)

    def residual(self, rank):
        store = self.residuals[rank]
        return store["b"].clone() if "b" in store else torch.zeros(self.numel)

    def step(self, step, given):
        """What each rank has sent, as fp32 [n, N], and the results."""
        before = [self.residual(rank) for rank in range(self.n)]

        def start(transport):
            rank = transport.rank
            bucket = self.bucket(given[rank].clone())
            plan = self.planners[rank].plan_for(bucket, step)
            selector = Selector(self.config, self.residuals[rank], rank, self.buffers[rank])
            message = selector.select(
                bucket, plan.message_spec(bucket, self.options), step=step, timer=StageTimer()
            )
            self.message_bytes[rank] = message.nbytes
            exchange = Exchange(bucket, transport, self.buffers[rank], StageTimer(), self.options)
            own_N, self.sent_bytes[rank] = yield from summed(plan.scheme, exchange, message)
            return own_N

        results = self.cluster.run(start)
        sent = [given[rank].float() + before[rank] - self.residual(rank) for rank in range(self.n)]
        return torch.stack(sent), results

    def whole(self, results):
        return same_on_all_ranks(self.op, results)


def gradients(n, numel, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_warm_up_and_the_target_lose_nothing_but_to_the_residual(bits, n, op):
    """Two steps of `dense_q` and one of `direct`: sums are those of the sent values."""
    run = Run(n, op, 840 * n, value_bits=bits)
    for step in range(3):
        given = gradients(n, run.numel, step)
        before = [run.residual(rank) for rank in range(n)]
        sent_nN, results = run.step(step, given)
        for rank in range(n):
            # Bit for bit: what was sent and what stays are the gradient and what stayed before.
            assert torch.equal(sent_nN[rank] + run.residual(rank), given[rank] + before[rank])
        # fp32 sums of at most 8 numbers below 16, in rank order.
        exact_N = sent_nN.double().sum(0)
        torch.testing.assert_close(
            run.whole(results).double(), exact_N, rtol=0, atol=8 * 2**-20, msg=f"step {step}"
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
        Run(n, op, numel, scheme=SchemeConfig(name="direct", capacity=capacity, sum_bits=sum_bits))
        for capacity in (None, factor)
    )
    for step in range(2):
        given = gradients(n, numel, step)
        sent, results = free.step(step, given)
        assert agreements
        agreements.clear()
        sent_fixed, results_fixed = fixed.step(step, given)
        assert not agreements
        assert torch.equal(sent, sent_fixed)
        assert torch.equal(free.whole(results), fixed.whole(results_fixed))
        assert free.message_bytes == fixed.message_bytes
        assert free.sent_bytes == fixed.sent_bytes


@pytest.mark.parametrize(("bits", "expected"), [(8, 8), (4, 4), (3, 4), (2, 4)])
def test_plans_and_bytes(bits, expected):
    """A message of N elements: q bits each and 32 for 128, less than a percent of headers."""
    for op in OPS:
        n, numel = 4, 2**16
        run = Run(n, op, numel, value_bits=bits)
        bucket = run.bucket(torch.zeros(numel))
        plan = run.planners[0].plan_for(bucket, 0)
        assert (plan.scheme, plan.phase, plan.density) == ("dense_q", Phase.WARMUP, 1.0)
        assert plan.reason == f"warm-up in {expected} bits"
        run.step(0, gradients(n, numel, 0))
        message = (numel - KEPT) * (expected + 0.25) / 8 + 2 * KEPT
        assert run.message_bytes[0] == pytest.approx(message, rel=0.01)
        sums = 0 if op is CollectiveOp.REDUCE_SCATTER else 3 * numel // 4 * 4
        # Not the own shard, which has none of the kept elements on most ranks.
        assert max(run.sent_bytes) == pytest.approx(3 / 4 * message + sums, rel=0.02)


def test_what_is_not_asked_to_round_stays_dense():
    bucket = Run(2, CollectiveOp.ALL_REDUCE, 1000).bucket(torch.zeros(1000))
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
def test_sums_in_few_bits_leave_the_rest_with_their_owner(op):
    """Over the steps nothing is lost: all results and residuals are all gradients."""
    n, numel = 4, 2**16
    run = Run(n, op, numel, scheme=SchemeConfig(name="dense_q", sum_bits=4))
    total_N, given_N = torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(4):
        given = gradients(n, numel, step)
        _, results = run.step(step, given)
        total_N += run.whole(results).double()
        given_N += torch.stack(given).double().sum(0)
    residual_N = torch.stack([run.residual(rank) for rank in range(n)]).double().sum(0)
    # fp32 additions of four ranks in four steps, of numbers below 64.
    torch.testing.assert_close(total_N + residual_N, given_N, rtol=0, atol=16 * 2**-18)
    message = (numel - KEPT) * 4.25 / 8 + 2 * KEPT
    halves = 1 if op is CollectiveOp.REDUCE_SCATTER else 2
    assert max(run.sent_bytes) == pytest.approx(halves * 3 / 4 * message, rel=0.2)


def test_nan_travels():
    run, given = Run(3, CollectiveOp.ALL_REDUCE, 3000), gradients(3, 3000, 0)
    given[1][1000] = float("inf")
    _, results = run.step(0, given)
    assert run.whole(results)[1000].isnan()
    assert torch.isfinite(run.residual(1)).all()


def test_ranks_with_other_bits_do_not_meet():
    run = Run(2, CollectiveOp.ALL_REDUCE, 2000)
    run.planners[1] = Planner(replace(run.config, value_bits=8), run.options)
    with pytest.raises(CommunicationError, match="not in the same collective"):
        run.step(0, gradients(2, 2000, 0))
