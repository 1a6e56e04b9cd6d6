"""On a GPU: Triton samples and selects as the CPU does; events time stages."""

import pytest
import torch

from megatron_sparse.cuda_ext import ops, threshold_triton
from megatron_sparse.recording import StageTimer
from tests.cuda_ext import cases
from tests.cuda_ext.threshold_cases import check_selection

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("residual_dtype", cases.RESIDUAL_DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_triton_selects_as_the_cpu_does(dtype, residual_dtype):
    selection = (cases.cut(300_007, 4), torch.tensor([0.01, 0.2, 1.0, 0.001]), 5000)
    tested = (threshold_triton.sample_threshold, ops.prune_)
    check_selection(dtype, residual_dtype, selection, torch.Tensor.cuda, tested)


def test_a_stage_is_timed_by_events():
    timer = StageTimer(torch.device("cuda"))
    with timer.stage("prune"):
        torch.cuda._sleep(20_000_000)
    # 20 million cycles: 10 ms at 2 GHz, and no GPU runs at 20 GHz.
    assert timer.times_us()["prune"] > 1000
