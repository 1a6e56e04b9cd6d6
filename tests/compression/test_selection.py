"""Sampled top-k, error feedback: nothing is lost; undone, rescaled, saved; no reads on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import range_limits
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.planner import Planner
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import VirtualCluster
from tests import doc_tables
from tests.collectives.cases import parameters, same_on_all_ranks
from tests.collectives.test_capacity import OnDevice
from tests.compression.rank import Rank

NUMEL = 6000
PIECES = (
    ParameterSlice("w0", 0, 3500),
    ParameterSlice("b", 3500, 3600, keep=True),
    ParameterSlice("w1", 3650, NUMEL),
)
"""With padding before w1."""


def _rank(**options):
    config = CompressionConfig(**{"density": 0.1, "samples": 600} | options)
    return Rank(config, PIECES, is_reported=True)


def _gradient(step, seed=0):
    """Multiples of 1/8 up to 16: a few halvings and additions of them are exact in fp32."""
    draw = torch.Generator().manual_seed(100 * seed + step)
    gradient = torch.randint(-128, 129, (NUMEL,), generator=draw) / 8
    gradient[3600:3650] = 0
    return gradient


@pytest.mark.parametrize("leak", [1.0, 0.5])
@pytest.mark.parametrize("scope", ["parameter", "bucket"])
def test_nothing_is_lost_and_about_the_target_is_sent(scope, leak):
    rank, before = _rank(threshold_scope=scope, leak=leak), torch.zeros(NUMEL)
    for step in range(8):
        sent = rank.send(_gradient(step), step)
        given = _gradient(step) + before
        dropped = torch.where(sent == 0, given, 0)
        assert torch.equal(sent, given - dropped)
        assert torch.equal(rank.residual, leak * dropped)
        assert torch.equal(sent[3500:3600], _gradient(step)[3500:3600]), "kept whole"
        # 600 samples of 10 %: 12 % off, three of which are allowed.
        pruned = rank.message.nnz - int(sent[3500:3600].count_nonzero())
        assert pruned / (0.1 * 5850) == pytest.approx(1, abs=0.4), step
        before = rank.residual
        rank.residuals.commit()


@pytest.mark.parametrize("dense", [False, True])
def test_density_one_and_dense_steps_send_the_residual_too(dense):
    rank = _rank()
    rank.send(_gradient(0), 0)
    rank.residuals.commit()
    before = rank.residual
    assert before.any()
    sent = rank.send_whole(_gradient(1), 1) if dense else rank.send(_gradient(1), 1, density=1.0)
    assert torch.equal(sent, _gradient(1) + before)
    assert not rank.residual.any()


def test_a_skipped_or_repeated_step_leaves_no_trace():
    disturbed, calm = _rank(), _rank()
    for step in range(6):
        for rank in (disturbed, calm):
            rank.send(_gradient(step), step)
            rank.residuals.commit()
        if step % 2:
            # The step is begun, skipped, begun again and repeated.
            disturbed.send(_gradient(step, seed=7) * 9, step + 1)
            disturbed.residuals.rollback()
            disturbed.send(_gradient(step, seed=8) * 9, step + 1)
    disturbed.residuals.rollback()
    assert torch.equal(disturbed.residual, calm.residual)


def test_a_restored_rank_goes_on_bit_for_bit():
    whole, resumed = _rank(), _rank()
    for step in range(4):
        whole.send(_gradient(step), step)
        whole.residuals.commit()
    saved = {key: view.clone() for key, view in whole.residuals.slices()}
    resumed.residuals.load([resumed.bucket(_gradient(0))], saved)
    for step in range(4, 9):
        one, other = (rank.send(_gradient(step), step) for rank in (whole, resumed))
        assert torch.equal(one, other), step
        for rank in (whole, resumed):
            rank.residuals.commit()
    assert torch.equal(whole.residual, resumed.residual)


def test_twice_the_loss_scale_sends_twice_as_much():
    """A power of two changes no mantissa, so all else must be the same to the bit."""
    plain, scaled = _rank(), _rank()
    for step in range(6):
        scale = 1.0 if step < 3 else 4.0
        if step == 3:
            scaled.residuals.rescale(4.0)
        one, other = plain.send(_gradient(step), step), scaled.send(_gradient(step) * scale, step)
        assert torch.equal(one * scale, other), step
        for rank in (plain, scaled):
            rank.residuals.commit()


def test_bf16_gradients_lose_nothing():
    """The gradient is only read; the residual is fp32."""
    rank, before = _rank(), torch.zeros(NUMEL)
    for step in range(3):
        gradient = _gradient(step).bfloat16()
        assert torch.equal(rank.send(gradient, step) + rank.residual, gradient.float() + before)
        before = rank.residual
        rank.residuals.commit()


def test_nan_and_infinity_are_sent_and_forgotten():
    rank, gradient = _rank(), _gradient(0)
    gradient[[5, 4000]] = torch.tensor([float("nan"), float("inf")])
    sent = rank.send(gradient, 0)
    assert sent[5].isnan()
    assert sent[4000].isinf()
    assert rank.residual.isfinite().all()


@pytest.mark.parametrize("scope", ["parameter", "bucket"])
@pytest.mark.parametrize(("density", "samples"), [(0.001, 40_000), (0.22, 1419)])
def test_the_sample_follows_the_density_of_the_step(scope, density, samples):
    numel, config = 50_000, CompressionConfig(density=0.01, threshold_scope=scope)
    gradient_N = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    pieces = [ParameterSlice("w", 0, numel)]
    bucket = Bucket("b", gradient_N, pieces, CollectiveOp.ALL_REDUCE, 1)

    def limits(samples):
        layout, given = bucket.layout(sharded=False), replace(config, samples=samples)
        found = range_limits(bucket, layout, torch.zeros(numel), density, 3, given)
        return [each_R.tolist() for each_R in found]

    assert limits("auto") == limits(samples)
    assert limits("auto") != limits(samples - 19)


@pytest.mark.parametrize("scope", ["parameter", "bucket"])
def test_limits_do_not_wait_for_the_device(scope):
    config = CompressionConfig(density=0.1, samples=100, threshold_scope=scope)
    residuals = ResidualStore(torch.float32)
    residuals.undo = residuals.is_reported = True
    OnDevice.reads = 0
    for step in range(3):
        gradient_N = _gradient(step).as_subclass(OnDevice)
        bucket = Bucket("b", gradient_N, PIECES, CollectiveOp.ALL_REDUCE, 1)
        layout = bucket.layout(sharded=False)
        residual_N = residuals.begin(bucket).as_subclass(OnDevice)
        limits_R = range_limits(bucket, layout, residual_N, 0.1, step, config)
        residuals.commit()
        assert {each_R.shape for each_R in limits_R} == {layout.range_piece.shape}
    assert OnDevice.reads == 0


class GroupRank(Rank):
    """A rank whose selections are summed by a scheme; step 2 is dense."""

    numel = 2400

    def __init__(self, rank, scheme, op):
        config = CompressionConfig(density=0.1, samples=300, warmup_iters=0, ramp_iters=0)
        super().__init__(config, parameters(self.numel), rank)
        self.rank, self.scheme, self.op = rank, scheme, op

    def step(self, transport, step):
        """The result of one step, and the sent values."""
        options, timer = SchemeConfig(name=self.scheme), StageTimer()
        draw = torch.Generator().manual_seed(10 * step + self.rank)
        gradient = torch.randint(-64, 65, (self.numel,), generator=draw).float()
        given = gradient + self.residual
        bucket = Bucket("b", gradient.clone(), self.pieces, self.op, transport.world_size)
        exchange = Exchange(bucket, transport, self.selector.buffers, timer, options)
        if step == 2:
            values_N = self.selector.take_whole(bucket, None, step=step, timer=timer)
            yield from SCHEMES["dense_ring"].run(exchange, values_N, step)
        else:
            plan = Planner(self.config, options).plan_for(bucket, step)
            spec = plan.message_spec(bucket, options)
            message = self.selector.select(bucket, spec, step=step, timer=timer)
            yield from SCHEMES[self.scheme].run(exchange, message)
        own = slice(None) if self.op is CollectiveOp.ALL_REDUCE else bucket.shard(self.rank)
        return bucket.grad_N[own].clone(), given - self.residual


@pytest.mark.parametrize(
    ("scheme", "op"),
    [
        ("agsparse", CollectiveOp.ALL_REDUCE),
        ("direct", CollectiveOp.REDUCE_SCATTER),
        ("zen", CollectiveOp.ALL_REDUCE),
    ],
)
def test_ranks_hold_the_exact_sum_of_what_they_selected(scheme, op):
    ranks = [GroupRank(rank, scheme, op) for rank in range(3)]
    for step in range(5):
        outcomes = VirtualCluster(3).run(lambda t, step=step: ranks[t.rank].step(t, step))
        results, sent = zip(*outcomes, strict=True)
        # Integers under 2^12: exact in fp32 in any order.
        assert torch.equal(same_on_all_ranks(op, list(results)), sum(sent)), step
        assert all(bool(rank.residual.any()) == (step != 2) for rank in ranks)


def test_the_documentation_names_tests_that_exist():
    named = [
        pair for _, pairs in doc_tables.rows_with_tests("docs/compression.md") for pair in pairs
    ]
    assert len(named) >= 6
    for path, name in named:
        assert name in doc_tables.test_functions(path), name
