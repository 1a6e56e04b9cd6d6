"""The CUDA decoder on the CPU emulator: it checks everything and names the damage."""

from __future__ import annotations

import math
import random
import struct
import zlib
from itertools import pairwise

import pytest
import torch

from tests.cuda_emulator.codec_cases import STEP, gradient, record
from tests.cuda_emulator.emulated import (
    BLOCKS,
    COO,
    DENSE,
    IN_ORDER,
    PICI,
    PICI_PAPER,
    RANDOM,
    Codecs,
)

FIELDS = [
    "size",
    "magic",
    "version",
    "checksum",
    "format",
    "dtype",
    "flags",
    "step",
    "offset",
    "numel",
    "nnz",
    "payload_bytes",
    "indices",
    "prefix",
    "words",
    "block_size",
    "n_blocks",
    "padding",
]


def sealed(data: bytearray, at: int) -> bytearray:
    """Makes the header's checksum right again."""
    data[at + 44 : at + 48] = struct.pack("<I", zlib.crc32(bytes(data[at : at + 44])))
    return data


def patched(message: bytes, at: int, form: str, value: int, seal: int | None) -> bytes:
    data = bytearray(message)
    struct.pack_into("<" + form, data, at, value)
    return bytes(data if seal is None else sealed(data, seal))


@pytest.fixture(scope="module")
def message() -> tuple[bytes, list[int], list[int]]:
    """Dense, COO, Pici in both orders, blocks; the segments and where records begin."""
    segments = [0, 40, 340, 5000, 9999, 12000]
    values_N = gradient(12000, 0.05, torch.float32, seed=4)
    kinds = [DENSE, COO, PICI, PICI_PAPER, BLOCKS]
    values_N[11000:12000] = 0
    values_N[[11005, 11999]] = 1
    values_N[9999:11000] = 0
    records = [
        record(values_N[a:b], kind, torch.float32, a, 64)
        for (a, b), kind in zip(pairwise(segments), kinds, strict=True)
    ]
    assert [data[5] for data in records] == [DENSE, COO, PICI, PICI, BLOCKS]
    starts = [sum(map(len, records[:i])) for i in range(5)]
    return b"".join(records), segments, starts


HEADER_FAULTS = [
    ("magic", 0, "I", 0x12345678, False),
    ("version", 4, "B", 3, False),
    ("checksum", 44, "I", 1, False),
    ("format", 5, "B", 4, True),
    ("dtype", 6, "B", 1, True),
    ("flags", 7, "B", 2, True),
    ("step", 40, "I", STEP + 1, True),
    ("offset", 32, "Q", 3, True),
    ("numel", 8, "Q", 2**63, True),
    ("nnz", 16, "Q", 2**62, True),
    ("payload_bytes", 24, "Q", 2**64 - 16, True),
    ("payload_bytes", 24, "Q", 16, True),
    ("payload_bytes", 24, "Q", 5, True),
]


@pytest.mark.parametrize(("field", "at", "form", "value", "seal"), HEADER_FAULTS)
@pytest.mark.parametrize("segment", [0, 1, 3, 4])
def test_wrong_header_is_named(
    codecs: Codecs,
    message: tuple[bytes, list[int], list[int]],
    segment: int,
    field: str,
    at: int,
    form: str,
    value: int,
    seal: bool,
) -> None:
    codecs.schedule(RANDOM, segment)
    good, segments, starts = message
    first = starts[segment]
    bad = patched(good, first + at, form, value, first if seal else None)
    acc = torch.zeros(12000)
    found, status = codecs.decode_add(acc, bad, segments, torch.float32)
    signed = value - 2**64 if form == "Q" and value >= 2**63 else value
    assert status == [1, segment, FIELDS.index(field), signed]
    assert torch.equal(found, acc), "a bad message was partly added"


def test_wrong_sections_are_named(
    codecs: Codecs, message: tuple[bytes, list[int], list[int]]
) -> None:
    good, segments, starts = message
    coo, linear, paper, block = (start + 48 for start in starts[1:])
    index = struct.unpack_from("<2I", good, coo)
    linear_prefix, paper_prefix = linear + 2 * 512, paper + 2 * 512
    faults = [
        (1, "indices", coo, "I", 2**31, 2**31 - 2**32),
        (1, "indices", coo, "I", 300, 300),  # one past the end
        (1, "indices", coo + 4, "I", index[0], index[0]),  # twice the same
        (2, "prefix", linear_prefix, "I", 1, None),
        (2, "prefix", linear_prefix + 4, "I", 2**32 - 1, 2**32 - 1),
        (2, "prefix", linear, "Q", 2**64 - 1, None),
        # Bits beyond the end keep the prefix right: one is moved there.
        (3, "prefix", paper_prefix + 8, "I", 0, 0),
        (4, "block_size", block, "I", 0, 0),
        (4, "block_size", block + 8, "I", 5, 64),
        (4, "n_blocks", block + 4, "I", 2**32 - 1, 2**32 - 1),
        (4, "payload_bytes", block, "I", 60, None),
        (4, "indices", block + 16, "I", 32, 32),  # 2001 elements are 32 blocks
        (4, "indices", block + 20, "I", 15, 15),
        (4, "padding", len(good) - 16, "I", 1, 31),
    ]
    acc = torch.zeros(12000)
    for segment, field, at, form, value, reported in faults:
        codecs.schedule(RANDOM, segment)
        found, status = codecs.decode_add(
            acc, patched(good, at, form, value, None), segments, torch.float32
        )
        assert status[:3] == [1, segment, FIELDS.index(field)], (field, status)
        if reported is not None:
            assert status[3] == reported
        assert torch.equal(found, acc)


