"""A step with few tokens, in layouts where its second sum crosses more than one group.

Learning rates are zero, so that Megatron alone sees the same gradients.
"""

import pytest
import torch

from tests.megatron.parallel_gpt import OVERLAP, SEQUENCE, SHARDED, Layout, parallel_state_of
from tests.megatron.test_parallel import AT_TARGET, SPARSE, WORLD_SIZE
from tests.megatron.train_ranks import on_ranks, running

COUNTS = (SEQUENCE, SEQUENCE, 1, 0, SEQUENCE, SEQUENCE)
"""Tokens of a sequence that count, by step."""
LAYOUTS = {
    "tied": Layout(pipeline=2, tied=True, microbatches=2, per_token=True, ddp=OVERLAP),
    "tied_shards": Layout(pipeline=2, tied=True, per_token=True, ddp=SHARDED | OVERLAP),
    "instances": Layout(instances=2, per_token=True, ddp=SHARDED),
    "experts": Layout(expert=2, experts=4, per_token=True, ddp=OVERLAP),
}


def _train(layout, **plugin):
    """Each step's norm, gradients and residuals."""
    steps = []
    with running(layout, **(AT_TARGET | plugin if plugin else {})) as run:
        for group in run.model.optimizer.param_groups:
            group["lr"] = 0.0
        for run.model.counted in COUNTS:
            run.model.gradients()
            gradients = [
                parameter.main_grad.clone()
                for chunk in run.model.chunks
                for parameter in chunk.module.parameters()
            ]
            norm = run.model.optimizer.step()[1]
            unit = run.attachment.unit.of_gradient() if plugin else 1.0
            residuals = {name: view * unit for name, view in run.residuals().items()}
            steps.append({"norm": norm, "gradients": gradients, "residuals": residuals})
    return steps


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(WORLD_SIZE)
def test_few_tokens_have_megatrons_gradient_and_leave_residuals_alone(rank, layout):
    with parallel_state_of(LAYOUTS[layout]):
        plain, sparse = _train(LAYOUTS[layout]), _train(LAYOUTS[layout], **SPARSE, level="rank")
    assert sparse[1]["norm"] != pytest.approx(plain[1]["norm"], rel=1e-3)  # it is pruned
    assert any(residual.any() for residual in sparse[1]["residuals"].values())
    for step in (2, 3):
        # Two ranks' residuals of about the gradient's size are added and taken away again.
        assert sparse[step]["norm"] == pytest.approx(plain[step]["norm"], rel=1e-5, abs=1e-5)
    if not layout.endswith("s"):
        for got, expected in zip(sparse[2]["gradients"], plain[2]["gradients"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for name, residual in sparse[step]["residuals"].items():
            before = sparse[1]["residuals"][name]
            torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-6)
    for step in (4, 5):
        # In the unit of the step without tokens, residuals would count hundreds of times.
        assert sparse[step]["norm"] < 10 * plain[step]["norm"]
