"""decode_sum_ on the CPU emulator: all ranks' messages in one pass, in rank order, checked."""

from __future__ import annotations

import math
import random
import struct
from itertools import pairwise

import pytest
import torch

from tests.cuda_emulator.codec_cases import gradient, record
from tests.cuda_emulator.emulated import (
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
    Expecting,
)

SEGMENTS = [0, 40, 9000, 13096, 13097, 15000]
"""Less than a tile, several, exactly one, one element, and an end that is no multiple of 64."""
DENSITIES = {COO: 0.02, DENSE: 0.9, PICI: 0.1, PICI_PAPER: 0.1, BLOCKS: 0.01}


def message_of(
    values_N: torch.Tensor, segments: list[int], kinds: list[int], block_size: int = 64
) -> bytes:
    """One rank's records, back to back."""
    dtype, base = values_N.dtype, segments[0]
    return b"".join(
        record(values_N[a - base : b - base], kind, dtype, a, block_size)
        for (a, b), kind in zip(pairwise(segments), kinds, strict=True)
    )


def added(rows_RN: list[torch.Tensor]) -> torch.Tensor:
    """The fp32 sum in rank order."""
    acc = torch.zeros(rows_RN[0].numel())
    for row_N in rows_RN:
        acc += row_N.float()
    return acc


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


@pytest.mark.parametrize(
    ("ranks", "dtype", "schedule"),
    [
        (1, torch.float32, IN_ORDER),
        (3, torch.bfloat16, REVERSED),
        (9, torch.float32, RANDOM),
        (17, torch.float16, RANDOM),
    ],
)
@pytest.mark.parametrize("only_coo", [False, True])
def test_all_messages_are_added_in_rank_order(
    codecs: Codecs, ranks: int, dtype: torch.dtype, schedule: int, only_coo: bool
) -> None:
    """More ranks than warps, and more than one launch takes; acc's content is ignored."""
    chance = random.Random(ranks)
    rows, messages = [], []
    for rank in range(ranks):
        kinds = [COO if only_coo else chance.choice(list(DENSITIES)) for _ in SEGMENTS[1:]]
        parts = [
            gradient(b - a, DENSITIES[kind], dtype, seed=100 * rank + i)
            for i, ((a, b), kind) in enumerate(zip(pairwise(SEGMENTS), kinds, strict=True))
        ]
        rows.append(torch.cat(parts))
        messages.append(message_of(rows[-1], SEGMENTS, kinds))
    codecs.schedule(schedule, ranks)
    expecting = [Expecting(SEGMENTS, DTYPE_CODES[dtype])] * ranks
    acc = torch.full((SEGMENTS[-1] + 20,), math.nan)
    found, states = codecs.decode_sum(acc, messages, expecting, shift=ranks % 4)
    assert states == [[0, 0, 0, 0]] * ranks
    same(found[: SEGMENTS[-1]], added(rows))
    assert bool(found[SEGMENTS[-1] :].isnan().all()), "elements behind the segments were written"


