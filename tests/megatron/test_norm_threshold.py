"""`grad_norm_skip_threshold`: Megatron skips a step whose norm is too large, in any precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig
from tests.megatron.parallel_gpt import Layout, parallel_state_of
from tests.megatron.train_ranks import SPARSE, Run, equal, installed_plugin, running, train_ranks

NEVER, ALWAYS = 1e9, 0.0
"""Norms to skip at; both are finite, so a step may be skipped."""
SETTINGS = {
    "fp32": SmallGPTConfig(),
    "bf16, distributed": SmallGPTConfig(bf16=True, distributed_optimizer=True),
}


def _skip_above(optimizer: Any, norm: float) -> None:
    """Only the last of chained optimizers gets the threshold; Megatron then skips all of them."""
    last = optimizer.chained_optimizers[-1]
    last.config = copy.copy(last.config)  # it may be that of the others
    last.config.grad_norm_skip_threshold = norm


def _weights(run: Run) -> dict[str, torch.Tensor]:
    found = run.model.weights()
    return found if isinstance(found, dict) else {"": found}


def _report(run: Run) -> dict[str, Any]:
    """A step, one that Megatron skips, and another."""
    optimizer = run.model.optimizer
    run.step()
    before, weights = run.residuals(), _weights(run)
    _skip_above(optimizer, ALWAYS)
    run.step()
    kept = {"residual": equal(before, run.residuals()), "weights": equal(weights, _weights(run))}
    _skip_above(optimizer, NEVER)
    run.step()
    return kept | {
        "optimizers": len(optimizer.chained_optimizers),
        "moved": any(view.any() for view in before.values()) and not equal(weights, _weights(run)),
    }


def _attached(setting: SmallGPTConfig | Layout) -> dict[str, Any]:
    from megatron_sparse.megatron import attach

    with running(setting) as run:
        _skip_above(run.model.optimizer, NEVER)
        chunks = run.model.chunks if isinstance(setting, Layout) else [run.model.ddp]
        run.attachment = attach(chunks, run.model.optimizer, **SPARSE)
        return _report(run)


def _installed() -> dict[str, Any]:
    with running(SmallGPTConfig()) as run, installed_plugin(3, **SPARSE) as installed:
        import megatron.training.training as host
        from megatron.core.optimizer import OptimizerConfig

        model: SmallGPT = run.model
        settings = OptimizerConfig(lr=0.01, grad_norm_skip_threshold=NEVER)
        chunks = installed.post_wrap_hook([model.ddp])
        model.optimizer = host.get_megatron_optimizer(settings, chunks)
        run.attachment = installed.attachment
        try:
            return _report(run)
        finally:
            run.attachment = None


def _all(rank: int) -> dict[str, Any]:
    cpu_mode.enable_training()  # an all-to-all needs its stand-ins
    experts = Layout(expert=2, experts=4, dispatcher="alltoall")
    with parallel_state_of(experts):
        found = {"experts": _attached(experts)}
    found |= {name: _attached(setting) for name, setting in SETTINGS.items()}
    return found | {"install": _installed()}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return train_ranks(_all, 2)


@pytest.mark.parametrize("case", ["experts", *SETTINGS, "install"])
def test_a_skipped_step_leaves_residual_and_weights(ranks, case):
    for rank in ranks:
        expected = {"residual": True, "weights": True, "moved": True}
        assert expected.items() <= rank[case].items()
        assert rank[case]["optimizers"] == (2 if case == "experts" else 1)
