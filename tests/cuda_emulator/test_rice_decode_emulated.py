"""The CUDA decoder of Rice records on the CPU emulator: the CPU's status for any damage."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from tests.cuda_emulator.codec_cases import STEP
from tests.cuda_emulator.emulated import IN_ORDER, RANDOM, REVERSED, Codecs, Expecting
from tests.cuda_emulator.ledger import Ledger, counting
from tests.cuda_emulator.rice_records import (
    FORMS,
    NAMES,
    SMALL,
    assert_same_numbers,
    damages,
    decode,
    encode,
    sealed,
    small_message,
)

ONE = torch.zeros(1, dtype=torch.uint8)
"""The flag of one segment that is not kept whole."""
SCHEDULES = [IN_ORDER, REVERSED, RANDOM]


def clustered(numel: int) -> torch.Tensor:
    """A chunk's entries far from even: runs that fill tiles, gaps of tiles, a single last one."""
    values_N = torch.zeros(numel)
    values_N[5000:9500] = torch.randn(4500, generator=torch.Generator().manual_seed(1))
    values_N[21000:21040] = 1.5
    values_N[40000::997] = -2.5
    values_N[-1] = 3.0
    return values_N


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("log2_span", [12, 14, 16, 24])
@pytest.mark.parametrize("form", [(0, False), (2, False), (4, False), (6, False)], ids=str)
def test_long_chunks_and_clusters(
    codecs: Codecs, form: tuple[int, bool], log2_span: int, schedule: int
) -> None:
    """Tiles without entries, before all entries and behind them; guards surround all buffers."""
    numel = 70_001
    message = encode(clustered(numel), form, log2_span, [0, numel], ONE)
    wanted = torch.ones(numel)
    assert decode(wanted, message, form[0], [0, numel]) == [0, 0, 0, 0]
    codecs.schedule(schedule, log2_span, multiprocessors=2)
    for fresh in (False, True):
        acc = torch.full((numel,), float(not fresh))
        found, status = codecs.decode_add(
            acc, message, [0, numel], form[0], step=STEP, fresh=fresh, shift=1
        )
        assert status == [0, 0, 0, 0]
        assert_same_numbers(found, wanted if not fresh else _sent(message, form, numel))


def _sent(message: bytes, form: tuple[int, bool], numel: int) -> torch.Tensor:
    acc = torch.zeros(numel)
    decode(acc, message, form[0], [0, numel])
    return acc


@pytest.mark.parametrize("entries", [1, 31, 32, 33, 127, 128, 129, 1365, 1366, 4096])
@pytest.mark.parametrize("form", [(1, False), (3, False), (5, False)], ids=str)
def test_numbers_of_entries(codecs: Codecs, form: tuple[int, bool], entries: int) -> None:
    """Around whole planes and groups, and where the unary part becomes a bitmap."""
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(entries))
    values_N = torch.zeros(8192)
    values_N[order[:entries]] = torch.arange(1.0, 1 + entries)
    values_N[4096 + order[:entries]] = -torch.arange(1.0, 1 + entries)
    for log2_span in (12, 13):
        message = encode(values_N, form, log2_span, [0, 8192], ONE)
        codecs.schedule(RANDOM, entries)
        found, status = codecs.decode_add(torch.zeros(8192), message, [0, 8192], form[0], step=STEP)
        assert status == [0, 0, 0, 0]
        assert_same_numbers(found, _sent(message, form, 8192))


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_statuses_of_damaged_messages(codecs: Codecs, form: tuple[int, bool]) -> None:
    """Those of the CPU, from decode_add_ and from decode_sum_, whatever the order of the blocks."""
    refused = 0
    for number, damaged in enumerate(damages(small_message(form), form)):
        acc = torch.ones(SMALL)
        wanted = decode(acc, damaged, form[0], [0, SMALL])
        codecs.schedule(SCHEDULES[number % 3], number, multiprocessors=1 + number % 2)
        found, status = codecs.decode_add(
            torch.ones(SMALL), damaged, [0, SMALL], form[0], step=STEP
        )
        assert status == wanted, number
        assert_same_numbers(found, acc)
        _, [state] = codecs.decode_sum(
            torch.zeros(SMALL), [damaged], [Expecting([0, SMALL], form[0], STEP)]
        )
        assert state == wanted, number
        refused += wanted[0]
    assert refused > (40 if form[1] else 130)


@pytest.mark.parametrize("form", [(0, False), (4, False), (4, True)], ids=str)
def test_random_damage_never_writes_outside(codecs: Codecs, form: tuple[int, bool]) -> None:
    """In the second of three messages, whose status is the CPU's; guards surround acc."""
    numel, chance = 30_000, random.Random(7)
    good = encode(clustered(30_000), form, 14, [0, numel], ONE)
    refused = 0
    for trial in range(30):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(48, 120 if trial % 2 else len(data))
            data[at] = chance.randrange(256)
        damaged = bytes(sealed(data))
        wanted = decode(torch.zeros(numel), damaged, form[0], [0, numel])
        codecs.schedule(RANDOM, trial, multiprocessors=2)
        _, states = codecs.decode_sum(
            torch.zeros(numel), [good, damaged, good], [Expecting([0, numel], form[0], STEP)] * 3
        )
        assert states == [[0, 0, 0, 0], wanted, [0, 0, 0, 0]]
        refused += wanted[0]
    assert refused > 5


def test_messages_apart_are_placed_in_one_pass(codecs: Codecs) -> None:
    """The owners' sums of few bits: each message has its own part of acc."""
    shards, form = [0, 9000, 9000, 20_480, 30_000], (4, False)
    values_N = clustered(30_000)
    messages, places, wanted = [], [], torch.zeros(30_000)
    for begin, end in pairwise(shards):
        # Offsets in the headers count from the bucket's begin.
        whole = encode(values_N[:end], form, 12, [0, begin, end], torch.zeros(2).byte())
        first = encode(values_N[:begin], form, 12, [0, begin], ONE)
        messages.append(whole[len(first) :])
        places.append(Expecting([begin, end], form[0], STEP))
        assert decode(wanted, messages[-1], form[0], [begin, end]) == [0, 0, 0, 0]
    codecs.schedule(RANDOM, 5)
    found, states = codecs.decode_sum(
        torch.full((30_000,), torch.nan), messages, places, apart=True
    )
    assert states == [[0, 0, 0, 0]] * 4
    assert_same_numbers(found, wanted)


def test_launches(codecs: Codecs) -> None:
    """As for other formats: walk, check, sum; and all messages of a sum together need no check."""
    message, places = small_message((4, False)), Expecting([0, SMALL], 4, STEP)
    codecs.schedule(IN_ORDER)
    with counting(ledger := Ledger()):
        codecs.decode_add(torch.zeros(SMALL), message, [0, SMALL], 4, step=STEP)
    assert (ledger.kernels, ledger.memsets) == (3, 0)
    with counting(ledger := Ledger()):
        codecs.decode_sum(torch.zeros(SMALL), [message] * 5, [places] * 5)
    assert (ledger.kernels, ledger.memsets) == (2, 0)
