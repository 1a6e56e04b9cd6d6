"""`grad_norm_skip_threshold`: Megatron skips a step whose norm is too large, in any precision."""

import copy
from typing import Any

import pytest
import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.megatron.parallel_gpt import Layout, parallel_state_of
from tests.megatron.train_ranks import SPARSE, Run, equal, installed_plugin, on_ranks, running

NEVER, ALWAYS = 1e9, 0.0
"""Norms to skip at; both are finite, so a step may be skipped."""


def _skip_above(optimizer: Any, norm: float) -> None:
    """Only the last of chained optimizers gets the threshold; Megatron then skips all of them."""
    last = optimizer.chained_optimizers[-1]
    last.config = copy.copy(last.config)  # it may be that of the others
    last.config.grad_norm_skip_threshold = norm


def _weights(run: Run) -> dict[str, torch.Tensor]:
    found = run.model.weights()
    return found if isinstance(found, dict) else {"": found}


def _assert_skips(run: Run, optimizers: int = 1) -> None:
    """A step, one that Megatron skips and that leaves residual and weights, and another."""
    optimizer = run.model.optimizer
    assert len(optimizer.chained_optimizers) == optimizers
    run.step()
    before, weights = run.residuals(), _weights(run)
    assert any(view.any() for view in before.values())
    _skip_above(optimizer, ALWAYS)
    run.step()
    assert equal(before, run.residuals())
    assert equal(weights, _weights(run))
    _skip_above(optimizer, NEVER)
    run.step()
    assert not equal(weights, _weights(run))


def _assert_skips_attached(setting: SmallGPTConfig | Layout, optimizers: int = 1) -> None:
    from megatron_sparse.megatron import attach

    with running(setting) as run:
        _skip_above(run.model.optimizer, NEVER)
        chunks = run.model.chunks if isinstance(setting, Layout) else [run.model.ddp]
        run.attachment = attach(chunks, run.model.optimizer, **SPARSE)
        _assert_skips(run, optimizers)


@pytest.mark.parametrize("distributed", [False, True])
@on_ranks(2)
def test_with_attach(rank: int, distributed: bool) -> None:
    _assert_skips_attached(SmallGPTConfig(bf16=distributed, distributed_optimizer=distributed))


@on_ranks(2)
def test_with_experts(rank: int) -> None:
    cpu_mode.enable_training()  # an all-to-all needs its stand-ins
    experts = Layout(expert=2, experts=4, dispatcher="alltoall")
    with parallel_state_of(experts):
        _assert_skips_attached(experts, optimizers=2)


@on_ranks(2)
def test_with_install(rank: int) -> None:
    with running(SmallGPTConfig()) as run, installed_plugin(3, **SPARSE) as installed:
        import megatron.training.training as host
        from megatron.core.optimizer import OptimizerConfig

        settings = OptimizerConfig(lr=0.01, grad_norm_skip_threshold=NEVER)
        chunks = installed.post_wrap_hook([run.model.ddp])
        run.model.optimizer = host.get_megatron_optimizer(settings, chunks)
        run.attachment = installed.attachment
        try:
            _assert_skips(run)
        finally:
            run.attachment = None
