"""sample_threshold's CUDA kernel equals the oracle bit for bit, whatever the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.reference import threshold as oracle
from tests.cuda_emulator.device import Place, to_gpu
from tests.cuda_emulator.emulator import IN_ORDER, RANDOM, REVERSED, Emulator
from tests.cuda_ext import cases


def same_limits(found, expected, what: str) -> None:
    """Thresholds, chances and ties have the same bits."""
    for name, got, wanted in zip(expected._fields, found, expected, strict=True):
        cases.assert_same_bits(got.cpu(), wanted, f"{what} {name}")


KEYS = torch.tensor([0, 1, 2, 3, 2**62, 2**31, 7])
DENSITIES = torch.tensor([0.01, 0.5, 1.0, 1e-6, 0.999, 0.3, 2.0])


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
        offsets = cases.cut(numel, 7, seed=numel)
        for kind in cases.kinds(numel):
            grad = cases.make(kind, numel, dtype, seed=1)
            residual = None
            if residual_dtype is not None:
                residual = cases.make(kind, numel, residual_dtype, seed=2)
            expected = oracle.sample_threshold(grad, residual, offsets, DENSITIES, samples, KEYS)
            found = ops.sample_threshold(
                place(grad, 1),
                None if residual is None else place(residual, 3),
                offsets,
                DENSITIES,
                samples,
                KEYS,
            )
            same_limits(found, expected, f"{kind} {numel} {samples}")


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
    same_limits(found, expected, "schedule")


def test_ties_zeros_nan_and_infinity(place: Place) -> None:
    values = torch.tensor(
        [2.0, -2.0, 2.0, 2.0, 0.0, -0.0, 0.0, math.nan, math.inf, math.nan, 3.0, 1e-40]
    )
    offsets = torch.tensor([0, 4, 7, 11, 12])
    arguments = (offsets, torch.full((4,), 0.25), 1000, torch.arange(4))
    expected = oracle.sample_threshold(values, None, *arguments)
    assert expected.thresholds[0] == 2
    assert expected.tie_chances[:3].tolist() == [0.25, 0, 0]
    assert expected.tie_chances[3] in (0, 1), "drawn by the key of its range"
    assert expected.ties.tolist() == [4, 3, 3, 1]
    found = ops.sample_threshold(place(values), None, *arguments)
    same_limits(found, expected, "ties")
