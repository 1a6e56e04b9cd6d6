"""The message codec equals its oracle byte for byte; a message decodes to the encoded values."""

from __future__ import annotations

import os
import zlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import message as oracle
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, HEADER_BYTES
from tests.cuda_ext import cases
from tests.headers import read_headers

STEP = 2**32 + 5  # its lower half travels
DENSITIES = (0.0, 0.01, 0.2, 1.0)


def encode(grad, offsets, dense, nnz, value_dtype):
    """Encodes into a poisoned buffer and checks that nothing behind the message was touched."""
    capacity = ops.message_capacity(offsets, value_dtype)
    out = torch.full((capacity + 64,), 0xFF, dtype=torch.uint8)
    sizes = ops.encode(
        grad, Segments(offsets, dense), nnz, RecordSpec(value_dtype, STEP), out[:capacity]
    )
    used = int(sizes.sum())
    assert used <= capacity
    assert bool((out[used:] == 0xFF).all())
    return out[:used], sizes


def check(grad, offsets, dense, value_dtype, what):
    nnz = cases.count_nonzero(grad, offsets)
    records = oracle.encode(grad, Segments(offsets, dense), nnz, RecordSpec(value_dtype, STEP))
    start = torch.randn(grad.numel(), generator=torch.Generator().manual_seed(1))
    expected = start.clone()
    oracle.decode_add_(expected, b"".join(records), Expected(offsets, value_dtype, STEP, rank=0), 0)
    for isa in cases.ISAS:
        with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=isa):
            message, sizes = encode(cases.unaligned(grad), offsets, dense, nnz, value_dtype)
            assert sizes.tolist() == [len(record) for record in records], f"{isa} {what}"
            assert message.numpy().tobytes() == b"".join(records), f"{isa} {what}"
            acc = cases.unaligned(start)
            ops.decode_add_(
                acc,
                cases_unaligned_bytes(message),
                Expected(offsets, value_dtype, STEP, rank=0),
                0,
            )
            cases.assert_same_bits(canonical(acc), canonical(expected), f"{isa} {what}")


def canonical(acc):
    """One NaN: which payload survives an addition differs between instruction sets."""
    return torch.where(acc.isnan(), torch.nan, acc)


def cases_unaligned_bytes(message):
    room = torch.empty(message.numel() + 1, dtype=torch.uint8)
    room[1:] = message
    return room[1:]


@pytest.mark.parametrize("value_dtype", range(3))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equals_the_oracle(dtype, value_dtype):
    for numel in cases.SIZES[:-1]:
        offsets = cases.cut(numel, 4, seed=numel)
        dense = torch.tensor([0, 1, 0, 0], dtype=torch.uint8)
        for density in DENSITIES:
            grad = cases.pruned_grad(numel, density, dtype, seed=numel)
            check(grad, offsets, dense, value_dtype, f"{numel} {density}")
        grad = cases.make("special", numel, dtype)  # converted to nearest even, or to infinity
        check(grad, offsets, dense, value_dtype, f"{numel} special")


@pytest.mark.parametrize("density", [0.01, 0.45])
def test_the_bytes_do_not_depend_on_the_thread_count(density):
    numel = cases.SIZES[-1]
    grad = cases.pruned_grad(numel, density, torch.float32)
    offsets = cases.cut(numel, 3)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check(grad, offsets, torch.zeros(3, dtype=torch.uint8), 0, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.floats(width=16) | st.just(0.0), max_size=90),
    st.integers(1, 5),
    st.sampled_from(range(3)),
    st.integers(0, 31),
)
@settings(deadline=None, max_examples=150)
def test_round_trip(values, segments, value_dtype, dense_mask):
    grad = torch.tensor(values, dtype=torch.float32).to(cases.DTYPES[value_dtype])
    offsets = cases.cut(len(values), segments, seed=len(values))
    dense = torch.tensor([dense_mask >> s & 1 for s in range(segments)], dtype=torch.uint8)
    message, _ = encode(grad, offsets, dense, cases.count_nonzero(grad, offsets), value_dtype)
    acc = torch.zeros(len(values))
    ops.decode_add_(acc, message, Expected(offsets, value_dtype, STEP, rank=0), 0)
    # 0.0 + -0.0 is 0.0: only the sign of zero is lost.
    cases.assert_same_bits(canonical(acc), canonical(grad.float() + 0.0), "round trip")


