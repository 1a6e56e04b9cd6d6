"""On a GPU: thresholds equal the oracle's, Triton selects as the CPU does; events time stages."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.cuda_ext import ops, threshold_triton
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.recording import StageTimer
from megatron_sparse.reference import threshold as threshold_oracle
from tests.cuda_ext import cases
from tests.cuda_ext.threshold_cases import assert_same_limits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("module", [ops, threshold_triton])
def test_sample_threshold(module):
    grad, residual = cases.make("spread", 100_003, torch.bfloat16), torch.zeros(100_003)
    offsets, densities = cases.cut(100_003, 6), torch.full((6,), 0.01)
    arguments = (offsets, densities, 3000, torch.arange(6))
    expected = threshold_oracle.sample_threshold(grad, residual, *arguments)
    got = module.sample_threshold(grad.cuda(), residual.cuda(), *arguments)
    assert_same_limits(got, expected, "GPU")


@pytest.mark.parametrize("residual_dtype", cases.RESIDUAL_DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_triton_selects_as_the_cpu_does(dtype, residual_dtype):
    """Three steps of sampled top-k with leaky error feedback; the sample ties."""
    numel, wire = 300_007, cases.DTYPES.index(dtype)
    offsets, densities = cases.cut(numel, 4), torch.tensor([0.01, 0.2, 1.0, 0.001])
    residuals = {
        device: torch.zeros(numel, dtype=residual_dtype, device=device)
        for device in ("cpu", "cuda")
    }
    for step in range(3):
        grad, keys = cases.make("spread", numel, dtype, seed=step), torch.arange(4) + step
        grad[::3] = 2.0
        sent = {}
        for (device, residual), module in zip(
            residuals.items(), (ops, threshold_triton), strict=True
        ):
            sent[device] = grad.clone().to(device)
            limits = module.sample_threshold(sent[device], residual, offsets, densities, 5000, keys)
            pruning = Pruning(
                residual, offsets, limits.thresholds, 0.9, step, tie_chances_R=limits.tie_chances
            )
            ops.prune_(sent[device], pruning, wire)
        cases.assert_same_bits(sent["cuda"].cpu(), sent["cpu"], f"step {step}: sent")
        cases.assert_same_bits(residuals["cuda"].cpu(), residuals["cpu"], f"step {step}: rest")


def test_a_stage_is_timed_by_events():
    timer = StageTimer(torch.device("cuda"))
    with timer.stage("prune"):
        torch.cuda._sleep(20_000_000)
    # 20 million cycles: 10 ms at 2 GHz, and no GPU runs at 20 GHz.
    assert timer.times_us()["prune"] > 1000
