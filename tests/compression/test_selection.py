"""Sampled top-k, error feedback: nothing is lost; undone, rescaled."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.selection import range_limits
from megatron_sparse.config.sparse import CompressionConfig
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
def test_nothing_is_lost_and_about_the_target_is_sent(leak):
    rank, before = _rank(leak=leak), torch.zeros(NUMEL)
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
    # What a dense step emptied takes no memory; a skipped one leaves it.
    rank.residuals.rollback()
    assert torch.equal(rank.residual, before)
    rank.send_whole(_gradient(1), 1) if dense else rank.send(_gradient(1), 1, density=1.0)
    rank.residuals.commit()
    assert ("b" in rank.residuals) != dense


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


def test_nan_and_infinity_are_sent_and_forgotten():
    rank, gradient = _rank(), _gradient(0)
    gradient[[5, 4000]] = torch.tensor([float("nan"), float("inf")])
    sent = rank.send(gradient, 0)
    assert sent[5].isnan()
    assert sent[4000].isinf()
    assert rank.residual.isfinite().all()


def _limits(samples, density=0.01, step=3):
    """Threshold, chance of a tie and ties in one parameter of normal numbers."""
    numel, config = 50_000, CompressionConfig(density=0.01, samples=samples)
    gradient_N = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    pieces = [ParameterSlice("w", 0, numel)]
    bucket = Bucket("b", gradient_N, pieces, CollectiveOp.ALL_REDUCE, 1)
    layout, residual_N = bucket.layout(sharded=False), torch.zeros(numel)
    limits_R = range_limits(bucket, layout, residual_N, density, step, config)
    return [values_R.item() for values_R in limits_R]


@pytest.mark.parametrize(("density", "samples"), [(0.001, 40_000), (0.22, 1419)])
def test_the_sample_follows_the_density_of_the_step(density, samples):
    assert _limits("auto", density) == _limits(samples, density)
    assert _limits("auto", density) != _limits(samples - 19, density)


def test_each_step_samples_other_elements():
    """Elements that no step looks at would never count for a threshold."""
    assert len({_limits(500, step=step)[0] for step in range(4)}) == 4


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_process_does_not_matter(default):
    """A script may set it, to make its model in bf16."""
    gradients = [_gradient(step) for step in range(3)]

    def sent():
        rank, values = _rank(), []
        for step, density in enumerate((0.1, 1.0)):
            values.append(rank.send(gradients[step], step, density=density))
            rank.residuals.commit()
        return [*values, rank.send_whole(gradients[2], 2)]

    expected = sent()
    torch.set_default_dtype(default)
    try:
        found = sent()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))
