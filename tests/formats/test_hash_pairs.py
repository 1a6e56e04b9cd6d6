"""The Push record: pairs, a bitmap or dense, the smallest of them; receivers check it."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs
from megatron_sparse.formats.hash_partition import IndexSetHash, PermutationHash
from megatron_sparse.formats.hash_record import FORM_BITMAP, FORM_DENSE, FORM_PAIRS
from tests.cuda_ext import cases
from tests.formats.hash_cases import H, forged, place_of


def _entries(h, partition, density, dtype=torch.float32, seed=1):
    """Ascending elements of a partition, and values without a zero among them."""
    elements = h.element_at(partition, torch.arange(h.partition_numel(partition))).sort().values
    generator = torch.Generator().manual_seed(seed)
    chosen = elements[torch.rand(elements.numel(), generator=generator) < density]
    return chosen, (torch.rand(chosen.numel(), generator=generator) + 0.5).to(dtype)


def _form(record):
    return struct.unpack_from("<I", record.numpy(), 68)[0]


@settings(max_examples=60)
@given(
    st.integers(0, 3000),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.01, 0.1, 1.0)),
    st.sampled_from(cases.DTYPES),
    st.sampled_from((PermutationHash, IndexSetHash)),
)
def test_pushed_values_are_added_by_position(numel, partitions, density, dtype, hash_kind):
    h = hash_kind(numel, partitions, 7)
    for p in range(partitions):
        indices, values = _entries(h, p, density, dtype)
        place = place_of(h, p, dtype)
        record = hash_pairs.encode(indices, values, place)
        nnz, item = indices.numel(), dtype.itemsize
        sections = {
            FORM_DENSE: -(-place.positions * item // 16) * 16,
            FORM_BITMAP: (place.positions + 127) // 128 * 16 + -(-nnz * item // 16) * 16,
            FORM_PAIRS: -(-nnz * 4 // 16) * 16 + -(-nnz * item // 16) * 16,
        }
        assert record.numel() == 80 + min(sections.values())
        assert sections[_form(record)] == min(sections.values())
        acc = torch.ones(place.positions)
        hash_pairs.accumulate_(acc, record, place, rank=0)
        expected = torch.ones(place.positions)
        expected[h.locate(p, indices)] += values.float()
        assert torch.equal(acc, expected)


def test_pairs_are_the_elements_and_the_bits_of_their_values():
    indices = _entries(H, 1, 1.0)[0][[3, 50]]
    values = torch.tensor([float("nan"), float("-inf")])
    record = hash_pairs.encode(indices, values, place_of(H, 1))
    assert record.numel() == 80 + 16 + 16
    assert struct.unpack_from("<QQQ", record.numpy(), 8) == (1000, 2, 32 + 32)
    assert struct.unpack_from("<2I2I", record.numpy(), 80) == (*indices.tolist(), 0, 0)
    assert bytes(record[96:104].numpy()) == bytes(values.numpy())
    assert not record[104:].any()


INDICES, VALUES = _entries(H, 1, 0.02)
RECORD = hash_pairs.encode(INDICES, VALUES, place_of(H, 1))


STRANGER = int((H.partition_of(torch.arange(1000)) != 1).nonzero()[0])


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("format", forged(RECORD, 5, "<B", 1)),
        ("dtype", forged(RECORD, 6, "<B", 2)),
        ("numel", forged(RECORD, 8, "<Q", 1001)),
        ("nnz", forged(RECORD, 16, "<Q", 2**62)),
        ("payload_bytes", forged(RECORD, 16, "<Q", 100)),
        ("step", forged(RECORD, 40, "<I", 6)),
        ("partition", forged(RECORD, 48, "<I", 0)),
        ("seed", forged(RECORD, 56, "<Q", 12)),
        ("form", forged(RECORD, 68, "<I", 3)),
        ("positions", forged(RECORD, 72, "<Q", 334)),
        ("indices", forged(RECORD, 80, "<I", 1000)),
        ("indices", forged(RECORD, 80, "<i", -1)),
        ("indices", forged(RECORD, 80, "<I", STRANGER)),
        ("indices", forged(RECORD, 84, "<I", int(INDICES[0]))),
        ("size", RECORD[:-16]),
        ("size", torch.cat([RECORD, RECORD[:16]])),
        ("size", RECORD[:40]),
        ("checksum", torch.cat([RECORD[:20], RECORD[20:21] ^ 1, RECORD[21:]])),
    ],
)
def test_a_wrong_record_is_refused_and_adds_nothing(field, record):
    acc = torch.zeros(H.partition_numel(1))
    with pytest.raises(WireFormatError, match=f"rank 5: field {field} is wrong"):
        hash_pairs.accumulate_(acc, record, place_of(H, 1), rank=5)
    assert not acc.any()


def test_a_pull_is_never_pairs():
    with pytest.raises(WireFormatError, match="rank 5: field form is wrong"):
        hash_bitmap.decode(RECORD, place_of(H, 1), rank=5)


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_byte_is_refused_or_changes_entries_of_this_partition(at, flip):
    record = RECORD.clone()
    at %= record.numel()
    record[at] ^= flip
    acc = torch.zeros(H.partition_numel(1))
    try:
        hash_pairs.accumulate_(acc, record, place_of(H, 1), rank=0)
    except WireFormatError:
        assert not acc.any()
        return
    assert at >= 80


def test_arguments_that_do_not_match_are_one_typed_error():
    place, pairs = place_of(H, 1), hash_pairs.encode(*_entries(H, 1, 0.5), place_of(H, 1))
    for call, words in (
        (lambda: hash_pairs.encode(INDICES, VALUES[1:], place), "values do not fit"),
        (lambda: hash_pairs.encode(INDICES, VALUES.half(), place), "values do not fit"),
        (lambda: place_of(H, 3), "no such partition"),
        (lambda: place_of(H, 1, torch.float64), "have no code"),
        (lambda: hash_pairs.accumulate_(torch.zeros(9), RECORD, place, 0), "wrong length"),
        (lambda: hash_pairs.accumulate_(torch.zeros(9), pairs, place, 0), "wrong length"),
    ):
        with pytest.raises(ExtensionError, match=words):
            call()
