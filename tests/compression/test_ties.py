"""What ties at the threshold is drawn: sent densities are right, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bench.codec.gradients import DISTRIBUTIONS
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.methods import METHODS, method_of
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.sparsity.sampling import selected_values

NUMEL = 20_000
CONFIG = CompressionConfig(samples=5000, momentum=0.0)
TIED = ("constant", "outlier", "two_levels_0.02", "integers", "zeros_0.999", "denormals")


class Rank:
    """Sends gradients of one parameter, with error feedback."""

    def __init__(self, config: CompressionConfig, rank: int = 0) -> None:
        residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.REPORTED)
        self.selector = Selector(method_of(config, residuals), rank, MessageBuffers())

    def send(self, gradient_N: torch.Tensor, step: int, **spec) -> torch.Tensor:
        """The sent values of one step."""
        piece = [ParameterSlice("w", 0, NUMEL)]
        bucket = Bucket("b", gradient_N.clone(), piece, CollectiveOp.ALL_REDUCE, 1)
        message = self.selector.select(
            bucket, MessageSpec(0.01, **spec), step=step, timer=StageTimer()
        )
        sent_N = selected_values(bucket, message, self.selector.buffers).clone()
        for store in self.selector.method.stores.values():
            store.commit()
        self.selector.method.commit()
        return sent_N

    @property
    def residual(self) -> torch.Tensor:
        """After the last step."""
        return self.selector.method.stores["residual"]["b"].clone()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TIED)
def test_nothing_is_lost(method, name):
    """Sent + residual == gradient + old residual, bit for bit, for 20 steps."""
    rank, before = Rank(replace(CONFIG, method=method)), torch.zeros(NUMEL)
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        gradient_N = DISTRIBUTIONS[name](NUMEL, draw)
        sent_N = rank.send(gradient_N, step)
        assert torch.equal(sent_N + rank.residual, gradient_N + before), step
        assert not ((sent_N != 0) & (rank.residual != 0)).any(), "an element is sent whole or not"
        before = rank.residual


def test_ranks_and_steps_draw_different_ties():
    gradient_N = torch.full((NUMEL,), 0.5)
    one, other = Rank(CONFIG), Rank(CONFIG, rank=1)
    sent = [one.send(gradient_N, 0) != 0, other.send(gradient_N, 0) != 0]
    again = Rank(CONFIG).send(gradient_N, 0) != 0
    later = Rank(CONFIG).send(gradient_N, 1) != 0
    assert torch.equal(sent[0], again)
    for different in (sent[1], later):
        # Independent draws of 1 % have 2 elements of 20,000 in common.
        assert int((sent[0] & different).sum()) < 15


def test_capacity_holds_where_everything_ties():
    """Dropping all but the first is what an overflow does: the draw leaves none."""
    rank = Rank(CONFIG)
    sent_N = rank.send(torch.full((NUMEL,), 0.5), 0, capacity=2.0)
    kept_K = sent_N.nonzero().squeeze(1)
    assert 150 < len(kept_K) < 250
    assert int(kept_K[-1]) > 0.9 * NUMEL, "all of the gradient is drawn from"
