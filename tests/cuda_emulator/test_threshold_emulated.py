"""sample_threshold's CUDA kernel equals the oracle bit for bit, whatever the schedule."""

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from tests.cuda_emulator.device import Place, to_gpu
from tests.cuda_emulator.emulator import IN_ORDER, RANDOM, REVERSED, Emulator
from tests.cuda_ext import cases
from tests.cuda_ext.threshold_cases import DENSITIES, KEYS, assert_same_limits, seven_ranges
from tests.oracles import threshold as oracle


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_equals_the_oracle(place: Place, dtype, residual_dtype) -> None:
    for numel, samples in ((0, 9), (1, 9), (701, 1), (701, 700), (4097, 70)):
        for kind in cases.kinds(numel):
            grad, residual, offsets = seven_ranges(kind, numel, dtype, residual_dtype)
            there = place(grad, 1), None if residual is None else place(residual, 3)
            expected = oracle.sample_threshold(grad, residual, offsets, DENSITIES, samples, KEYS)
            found = ops.sample_threshold(*there, offsets, DENSITIES, samples, KEYS)
            assert_same_limits(found, expected, f"{kind} {numel} {samples}")


@pytest.mark.parametrize("schedule", [IN_ORDER, REVERSED, RANDOM])
@pytest.mark.parametrize("multiprocessors", [1, 2])
def test_every_schedule_gives_the_same(
    emulated_gpu, emulator: Emulator, schedule: int, multiprocessors: int
) -> None:
    """More ranges than blocks, so that a block takes several."""
    numel, ranges = 6000, 11
    emulator.schedule(schedule, 5, resident_blocks=3, multiprocessors=multiprocessors)
    grad, offsets = cases.make("spread", numel, torch.float32), cases.cut(numel, ranges)
    densities, keys = torch.full((ranges,), 0.07), torch.arange(ranges)
    expected = oracle.sample_threshold(grad, None, offsets, densities, 600, keys)
    found = ops.sample_threshold(to_gpu(grad), None, offsets, densities, 600, keys)
    assert_same_limits(found, expected, "schedule")