@pytest.mark.parametrize("density", [0.001, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("kind", [COO, PICI, PICI_PAPER])
def test_tiles_from_empty_to_full(codecs: Codecs, kind: int, density: float) -> None:
    """Entries of a tile from fewer than lanes to more than threads; words that are crowded."""
    codecs.schedule(RANDOM, int(1000 * density))
    rows = [gradient(9000, density, torch.float32, seed=rank) for rank in range(2)]
    messages = [message_of(row, [0, 9000], [kind]) for row in rows]
    found, states = codecs.decode_sum(torch.zeros(9000), messages, [Expecting([0, 9000])] * 2)
    assert states == [[0, 0, 0, 0]] * 2
    same(found, added(rows))


@pytest.mark.parametrize("block_size", [1, 37, 64, 4096, 5000])
def test_blocks_of_any_size(codecs: Codecs, block_size: int) -> None:
    """Blocks that lie across tiles, fill one, or are longer than a tile."""
    codecs.schedule(RANDOM, block_size)
    values_N = torch.zeros(14001)
    values_N[[0, 3, 4095, 12300, 14000]] = torch.arange(1.0, 6.0)
    if block_size < 4096:
        values_N[[4096, 4999, 8191]] = 7
    data = message_of(values_N, [0, 14001], [BLOCKS], block_size)
    assert data[5] == BLOCKS
    other_N = gradient(14001, 0.01, torch.float32, seed=1)
    messages = [message_of(other_N, [0, 14001], [COO]), data]
    found, states = codecs.decode_sum(torch.zeros(14001), messages, [Expecting([0, 14001])] * 2)
    assert states == [[0, 0, 0, 0]] * 2
    same(found, added([other_N, values_N]))


@pytest.fixture(scope="module")
def good() -> tuple[list[bytes], list[int]]:
    """Three ranks' messages with a record of every format, and where its records begin."""
    segments = [0, 40, 340, 5000, 9999, 12000]
    kinds = [DENSE, COO, PICI, PICI_PAPER, BLOCKS]
    values_N = gradient(12000, 0.05, torch.float32, seed=4)
    values_N[9999:] = 0
    values_N[[11005, 11999]] = 1
    message = message_of(values_N, segments, kinds)
    records = [
        message_of(values_N[a:b], [a, b], [k])
        for (a, b), k in zip(pairwise(segments), kinds, strict=True)
    ]
    starts = [sum(map(len, records[:i])) for i in range(5)]
    assert [message[start + 5] for start in starts] == [DENSE, COO, PICI, PICI, BLOCKS]
    return [message] * 3, starts


FAULTS = [
    ("a header's magic number", 0, 0, "I", 5),
    ("an index beyond the end", 1, 48, "I", 300),
    ("an index twice", 1, 52, "I", None),
    ("indices in descending order", 1, 48, "I", 299),
    ("a prefix", 2, 48 + 2 * 512 + 4, "I", 2**32 - 1),
    ("both first prefixes", 2, 48 + 2 * 512, "Q", 2**64 - 1),
    ("the last prefix", 3, 48 + 2 * 512 + 8, "I", 0),
    ("a block beyond the end", 4, 48 + 16, "I", 32),
    ("blocks in descending order", 4, 48 + 20, "I", 15),
]


@pytest.mark.parametrize(("what", "segment", "at", "form", "value"), FAULTS)
def test_the_status_of_a_bad_message_is_that_of_decode_add(
    codecs: Codecs,
    good: tuple[list[bytes], list[int]],
    what: str,
    segment: int,
    at: int,
    form: str,
    value: int | None,
) -> None:
    """Of all messages, each with its own status, whichever block meets the error first."""
    messages, starts = good
    segments = [0, 40, 340, 5000, 9999, 12000]
    data = bytearray(messages[1])
    start = starts[segment]
    if value is None:
        value = struct.unpack_from("<I", data, start + 48)[0]
    struct.pack_into("<" + form, data, start + at, value)
    codecs.schedule(IN_ORDER)
    _, alone = codecs.decode_add(torch.zeros(12000), bytes(data), segments, torch.float32)
    assert alone[:2] == [1, segment], what
    for schedule in (REVERSED, RANDOM):
        codecs.schedule(schedule, at, multiprocessors=2)
        _, states = codecs.decode_sum(
            torch.zeros(12000), [messages[0], bytes(data), messages[2]], [Expecting(segments)] * 3
        )
        assert states == [[0, 0, 0, 0], alone, [0, 0, 0, 0]], what


def test_wrong_padding_of_blocks_is_found(
    codecs: Codecs, good: tuple[list[bytes], list[int]]
) -> None:
    messages, _ = good
    data = bytearray(messages[0])
    struct.pack_into("<I", data, len(data) - 16, 1)
    codecs.schedule(RANDOM, 1)
    segments = [0, 40, 340, 5000, 9999, 12000]
    _, [state] = codecs.decode_sum(torch.zeros(12000), [bytes(data)], [Expecting(segments)])
    assert state == [1, 4, 17, 31]


def test_random_damage_of_sections_is_found_and_never_writes_outside(
    codecs: Codecs, good: tuple[list[bytes], list[int]]
) -> None:
    """Each message is refused exactly if decode_add_ refuses it; guards surround acc."""
    messages, starts = good
    segments = [0, 40, 340, 5000, 9999, 12000]
    chance = random.Random(5)
    refused = 0
    for trial in range(24):
        data = [bytearray(message) for message in messages]
        for bytes_of_one in data[: chance.randint(1, 3)]:
            start = chance.choice(starts[1:])
            at = start + 48 + chance.randrange(0, 1200)
            bytes_of_one[min(at, len(bytes_of_one) - 1)] = chance.randrange(256)
        codecs.schedule(RANDOM, trial, multiprocessors=2)
        alone = [
            codecs.decode_add(torch.zeros(12000), bytes(one), segments, torch.float32)[1]
            for one in data
        ]
        _, states = codecs.decode_sum(
            torch.zeros(12000), [bytes(one) for one in data], [Expecting(segments)] * 3
        )
        assert states == alone
        refused += sum(state[0] for state in states)
    assert refused > 10


def test_segments_outside_acc_leave_it_alone(
    codecs: Codecs, good: tuple[list[bytes], list[int]]
) -> None:
    codecs.schedule(IN_ORDER)
    expecting = [Expecting([0, 40, 340, 5000, 9999, 12000])] * 3
    acc = torch.full((11999,), 3.0)
    found, states = codecs.decode_sum(acc, good[0], expecting)
    assert states == [[2, 4, 0, 12000]] * 3
    assert torch.equal(found, acc)


def test_messages_apart_are_placed_in_one_pass(codecs: Codecs) -> None:
    """The owners' sums: each counts from its own shard's begin. A bad one harms no other."""
    shards = [0, 5000, 5000, 9096, 14000]
    values_N = gradient(14000, 0.1, torch.bfloat16, seed=3)
    messages, expecting = [], []
    for (a, b), kind in zip(pairwise(shards), [PICI, COO, DENSE, COO], strict=True):
        offsets = [0, (b - a) // 3, b - a]
        messages.append(message_of(values_N[a:b], offsets, [kind, PICI]))
        expecting.append(Expecting(offsets, DTYPE_CODES[torch.bfloat16]))
    codecs.schedule(RANDOM, 2)
    accs = []
    for (a, b), message, each in zip(pairwise(shards), messages, expecting, strict=True):
        found, [state] = codecs.decode_sum(
            torch.full((b - a,), math.nan), [message], [each], apart=True
        )
        assert state == [0, 0, 0, 0]
        accs.append(found)
    same(torch.cat(accs), added([values_N]))
    # In one call all begin at one acc, so the segments say where each one lies.
    whole = [
        message_of(values_N[a:b], [a, (2 * a + b) // 3, b], [COO, PICI])
        for a, b in pairwise(shards)
    ]
    places = [
        Expecting([a, (2 * a + b) // 3, b], DTYPE_CODES[torch.bfloat16])
        for a, b in pairwise(shards)
    ]
    found, states = codecs.decode_sum(torch.full((14000,), math.nan), whole, places, apart=True)
    assert states == [[0, 0, 0, 0]] * 4
    same(found, added([values_N]))
    broken = [*whole[:3], b"\0" + whole[3][1:]]
    found, states = codecs.decode_sum(torch.full((14000,), math.nan), broken, places, apart=True)
    assert [state[0] for state in states] == [0, 0, 0, 1]
    same(found[:9096], added([values_N])[:9096])
