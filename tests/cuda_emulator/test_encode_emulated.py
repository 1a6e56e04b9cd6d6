"""The CUDA encoders on the CPU emulator, byte for byte against the slow oracles."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.reference import prune as prune_oracle
from tests.cuda_emulator.codec_cases import STEP, capacity_of, check_decode, expect, gradient
from tests.cuda_emulator.emulated import (
    ADAPTIVE,
    BLOCKS,
    COO,
    DENSE,
    DTYPE_CODES,
    IN_ORDER,
    PICI,
    PICI_PAPER,
    RANDOM,
    REVERSED,
    Codecs,
)

KINDS = (DENSE, COO, PICI, BLOCKS, PICI_PAPER)
SCHEDULES = ((IN_ORDER, 0, 4), (REVERSED, 0, 4), (RANDOM, 1, 3), (RANDOM, 2, 8))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_encode_all_formats(codecs: Codecs, schedule: tuple[int, int, int], density: float) -> None:
    codecs.schedule(*schedule)
    # Empty, one element, exact tiles, partial tiles, and starts that no vector is aligned to.
    segments = [0, 0, 1, 4097, 4097 + 4099, 12293, 20000, 20063]
    values_N = gradient(segments[-1], density, torch.float32)
    kinds = [COO, PICI, PICI, PICI_PAPER, BLOCKS, COO, DENSE]
    for value_dtype in (torch.float32, torch.bfloat16):
        encoded = codecs.encode(
            values_N,
            segments,
            kinds,
            value_dtype,
            capacity=capacity_of(segments, value_dtype),
            block_size=64,
            shift=schedule[1],
        )
        records = expect(encoded, values_N, segments, kinds, value_dtype, 64)
        check_decode(codecs, values_N, segments, records, value_dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype(codecs: Codecs, kind: int, dtype: torch.dtype) -> None:
    codecs.schedule(RANDOM, 5)
    segments = [0, 4501, 4600]
    for value_dtype in DTYPE_CODES:
        values_N = gradient(segments[-1], 0.1, dtype, seed=kind)
        encoded = codecs.encode(
            values_N,
            segments,
            [kind] * 2,
            value_dtype,
            capacity=capacity_of(segments, value_dtype),
            block_size=128,
            shift=kind % 8,
        )
        records = expect(encoded, values_N, segments, [kind] * 2, value_dtype, 128)
        check_decode(codecs, values_N, segments, records, value_dtype)


@pytest.mark.parametrize("block_size", [64, 256, 1024, 4096])
def test_block_sizes(codecs: Codecs, block_size: int) -> None:
    codecs.schedule(RANDOM, 6)
    values_N = gradient(9000, 0, torch.float32)
    values_N[[0, 63, 64, 1025, 4095, 8999]] = 1.5
    segments = [0, 9000]
    encoded = codecs.encode(
        values_N, segments, [BLOCKS], torch.float32, capacity=36048, block_size=block_size
    )
    records = expect(encoded, values_N, segments, [BLOCKS], torch.float32, block_size)
    check_decode(codecs, values_N, segments, records, torch.float32)


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_zero_and_all_kept(codecs: Codecs, kind: int, density: float) -> None:
    codecs.schedule(REVERSED)
    values_N = torch.full((5000,), density)
    segments = [0, 5000]
    encoded = codecs.encode(
        values_N, segments, [kind], torch.float32, capacity=20048, block_size=64
    )
    records = expect(encoded, values_N, segments, [kind], torch.float32, 64)
    assert records[0][5] == (DENSE if density else kind & 15)  # never more than dense
    check_decode(codecs, values_N, segments, records, torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES[1:3], ids=str)
def test_more_segments_than_threads(codecs: Codecs, schedule: tuple[int, int, int]) -> None:
    """Tables are built 256 segments at a time."""
    codecs.schedule(*schedule)
    chance = random.Random(5)
    segments = [0]
    for _ in range(600):
        segments.append(segments[-1] + chance.choice([0, 1, 16, 33]))
    kinds = [chance.choice([DENSE, COO, ADAPTIVE]) for _ in range(600)]
    values_N = gradient(segments[-1], 0.1, torch.float32)
    encoded = codecs.encode(
        values_N, segments, kinds, torch.float32, capacity=capacity_of(segments, torch.float32)
    )
    records = expect(encoded, values_N, segments, kinds, torch.float32, 0)
    check_decode(codecs, values_N, segments, records, torch.float32)


def test_adaptive_takes_the_smallest(codecs: Codecs) -> None:
    codecs.schedule(RANDOM, 7)
    segments = [0, 9000, 18000, 27000]
    values_N = torch.cat([gradient(9000, density, torch.float32) for density in (0.01, 0.2, 1)])
    kinds = [ADAPTIVE] * 3
    encoded = codecs.encode(values_N, segments, kinds, torch.float32, capacity=108144)
    records = expect(encoded, values_N, segments, kinds, torch.float32, 0)
    assert [data[5] for data in records] == [COO, PICI, DENSE]


def test_capacity_too_small_is_reported(codecs: Codecs) -> None:
    codecs.schedule(RANDOM, 8)
    values_N = gradient(9000, 0.1, torch.float32)
    segments = [0, 5000, 9000]
    whole = codecs.encode(values_N, segments, [COO, PICI], torch.float32, capacity=36128)
    needed = sum(whole.segment_bytes)
    # One byte short; and so short that not even the values fit the scratch memory.
    for capacity in (needed - 1, 400):
        short = codecs.encode(values_N, segments, [COO, PICI], torch.float32, capacity=capacity)
        assert short.status == [1, 0, needed, capacity]
        assert short.segment_bytes == whole.segment_bytes
        assert short.records == []


@pytest.mark.parametrize(
    ("segments", "kinds", "status"),
    [
        ([0, 50, 99], [COO, COO], [2, 1, 99, 100]),
        ([1, 50, 100], [COO, COO], [2, 0, 50, 100]),
        ([0, 60, 50, 100], [COO] * 3, [2, 1, 50, 100]),
        ([0, 200, 100], [COO] * 2, [2, 0, 200, 100]),
        ([0, 50, 100], [COO, 9], [3, 1, 9, 0]),
        ([0, 50, 100], [COO, BLOCKS], [3, 1, BLOCKS, 0]),  # no block size was given
    ],
)
def test_wrong_segments_are_reported(
    codecs: Codecs, segments: list[int], kinds: list[int], status: list[int]
) -> None:
    codecs.schedule(IN_ORDER)
    values_N = gradient(100, 0.5, torch.float32)
    encoded = codecs.encode(values_N, segments, kinds, torch.float32, capacity=1000)
    assert encoded.status == status
    assert encoded.segment_bytes == [0] * len(kinds)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_result_does_not_depend_on_the_schedule(
    codecs: Codecs, schedule: tuple[int, int, int]
) -> None:
    # 14 tiles, many more than resident blocks, so that look-back meets every state.
    values_N = gradient(55000, 0.02, torch.bfloat16)
    segments = [0, 30001, 55000]
    codecs.schedule(*schedule, multiprocessors=2)
    encoded = codecs.encode(
        values_N, segments, [PICI, COO], torch.bfloat16, capacity=120000, block_size=64
    )
    expect(encoded, values_N, segments, [PICI, COO], torch.bfloat16, 64)


PRUNINGS = [
    (grad, residual, value, key)
    for grad, value in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float16, torch.bfloat16),
    )
    for residual in (torch.float32, torch.bfloat16)
    for key in (-1, 123456789)
]


@pytest.mark.parametrize(("grad", "residual", "value", "key"), PRUNINGS, ids=str)
def test_prune_encode(
    codecs: Codecs,
    grad: torch.dtype,
    residual: torch.dtype,
    value: torch.dtype,
    key: int,
) -> None:
    number = PRUNINGS.index((grad, residual, value, key))
    codecs.schedule((IN_ORDER, REVERSED, RANDOM)[number % 3], number)
    segments = [0, 4096, 9003, 9010]
    kinds = [COO, (PICI, PICI_PAPER)[number % 2], COO]
    # Ranges end inside tiles; one keeps everything, one nothing finite.
    ranges = [0, 3000, 3000, 8191, 9003, 9010]
    thresholds, chances = [1.5, 0.0, 1.2, math.inf, -1.0], [0.5, 1.0, 0.3, 0.0, 0.0]
    generator = torch.Generator().manual_seed(number)
    grad_N = gradient(9010, 1.0, grad, seed=number)
    residual_N = (torch.randn(9010, generator=generator) * 0.5).to(residual)
    residual_N[::97] = 0
    # Three elements in ten tie with their range's threshold, where it is 1.5 or 1.2 rounded.
    tied = torch.rand(9010, generator=generator) < 0.3
    grad_N = torch.where(tied, torch.tensor(1.5).to(grad), grad_N)
    residual_N[tied] = 0
    shift = number % 5
    encoded = codecs.encode(
        grad_N,
        segments,
        kinds,
        value,
        capacity=capacity_of(segments, value),
        step=STEP,
        shift=shift,
        prune={
            "residual": residual_N,
            "ranges": ranges,
            "thresholds": thresholds,
            "tie_chances": chances,
            "leak": 0.9,
            "key": key,
            "residual_shift": shift + (number % 4 == 3),
        },
    )
    pruned_N, rest_N, _ = prune_oracle.prune(
        grad_N,
        Pruning(
            residual_N,
            torch.tensor(ranges),
            torch.tensor(thresholds),
            0.9,
            key,
            None,
            torch.tensor(chances),
        ),
        DTYPE_CODES[value],
    )
    expect(encoded, pruned_N, segments, kinds, value, 0)
    assert encoded.residual is not None
    assert torch.equal(encoded.residual.view(torch.uint8), rest_N.view(torch.uint8))


@pytest.mark.parametrize("begin", [2**32 - 1000, 2**40 - 4096, 2**33 + 5, 3 * 2**32 - 4090])
def test_pruning_far_into_a_bucket(codecs: Codecs, begin: int) -> None:
    """The random bits depend on the upper half of the index, which may change inside a tile."""
    codecs.schedule(RANDOM, 2)
    length, key, limit = 4096, 99, (0.75, 0.6)
    grad_N = gradient(length, 1.0, torch.float32, seed=begin % 1000)
    residual_N = torch.randn(length, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad_N[::3], residual_N[::3] = 0.5, 0.25
    found_N, rest_N = codecs.prune_tile(grad_N, residual_N, begin, limit, 0.9, key)
    out_N, wanted_N, _ = prune_oracle.prune(
        grad_N,
        Pruning(
            residual_N,
            torch.tensor([0, length]),
            torch.tensor(limit[:1]),
            0.9,
            key,
            tie_chances_R=torch.tensor(limit[1:]),
        ),
        DTYPE_CODES[torch.bfloat16],
        begin,
    )
    assert torch.equal(found_N.view(torch.int32), out_N.view(torch.int32))
    assert torch.equal(rest_N.view(torch.int16), wanted_N.view(torch.int16))
