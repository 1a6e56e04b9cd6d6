"""`grad_norm_skip_threshold`: Megatron skips a step whose norm is too large, in any precision."""

import copy
from typing import Any

import pytest

from megatron_sparse.megatron import cpu_mode
from tests.megatron.parallel_gpt import SHARDED, Layout, parallel_state_of
from tests.megatron.train_ranks import SPARSE, Run, equal, installed_plugin, on_ranks, running

NEVER, ALWAYS = 1e9, 0.0
"""Norms to skip at; both are finite, so a step may be skipped."""


def _skip_above(optimizer: Any, norm: float) -> None:
    """Only the last of chained optimizers gets the threshold; Megatron then skips all of them."""
    last = optimizer.chained_optimizers[-1]
    last.config = copy.copy(last.config)  # it may be that of the others
    last.config.grad_norm_skip_threshold = norm


def _assert_skips(run: Run, optimizers: int = 1) -> None:
    """A step, one that Megatron skips and that leaves residual and weights, and another."""
    optimizer = run.model.optimizer
    assert len(optimizer.chained_optimizers) == optimizers
    run.step()
    before, weights = run.residuals(), run.model.weights()
    assert any(view.any() for view in before.values())
    _skip_above(optimizer, ALWAYS)
    run.step()
    assert equal(before, run.residuals())
    assert equal(weights, run.model.weights())
    _skip_above(optimizer, NEVER)
    run.step()
    assert not equal(weights, run.model.weights())


def _assert_skips_attached(layout: Layout, optimizers: int = 1) -> None:
    from megatron_sparse.megatron import attach

    with running(layout) as run:
        _skip_above(run.model.optimizer, NEVER)
        run.attachment = attach(run.model.chunks, run.model.optimizer, **SPARSE)
        _assert_skips(run, optimizers)


@pytest.mark.parametrize("layout", [Layout(), Layout(precision="bf16", ddp=SHARDED)])
@on_ranks(2)
def test_with_attach(rank: int, layout: Layout) -> None:
    _assert_skips_attached(layout)


@on_ranks(2)
def test_with_experts(rank: int) -> None:
    cpu_mode.enable_training()  # an all-to-all needs its stand-ins
    experts = Layout(expert=2, experts=4, dispatcher="alltoall")
    with parallel_state_of(experts):
        _assert_skips_attached(experts, optimizers=2)


@on_ranks(2)
def test_with_install(rank: int) -> None:
    with running(Layout()) as run, installed_plugin(3, **SPARSE) as installed:
        import megatron.training.training as host
        from megatron.core.optimizer import OptimizerConfig

        settings = OptimizerConfig(lr=0.01, grad_norm_skip_threshold=NEVER)
        chunks = installed.post_wrap_hook(run.model.chunks)
        run.model.optimizer = host.get_megatron_optimizer(settings, chunks)
        run.attachment = installed.attachment
        try:
            _assert_skips(run)
        finally:
            run.attachment = None
