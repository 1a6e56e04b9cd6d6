"""Damaged Rice records: oracle and ops refuse them with the right field, and add nothing."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.errors import WireFormatError
from megatron_sparse.reference.rice_chunk import rice_parameter, words_of_values
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_RICE, HEADER_BYTES, VERSION
from tests.cuda_ext import cases
from tests.formats.rice_cases import CODECS, NAMES, ORACLE, RANK, decode_add_, select, spec_of

NUMEL = 10_000  # three chunks of 4096 elements, the last one of 1808
TABLE, WORDS = HEADER_BYTES + 16, HEADER_BYTES + 16 + 32
CHUNKS_AT, WORDS_AT = HEADER_BYTES + 4, HEADER_BYTES + 8
ENTRIES = (5, 0, 45)
"""Of the three chunks."""


def message(value_dtype, *, without_indices=False):
    """5 entries in the first chunk, none in the second, 45 in the third, its last among them."""
    grad = torch.zeros(NUMEL)
    grad[[7, 8, 1000, 1001, 4000]] = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0])
    grad[8192:] = torch.arange(1808) % 41 == 3
    grad[-1] = 6.0
    assert int(grad[8192:].count_nonzero()) == 45
    spec = spec_of(value_dtype, without_indices=without_indices)
    return bytearray(select(ORACLE, grad, torch.zeros(NUMEL), -1, spec).bytes)


def with_checksum(data):
    data[44:48] = zlib.crc32(data[:44]).to_bytes(4, "little")
    return data


def put(data, at, value, width=4):
    data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return with_checksum(data)


def refused(data, value_dtype):
    """The fields that oracle and ops name, or None where all of them take it."""
    fields, sums = [], []
    for codec in CODECS:
        acc = torch.full((NUMEL,), 0.5)
        try:
            decode_add_(codec, acc, bytes(data), value_dtype)
        except WireFormatError as error:
            unchanged = codec == ORACLE or bool((acc == 0.5).all())
            assert unchanged, f"{codec}: a refused message changed the sum"
            fields.append(error.what.removeprefix(f"rank {RANK}: field ").removesuffix(" is wrong"))
        else:
            fields.append(None)
            sums.append(torch.where(acc.isnan(), torch.nan, acc))
    for each in sums[1:]:
        cases.assert_same_bits(each, sums[0], "the sum")
    assert len({field is None for field in fields}) == 1, dict(zip(CODECS, fields, strict=True))
    return None if fields[0] is None else set(fields)


FORMS = [(code, False) for code in NAMES] + [(3, True), (4, True)]
forms = pytest.mark.parametrize(("value_dtype", "without_indices"), FORMS)


@forms
def test_the_good_message_is_taken(value_dtype, without_indices):
    assert refused(message(value_dtype, without_indices=without_indices), value_dtype) is None


@pytest.mark.parametrize("value_dtype", [0, 2, 3, 6], ids=NAMES.get)
@pytest.mark.parametrize(
    ("field", "at", "width", "value"),
    [
        ("magic", 0, 4, 0),
        ("version", 4, 1, 1),
        ("version", 4, 1, VERSION + 1),
        ("format", 5, 1, 9),
        ("dtype", 6, 1, 1),
        ("dtype", 6, 1, 7),
        ("flags", 7, 1, 1),
        ("numel", 8, 8, NUMEL + 1),
        ("nnz", 16, 8, NUMEL + 1),
        ("payload_bytes", 24, 8, 0),
        ("payload_bytes", 24, 8, 16),
        ("offset", 32, 8, 16),
        ("step", 40, 4, 6),
    ],
)
def test_headers(value_dtype, field, at, width, value):
    assert refused(put(message(value_dtype), at, value, width), value_dtype) == {field}


def test_the_header_s_checksum():
    data = message(4)
    data[44] ^= 1
    assert refused(data, 4) == {"checksum"}


def test_what_is_no_record_of_the_message():
    """A quantised message has Rice records of its bits, and dense ones in bf16."""
    ones, none = torch.ones(NUMEL), torch.zeros(NUMEL)
    for other in (0, 3, 5, 6):
        assert refused(message(other), 4) == {"dtype"}
        assert refused(message(4), other) == {"dtype"}
    dense = select(ORACLE, ones, none, -1, spec_of(0)).bytes
    assert dense[5] == FORMAT_DENSE
    assert refused(bytearray(dense), 4) == {"dtype"}
    assert refused(put(bytearray(dense), 6, 4, 1), 4) <= {"format", "dtype"}
    kept = torch.ones(1, dtype=torch.uint8)
    narrow = select(ORACLE, ones, none, -1, spec_of(4), dense=kept).bytes
    assert refused(bytearray(narrow), 4) is None
    assert refused(put(bytearray(narrow), 5, FORMAT_COO, 1), 4) <= {"format", "dtype"}
    assert refused(put(bytearray(narrow), 5, FORMAT_RICE, 1), 4) == {"dtype"}


@pytest.mark.parametrize("length", [-1, -16, 0, 47, 48, 63, 64, 100])
def test_cut_messages(length):
    for value_dtype in (0, 4):
        assert refused(message(value_dtype)[:length], value_dtype) <= {"size", "payload_bytes"}


def test_bytes_behind_the_message():
    assert refused(message(4) + bytes(16), 4) == {"size"}


@forms
def test_the_sub_header(value_dtype, without_indices):
    def changed(at, value, width):
        data = message(value_dtype, without_indices=without_indices)
        return refused(put(data, at, value, width), value_dtype)

    for at, value, width in (
        (HEADER_BYTES, 2, 1),
        (HEADER_BYTES + 1, 11, 1),
        (HEADER_BYTES + 1, 13, 1),
        (HEADER_BYTES + 1, 25, 1),
        (HEADER_BYTES + 1, 255, 1),
        (HEADER_BYTES + 2, 1, 2),
        (CHUNKS_AT, 2, 4),
        (CHUNKS_AT, 4, 4),
        (CHUNKS_AT, 2**32 - 1, 4),
    ):
        assert changed(at, value, width) == {"chunk"}, (at, value)
    for words in (0, 10**6, 2**32, 2**62, 2**64 - 1):
        assert changed(WORDS_AT, words, 8) <= {"table", "payload_bytes"}, words
    other_indices = changed(HEADER_BYTES, without_indices, 1)
    assert other_indices is not None
    assert other_indices <= {"chunk", "table", "payload_bytes"}


@pytest.mark.parametrize("value_dtype", [0, 1, 2, 5, 6], ids=NAMES.get)
def test_only_8_and_4_bits_go_without_indices(value_dtype):
    data = put(message(value_dtype), HEADER_BYTES, 0, 1)
    assert refused(data, value_dtype) == {"chunk"}
    whole = put(message(4, without_indices=True), 6, value_dtype, 1)
    assert refused(whole, value_dtype) == {"chunk"}


@pytest.mark.parametrize("value_dtype", list(NAMES), ids=NAMES.get)
def test_the_table(value_dtype):
    good = message(value_dtype)
    rows = struct.unpack_from("<8I", good, TABLE)
    assert rows[::2] == (0, 5, 5, 50)
    for number, value in (
        (0, 1),
        (1, 1),
        (2, 4097),  # more entries than elements
        (2, 2**32 - 1),
        (3, rows[7] + 1),
        (3, 2**32 - 1),
        (4, 4),
        (5, rows[5] - 1),
        (6, 49),
        (7, rows[7] - 1),
    ):
        assert refused(put(message(value_dtype), TABLE + 4 * number, value), value_dtype) == {
            "table"
        }, (number, value)
    # Rows that ascend, but are not those of the words.
    for number, value in ((2, 4), (2, 51), (4, 6), (5, rows[5] + 1), (3, rows[3] - 1)):
        bad = put(message(value_dtype), TABLE + 4 * number, value)
        assert refused(bad, value_dtype) <= {"table", "rice"}, (number, value)
    assert refused(put(message(value_dtype), 16, 49, 8), value_dtype) == {"table"}


def third_chunk(data, value_dtype):
    """Offsets in the message: its values, remainders and unary part, and its end."""
    begin, end = struct.unpack_from("<8I", data, TABLE)[5::2]
    values = WORDS + 4 * begin
    remainders = values + 4 * words_of_values(45, value_dtype)
    r = rice_parameter(1808, 45)
    assert r == 5
    return values, remainders, remainders + 4 * r * 2, WORDS + 4 * end


@pytest.mark.parametrize("value_dtype", list(NAMES), ids=NAMES.get)
def test_the_unary_part(value_dtype):
    good = message(value_dtype)
    _, remainders, unary, end = third_chunk(good, value_dtype)
    last = int.from_bytes(good[end - 4 : end], "little")
    assert last
    ones = int.from_bytes(good[unary : unary + 4], "little")
    lowest = ones & -ones
    top = 1 << last.bit_length() - 1
    for at, value in (
        (unary, ones ^ lowest),  # one too few
        (unary, 0),
        (unary, 2**32 - 1),
        (end - 4, 0),  # the last word is empty
        (end - 4, last | 1 << 31),  # a bit after the last one
        (end - 4, (last ^ top) | 1 << 31),  # the last element is past the end
        (
            remainders + 4 * 9,
            1 << 12 | int.from_bytes(good[remainders + 36 : remainders + 40], "little"),
        ),
    ):
        assert refused(put(message(value_dtype), at, value), value_dtype) == {"rice"}, (at, value)


@pytest.mark.parametrize("value_dtype", list(NAMES), ids=NAMES.get)
def test_the_last_element_s_remainder_reaches_past_the_end(value_dtype):
    """The last entry is element 1807 of 1808: one more is one too many."""
    good = message(value_dtype)
    _, remainders, _, _ = third_chunk(good, value_dtype)
    last = 44 - 32
    gap = sum((good[remainders + 4 * (5 + p) + last // 8] >> last % 8 & 1) << p for p in range(5))
    assert gap < 31
    for p in range(5):
        at = remainders + 4 * (5 + p) + last // 8
        good[at] = good[at] & ~(1 << last % 8) | (gap + 1 >> p & 1) << last % 8
    assert refused(good, value_dtype) == {"rice"}


@pytest.mark.parametrize("value_dtype", [1, 2, 3, 4, 5, 6], ids=NAMES.get)
def test_padding_of_values_is_ignored(value_dtype):
    """As that of sections: the third chunk's codes fill 45 of 64 places, its halves 45 of 46."""
    good = message(value_dtype)
    _, remainders, _, _ = third_chunk(good, value_dtype)
    good[remainders - 1] ^= 0x80
    assert refused(good, value_dtype) is None
    whole = message(3, without_indices=True)  # the last chunk's last group has 16 codes
    whole[-1] ^= 0x80
    assert refused(whole, 3) is None


def test_any_scale_and_any_value_is_taken():
    """As the values of other formats: infinite, NaN, negative bases and steps."""
    for value_dtype in (3, 4, 5, 6):
        for word in (0xFFFFFFFF, 0x7F807F80, 0xFF807F80, 0xBF80BF80, 0x00018000, 0x7F7F7F7F, 0):
            assert refused(put(message(value_dtype), WORDS, word), value_dtype) is None


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=300)
def test_random_damage_under_a_valid_checksum(form, damage):
    value_dtype, without_indices = form
    data = message(value_dtype, without_indices=without_indices)
    for at, value in damage:
        data[at % len(data)] = value
    refused(with_checksum(data), value_dtype)


@pytest.mark.parametrize("value_dtype", [0, 4], ids=NAMES.get)
def test_every_flipped_bit_up_to_the_unary_part_of_the_first_chunk(value_dtype):
    """Oracle and ops agree on each; header, sub-header and table have no bit without a check."""
    good = message(value_dtype)
    for place in range(8 * (WORDS + 4 * 16)):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        found = refused(with_checksum(data) if place < 8 * 44 else data, value_dtype)
        if place < 8 * WORDS and place // 8 != HEADER_BYTES:
            assert found is not None, place
