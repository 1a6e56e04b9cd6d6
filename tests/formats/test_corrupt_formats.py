"""Damaged Pici and blocks records: refused as by the oracle, with the right field."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import WireFormatError
from megatron_sparse.reference import message as oracle
from megatron_sparse.wire import FORMAT_BLOCKS, FORMAT_PICI, HEADER_BYTES
from tests.cuda_ext import cases

STEP, NUMEL, RANK = 3, 5000, 2  # two tiles, 904 elements in the second
OFFSETS = torch.tensor([0, NUMEL])
FORMS = {
    "linear": {"record_format": FORMAT_PICI},
    "paper": {"record_format": FORMAT_PICI, "paper_order": True},
    "blocks": {"record_format": FORMAT_BLOCKS, "block_size": 64},
}
PREFIX = HEADER_BYTES + 2 * 512  # Pici's prefix sums, behind the words of two tiles


def message(form):
    # 1 in 10 elements, and gaps of whole blocks; the last element too, so that the last block is
    # one that reaches past the end: 5000 = 78 * 64 + 8.
    grad = cases.pruned_grad(NUMEL, 0.1, torch.float32)
    grad[64:2048], grad[-1] = 0, 1
    nnz = cases.count_nonzero(grad, OFFSETS)
    dense = torch.zeros(1, dtype=torch.uint8)
    (record,) = oracle.encode(
        grad, Segments(OFFSETS, dense), nnz, RecordSpec(0, STEP, **FORMS[form])
    )
    return bytearray(record)


def with_checksum(data):
    data[44:48] = zlib.crc32(data[:44]).to_bytes(4, "little")
    return data


def put(data, at, value, width=4):
    data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return data


def refused(data):
    """The field that the op names, or None; the oracle must refuse the same messages."""
    acc, reference = torch.full((NUMEL,), 0.5), torch.full((NUMEL,), 0.5)
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    by_oracle = error_of(oracle.decode_add_, reference, bytes(data))
    by_op = error_of(ops.decode_add_, acc, tensor)
    assert (by_op is None) == (by_oracle is None), f"op: {by_op}; oracle: {by_oracle}"
    if by_op is None:
        assert torch.equal(torch.nan_to_num(acc), torch.nan_to_num(reference))
        return None
    assert bool((acc == 0.5).all()), "a refused message changed the accumulator"
    return by_op.what.removeprefix(f"rank {RANK}: field ").removesuffix(" is wrong")


def error_of(decode, acc, data):
    try:
        decode(acc, data, Expected(OFFSETS, 0, STEP, RANK), 0)
    except WireFormatError as error:
        return error
    return None


@pytest.mark.parametrize("form", FORMS)
def test_the_good_message_is_taken(form):
    assert refused(message(form)) is None


@pytest.mark.parametrize("form", ["linear", "paper"])
def test_pici_damage_is_named(form):
    nnz = int.from_bytes(message(form)[16:24], "little")
    prefix = [int.from_bytes(message(form)[PREFIX + 4 * t :][:4], "little") for t in range(3)]
    assert prefix[0] == 0
    assert prefix[2] == nnz
    for entry, value in ((0, 1), (1, prefix[1] + 1), (1, 2**32 - 1), (2, nnz + 1), (2, 0)):
        assert refused(put(message(form), PREFIX + 4 * entry, value)) == "prefix"
    flipped = message(form)
    flipped[HEADER_BYTES + 7] ^= 1
    assert refused(flipped) == "prefix"
    # A count that is one off, in header and prefix, where padding leaves the size as it is.
    for change in (-1, 1):
        other = put(message(form), 16, nnz + change, 8)
        put(other, PREFIX + 8, nnz + change)
        assert refused(with_checksum(other)) in ("prefix", "payload_bytes")


@pytest.mark.parametrize(("form", "word"), [("linear", 64 + 63), ("paper", 64 + 63)])
def test_a_bit_beyond_the_end_is_named(form, word):
    # Element 4096 + 4095: no such element, though bits and counts agree.
    data, nnz = message(form), int.from_bytes(message(form)[16:24], "little")
    data[HEADER_BYTES + 8 * word + 7] |= 0x80
    put(data, 16, nnz + 1, 8)
    put(data, PREFIX + 8, nnz + 1)
    section = -(-4 * (nnz + 1) // 16) * 16
    data = data[: PREFIX + 16].ljust(PREFIX + 16 + section, b"\1")
    put(data, 24, len(data) - HEADER_BYTES, 8)
    assert refused(with_checksum(data)) == "words"


def test_blocks_damage_is_named():
    good = message("blocks")
    blocks = int.from_bytes(good[52:56], "little")
    index = HEADER_BYTES + 16
    for at, value, width, field in (
        (48, 0, 4, "block_size"),
        (56, 1, 8, "block_size"),
        (48, 128, 4, "n_blocks"),
        (48, 1, 4, "n_blocks"),
        (52, blocks - 1, 4, "payload_bytes"),
        (52, 80, 4, "n_blocks"),
        (52, 2**32 - 1, 4, "n_blocks"),
        (index, 79, 4, "indices"),
        (index, -1, 4, "indices"),
        (index + 4, 0, 4, "indices"),
        (index + 4 * (blocks - 1), 79, 4, "indices"),
        (len(good) - 4 * 56, 1, 1, "block padding"),
        (len(good) - 1, 0x80, 1, "block padding"),
    ):
        bad = put(message("blocks"), at, value, width)
        # A wider block is refused for its number or for the size that follows from it.
        assert refused(bad) in (field, "payload_bytes"), (at, value)


def test_flags_are_pici_s_only():
    for form, flags in (("linear", 2), ("paper", 0x80), ("blocks", 1)):
        bad = message(form)
        bad[7] |= flags
        assert refused(with_checksum(bad)) == "flags"
    # The other order is another valid message: the same bits, other elements.
    other = message("linear")
    other[7] = 0
    assert refused(with_checksum(other)) in (None, "words")


@given(
    st.sampled_from(list(FORMS)),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=150)
def test_random_damage_under_a_valid_checksum(form, damage):
    data = message(form)
    for at, value in damage:
        data[at % len(data)] = value
    refused(with_checksum(data))
