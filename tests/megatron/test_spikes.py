"""A gradient far above what is usual does not come back."""

from functools import partial
from statistics import median

import pytest
import torch

from megatron_sparse.megatron.spikes import (
    FACTOR,
    FEWEST,
    WINDOW,
    UsualNorm,
)
from tests.megatron.parallel_gpt import Layout
from tests.megatron.train_ranks import SPARSE, on_ranks, running

SMALL = Layout(layers=1)


def test_a_norm_far_above_the_median_counts_as_the_median():
    usual = UsualNorm([1.0] * FEWEST)
    assert usual.share(FACTOR, 1) is None
    assert usual.share(10.0, 2) == 0.1
    for step in range(3, WINDOW):
        usual.share(10.0, step)
    assert usual.share(10.0, WINDOW) is None  # that is usual now
    assert len(usual.norms) == WINDOW


@pytest.mark.parametrize("norm", [None, 0.0, float("nan"), float("inf")])
def test_an_unknown_norm_is_no_spike_and_does_not_count(norm):
    usual = UsualNorm([1.0] * FEWEST)
    assert usual.share(norm, 1) is None
    assert list(usual.norms) == [1.0] * FEWEST


def test_too_few_norms_make_no_median():
    usual = UsualNorm([1.0] * (FEWEST - 1))
    assert usual.share(1000.0, 1) is None


class Counted(UsualNorm):
    """Counts its spikes."""

    spikes = 0

    def share(self, norm, step):
        found = super().share(norm, step)
        self.spikes += found is not None
        return found


def _norms(*, guarded, undo, clip_grad=1.0):
    """Norms of 25 usual steps, and of 8 after a step whose gradient is 1000 times too large."""
    from megatron_sparse.megatron import attach

    with running(SMALL) as run:
        run.model.optimizer.config.clip_grad = clip_grad  # all its parts share it
        run.attachment = attach(run.model.chunks, run.model.optimizer, undo=undo, **SPARSE)
        norms = []
        for step in range(34):
            if step == 0 or not guarded:
                run.attachment.usual_norm = Counted()
            size = 1000.0 if step == 25 else 1.0
            run.model.config.grad_scale_func = partial(torch.mul, size)
            run.model.gradients()
            norms.append(run.model.optimizer.step()[1])
        return norms[:25], norms[25], norms[26:], run.attachment.usual_norm.spikes


@on_ranks(2)
def test_a_spike_does_not_come_back(rank):
    before, spike, after, spikes = _norms(guarded=True, undo="always")
    assert spike > 100 * median(before)
    assert max(after) < FACTOR * median(before)
    assert spikes == 1
    for guarded, undo in ((False, "always"), (True, "auto")):
        usual, _, after, spikes = _norms(guarded=guarded, undo=undo)
        assert usual == before, "bit for bit, as nothing was a spike"
        assert max(after) > 20 * median(before), "without the guard or an undo copy it does"
        assert spikes == 0


@on_ranks(2)
def test_without_clipping_nothing_of_a_spike_is_scaled_down(rank):
    """Megatron tells the norm all the same."""
    before, spike, _, spikes = _norms(guarded=True, undo="always", clip_grad=0.0)
    assert spike > 100 * median(before)
    assert spikes == 0
