"""A bad message is a `WireFormatError` that names rank and field, and changes nothing."""

from __future__ import annotations

import zlib
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import message as oracle
from megatron_sparse.wire import HEADER_BYTES
from tests.cuda_ext import cases
from tests.headers import read_headers

STEP = 77
# A COO segment of 400 elements and a dense one of 10.
OFFSETS = torch.tensor([1000, 1400, 1410])
BASE, NUMEL = 1000, 410
RANK = 3


def good_message():
    grad = cases.pruned_grad(NUMEL, 0.05, torch.float32)
    grad[400:] = 1
    local = OFFSETS - BASE
    records = oracle.encode(
        grad,
        Segments(local, torch.tensor([0, 1], dtype=torch.uint8)),
        cases.count_nonzero(grad, local),
        RecordSpec(0, STEP),
    )
    moved = []
    for record in records:
        header = Header.unpack(record, RANK)
        header = Header(**(vars(header) | {"offset": header.offset + BASE}))
        moved.append(header.pack() + record[HEADER_BYTES:])
    return bytearray(b"".join(moved))


def attempt(decoder, message):
    """The accumulator after decoding, and the decoder's error."""
    acc = torch.full((NUMEL,), 0.5)
    try:
        decoder(acc, message, Expected(OFFSETS, 0, STEP, RANK), BASE)
    except WireFormatError as error:
        return acc, error
    return acc, None


def decode(message):
    """Both decoders refuse, or neither does; the compiled one must leave acc as it was.

    The oracle adds record by record, so of several faults it may name another.
    """
    expected, refusal = attempt(oracle.decode_add_, bytes(message))
    # A new tensor, because frombuffer refuses an empty buffer.
    tensor = torch.tensor(list(message), dtype=torch.uint8)
    acc, error = attempt(ops.decode_add_, tensor)
    assert (error is None) == (refusal is None), f"op: {error}, oracle: {refusal}"
    if error is not None:
        assert bool((acc == 0.5).all()), "a refused message changed the accumulator"
        raise error
    assert torch.equal(torch.nan_to_num(acc), torch.nan_to_num(expected))


def test_the_good_message_decodes():
    decode(good_message())
    assert [h.format for h in read_headers(bytes(good_message()), RANK)] == [1, 0]


# field: (offset in the header, bytes)
FIELDS = {
    "magic": (0, 4),
    "version": (4, 1),
    "format": (5, 1),
    "dtype": (6, 1),
    "flags": (7, 1),
    "numel": (8, 8),
    "nnz": (16, 8),
    "payload_bytes": (24, 8),
    "offset": (32, 8),
    "step": (40, 4),
    "checksum": (44, 4),
}


def rewrite_checksum(message, record):
    message[record + 44 : record + 48] = zlib.crc32(message[record : record + 44]).to_bytes(
        4, "little"
    )


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("field", FIELDS)
def test_each_header_field_is_checked(field, segment):
    message = good_message()
    first = read_headers(bytes(message), RANK)[0]
    record = segment * (HEADER_BYTES + first.payload_bytes)
    at, width = FIELDS[field]
    for byte in range(width):
        for bit in (0, 7):
            bad = message.copy()
            bad[record + at + byte] ^= 1 << bit
            if field != "checksum":
                rewrite_checksum(bad, record)
            if field == "nnz" and segment == 1 and byte == 0 and bit == 0:
                continue  # a dense record's count is not decoded: any up to numel is taken
            with pytest.raises(WireFormatError, match=f"rank {RANK}: field") as caught:
                decode(bad)
            # A wrong but possible nnz or format is found by the size that follows from it.
            named = {field, "payload_bytes"} if field in ("nnz", "format") else {field}
            assert caught.value.what.split()[3] in named


@pytest.mark.parametrize("field", [f for f in FIELDS if f not in ("magic", "version")])
def test_a_flipped_bit_without_a_new_checksum_fails_the_checksum(field):
    message = good_message()
    message[FIELDS[field][0]] ^= 1
    with pytest.raises(WireFormatError, match="field checksum is wrong"):
        decode(message)


def test_truncated_or_too_long():
    message = good_message()
    for length in {*range(0, len(message), 7), len(message) - 1, HEADER_BYTES, HEADER_BYTES - 1}:
        with pytest.raises(WireFormatError, match=f"rank {RANK}: field size is wrong"):
            decode(message[:length])
    with pytest.raises(WireFormatError, match="field size is wrong"):
        decode(message + b"\0" * 16)


@pytest.mark.parametrize("value", [-1, 400, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("entry", [0, 5, -1])
def test_indices_out_of_range(entry, value):
    message = good_message()
    nnz = read_headers(bytes(message), RANK)[0].nnz
    at = HEADER_BYTES + 4 * (entry % nnz)
    message[at : at + 4] = value.to_bytes(4, "little", signed=True)
    with pytest.raises(WireFormatError, match="field indices is wrong"):
        decode(message)


def test_indices_must_ascend_across_the_chunks_of_threads():
    # 30,000 entries are several chunks; the repeated index stands at the border of two.
    numel, border = 200_000, 8192
    grad = torch.zeros(numel)
    grad[: 30_000 * 2 : 2] = 1
    offsets = torch.tensor([0, numel])
    (record,) = oracle.encode(
        grad,
        Segments(offsets, torch.zeros(1, dtype=torch.uint8)),
        torch.tensor([30_000]),
        RecordSpec(0, STEP),
    )
    message = bytearray(record)
    at = HEADER_BYTES + 4 * border
    message[at : at + 4] = message[at - 4 : at]
    acc = torch.zeros(numel)
    with pytest.raises(WireFormatError, match="field indices is wrong"):
        ops.decode_add_(
            acc,
            torch.frombuffer(message, dtype=torch.uint8),
            Expected(offsets, 0, STEP, rank=RANK),
            0,
        )
    assert not acc.any()


@given(st.binary(max_size=300))
@example(b"")
@settings(deadline=None, max_examples=100)
def test_random_bytes(data):
    with pytest.raises(WireFormatError):
        decode(bytearray(data))


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=5))
@settings(deadline=None, max_examples=200)
def test_random_damage_under_valid_checksums(damage):
    message = good_message()
    second = HEADER_BYTES + read_headers(bytes(message), RANK)[0].payload_bytes
    for at, value in damage:
        message[at % len(message)] = value
    for record in (0, second):
        rewrite_checksum(message, record)
    # Any result except a crash is allowed: `decode` checks that the oracle agrees.
    with suppress(WireFormatError):
        decode(message)