@pytest.mark.parametrize("linear", [True, False])
def test_bits_beyond_the_end_are_found(codecs: Codecs, linear: bool) -> None:
    """The counts fit; only the place of a bit is wrong."""
    codecs.schedule(IN_ORDER)
    values_N = torch.zeros(5000)
    values_N[[7, 4500]] = 1
    kind = PICI if linear else PICI_PAPER
    good = bytearray(record(values_N, kind, torch.float32, 0, 0))
    words = 48 + 512  # of the second tile, which has 904 elements
    row, column = divmod(4500 - 4096, 64)
    word, bit = (row, column) if linear else (column, row)
    at = words + 8 * word
    bits = struct.unpack_from("<Q", good, at)[0]
    assert bits == 1 << bit
    struct.pack_into("<Q", good, at, 0)
    struct.pack_into("<Q", good, words + 8 * 63, 1 << 63)  # element 4095 of the tile
    acc = torch.zeros(5000)
    found, status = codecs.decode_add(acc, bytes(good), [0, 5000], torch.float32)
    assert status == [1, 0, FIELDS.index("words"), 1]
    assert torch.equal(found, acc)


def test_wrong_length_is_named(codecs: Codecs, message: tuple[bytes, list[int], list[int]]) -> None:
    codecs.schedule(IN_ORDER)
    good, segments, starts = message
    acc = torch.zeros(12000)
    for length in (0, 16, 47, 48, starts[1], starts[3] + 48, starts[4] + 48, len(good) - 16):
        found, status = codecs.decode_add(acc, good[:length], segments, torch.float32)
        assert status[0] == 1
        assert status[2] == FIELDS.index("size"), (length, status)
        assert torch.equal(found, acc)
    _, status = codecs.decode_add(acc, good + bytes(16), segments, torch.float32)
    assert status == [1, 5, FIELDS.index("size"), len(good) + 16]


def test_fresh_takes_acc_for_zero(
    codecs: Codecs, message: tuple[bytes, list[int], list[int]]
) -> None:
    """Elements outside the segments keep their values; a bad message changes nothing."""
    good, segments, starts = message
    part, offsets = good[starts[1] :], segments[1:]
    acc = torch.full((12100,), math.nan)
    codecs.schedule(RANDOM, 4)
    found, status = codecs.decode_add(acc, part, offsets, torch.float32, fresh=True)
    assert status == [0, 0, 0, 0]
    wanted, status = codecs.decode_add(torch.zeros(12100), part, offsets, torch.float32)
    torch.testing.assert_close(found[40:12000], wanted[40:12000], rtol=0, atol=0, equal_nan=True)
    assert bool(found[:40].isnan().all() & found[12000:].isnan().all())
    bad = patched(part, 48, "I", 2**31, None)
    found, status = codecs.decode_add(acc, bad, offsets, torch.float32, fresh=True)
    assert status[:3] == [1, 0, FIELDS.index("indices")]
    assert bool(found.isnan().all())


def test_segments_outside_acc_are_refused(
    codecs: Codecs, message: tuple[bytes, list[int], list[int]]
) -> None:
    codecs.schedule(IN_ORDER)
    good, segments, _ = message
    _, status = codecs.decode_add(torch.zeros(11999), good, segments, torch.float32)
    assert status == [2, 4, 0, 12000]
    _, status = codecs.decode_add(torch.zeros(12000), good, segments, torch.float32, base=1)
    assert status == [2, 0, 0, 40]


def test_random_damage_never_writes_outside(
    codecs: Codecs, message: tuple[bytes, list[int], list[int]]
) -> None:
    """Headers get a new checksum, so that damage reaches the sections; guards surround acc."""
    good, segments, starts = message
    chance = random.Random(11)
    acc = torch.zeros(12000)
    refused = 0
    for trial in range(60):
        codecs.schedule(RANDOM, trial)
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            start = chance.choice(starts)
            at = start + chance.randrange(0, 48 if trial % 2 else 300)
            data[min(at, len(data) - 1)] = chance.randrange(256)
        for start in starts:
            sealed(data, start)
        found, status = codecs.decode_add(acc, bytes(data), segments, torch.float32)
        refused += status[0]
        if status[0]:
            assert torch.equal(found, acc)
    assert refused > 20  # most of the damage is to something that is checked


def test_base_and_part_of_a_message(codecs: Codecs) -> None:
    """A shard's records decode into the shard's accumulator."""
    codecs.schedule(RANDOM, 3)
    values_N = gradient(9000, 0.05, torch.float16, seed=9)
    segments = [0, 4000, 7000, 9000]
    records = [
        record(values_N[a:b], kind, torch.float16, a, 0)
        for (a, b), kind in zip(pairwise(segments), [COO, PICI, COO], strict=True)
    ]
    acc = torch.ones(5000)
    found, status = codecs.decode_add(
        acc, b"".join(records[1:]), segments[1:], torch.float16, base=4000, shift=3
    )
    assert status == [0, 0, 0, 0]
    torch.testing.assert_close(found, acc + values_N[4000:].float(), rtol=0, atol=0, equal_nan=True)