def test_dense_where_coo_is_not_smaller_and_never_larger_than_the_capacity():
    # fp32 COO takes 8 bytes an entry, dense 4 an element; each section is padded to 16 bytes.
    for nnz, form in ((496, FORMAT_COO), (497, FORMAT_DENSE), (501, FORMAT_DENSE)):
        grad = torch.zeros(1000)
        grad[:nnz] = 1
        offsets = torch.tensor([0, 1000])
        message, _ = encode(
            grad, offsets, torch.zeros(1, dtype=torch.uint8), torch.tensor([nnz]), 0
        )
        (header,) = read_headers(message.numpy().tobytes(), rank=0)
        assert (header.format, header.nnz, header.numel) == (form, nnz, 1000)
        assert header.step == STEP % 2**32


def test_segments_far_into_a_bucket():
    first, numel = 2**40 - 100, 100
    offsets = torch.tensor([0, numel])
    grad = cases.pruned_grad(numel, 0.1, torch.float32)
    nnz = cases.count_nonzero(grad, offsets)
    (record,) = oracle.encode(
        grad, Segments(offsets, torch.zeros(1, dtype=torch.uint8)), nnz, RecordSpec(0, STEP)
    )
    header = Header.unpack(record, rank=0)
    far = Header(**(vars(header) | {"offset": first})).pack() + record[HEADER_BYTES:]
    acc = torch.zeros(numel)
    message = torch.frombuffer(bytearray(far), dtype=torch.uint8)
    ops.decode_add_(acc, message, Expected(offsets + first, 0, STEP, rank=0), first)
    cases.assert_same_bits(canonical(acc), canonical(grad + 0.0), "far")


def test_the_accumulator_may_begin_before_the_segments():
    grad, offsets = torch.ones(6), torch.tensor([0, 6])
    message, _ = encode(grad, offsets, torch.ones(1, dtype=torch.uint8), torch.tensor([6]), 0)
    acc = torch.zeros(9)
    with pytest.raises(ExtensionError, match="do not lie in acc"):
        ops.decode_add_(acc[:5], message, Expected(offsets, 0, STEP, rank=0), 0)
    ops.decode_add_(acc, message, Expected(offsets, 0, STEP, rank=0), 0)
    assert acc.tolist() == [1.0] * 6 + [0.0] * 3


def test_message_capacity():
    assert ops.message_capacity(torch.tensor([0, 5, 8]), 0) == 48 + 32 + 48 + 16
    assert ops.message_capacity(torch.tensor([0, 5, 8]), 2) == 48 + 16 + 48 + 16
    assert ops.message_capacity(torch.tensor([0]), 1) == 0


def test_header_layout():
    header = Header(1, 2, numel=3, nnz=2, payload_bytes=32, offset=2**39, step=7)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert packed[:8] == b"MSPG\x02\x01\x02\x00"
    assert packed[44:] == zlib.crc32(packed[:44]).to_bytes(4, "little")
    assert Header.unpack(packed, rank=0) == header


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nnz": torch.tensor([3])}, "nnz of segment 0 is not what the gradient holds"),
        ({"nnz": torch.tensor([-1])}, "nnz of segment 0 is impossible"),
        ({"nnz": torch.tensor([21])}, "nnz of segment 0 is impossible"),
        ({"out": torch.zeros(79, dtype=torch.uint8)}, "the output buffer is too small"),
        ({"dense": torch.zeros(1, dtype=torch.bool)}, "segment_dense has the wrong dtype"),
        ({"offsets": torch.tensor([0, 10])}, "segment_offsets does not cut"),
        ({"value_dtype": -1}, "value_dtype is unknown"),
    ],
)
def test_encode_refuses(change, problem):
    grad = torch.zeros(20)
    grad[4:6] = 1
    call = {
        "grad": grad,
        "offsets": torch.tensor([0, 20]),
        "dense": torch.zeros(1, dtype=torch.uint8),
        "nnz": torch.tensor([2]),
        "value_dtype": 0,
        "step": 1,
        "out": torch.zeros(200, dtype=torch.uint8),
    } | change
    with pytest.raises(ExtensionError, match=problem):
        ops.encode(
            call["grad"],
            Segments(call["offsets"], call["dense"]),
            call["nnz"],
            RecordSpec(call["value_dtype"], call["step"]),
            call["out"],
        )
