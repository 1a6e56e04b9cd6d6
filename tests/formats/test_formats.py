"""Every format of a record equals its oracle byte for byte, and decodes to the encoded values."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.reference import message as oracle
from megatron_sparse.wire import (
    FLAG_PICI_LINEAR,
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
)
from tests.cuda_ext import cases
from tests.headers import read_headers

STEP = 2**32 + 5  # its lower half travels
# Requested formats, by name: arguments of `encode`.
FORMS = {
    "coo": {"record_format": FORMAT_COO},
    "linear": {"record_format": FORMAT_PICI},
    "paper": {"record_format": FORMAT_PICI, "paper_order": True},
    "blocks64": {"record_format": FORMAT_BLOCKS, "block_size": 64},
    "blocks4096": {"record_format": FORMAT_BLOCKS, "block_size": 4096},
    "adaptive": {"record_format": FORMAT_ADAPTIVE},
    "dense": {"record_format": FORMAT_DENSE},
}
# A part of a tile, a tile and a part of it, a tile, and more than an encoder's chunk of 8 tiles.
SIZES = (0, 1, 64, 65, 4096, 4097, 33_000)


def encode(grad, offsets, dense, value_dtype, **form):
    """Encodes into poisoned buffers and checks that nothing behind the message was touched."""
    nnz = cases.count_nonzero(grad, offsets)
    capacity = ops.message_capacity(offsets, value_dtype)
    out = torch.full((capacity + 64,), 0xFF, dtype=torch.uint8)
    room = ops.scratch_capacity(offsets, value_dtype)
    scratch = torch.full((room + 64,), 0xFF, dtype=torch.uint8)
    sizes = ops.encode(
        grad,
        Segments(offsets, dense),
        nnz,
        RecordSpec(value_dtype, STEP, **form),
        out[:capacity],
        scratch[:room],
    )
    used = int(sizes.sum())
    assert used <= capacity
    assert bool((out[used:] == 0xFF).all())
    assert bool((scratch[room:] == 0xFF).all())
    return out[:used], sizes.tolist()


def decode(message, offsets, value_dtype, start, *, fresh=False):
    acc = cases.unaligned(start)
    room = torch.empty(message.numel() + 1, dtype=torch.uint8)
    room[1:] = message
    ops.decode_add_(acc, room[1:], Expected(offsets, value_dtype, STEP, rank=0), 0, fresh=fresh)
    return torch.where(acc.isnan(), torch.nan, acc)  # which NaN survives differs between machines


def check(grad, offsets, dense, value_dtype, form, what):
    nnz = cases.count_nonzero(grad, offsets)
    records = oracle.encode(
        grad, Segments(offsets, dense), nnz, RecordSpec(value_dtype, STEP, **FORMS[form])
    )
    start = torch.randn(grad.numel(), generator=torch.Generator().manual_seed(1))
    start[::7] = -0.0  # must stay where nothing is added
    added = start.clone()
    oracle.decode_add_(added, b"".join(records), Expected(offsets, value_dtype, STEP, rank=0), 0)
    alone = torch.zeros_like(start)
    oracle.decode_add_(alone, b"".join(records), Expected(offsets, value_dtype, STEP, rank=0), 0)
    for isa in cases.ISAS:
        with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=isa):
            where = f"{isa} {form} {what}"
            message, sizes = encode(
                cases.unaligned(grad), offsets, dense, value_dtype, **FORMS[form]
            )
            assert sizes == [len(record) for record in records], where
            assert message.numpy().tobytes() == b"".join(records), where
            for expected, begin, fresh in (
                (added, start, False),
                (alone, torch.full_like(start, torch.nan), True),
            ):
                got = decode(message, offsets, value_dtype, begin, fresh=fresh)
                expected = torch.where(expected.isnan(), torch.nan, expected)
                cases.assert_same_bits(got, expected, f"{where} fresh {fresh}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equals_the_oracle(dtype, form):
    for numel in SIZES:
        offsets = torch.tensor([0, numel // 3, numel // 3, numel])
        dense = torch.tensor([0, 0, numel % 2], dtype=torch.uint8)
        for density in (0.0, 0.03, 0.6):
            grad = cases.pruned_grad(numel, density, dtype, seed=numel)
            # One dtype of values for each size: all nine pairs are met.
            check(grad, offsets, dense, numel % 3, form, f"{numel} {density}")


@pytest.mark.parametrize("form", FORMS)
def test_clustered_values(form):
    # Runs of values and gaps of many words, tiles and the decoder's chunks of 32 tiles: what blocks
    # are for.
    grad = torch.zeros(320_000)
    grad[70:90], grad[40_000:41_000], grad[50_000 + 131_000 : 50_000 + 131_100] = 1.0, 2.0, 4.0
    grad[319_999] = 3.0
    check(grad, torch.tensor([0, 50_001, 320_000]), torch.zeros(2, dtype=torch.uint8), 0, form, "")


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_do_not_depend_on_the_thread_count(form):
    grad = cases.pruned_grad(200_000, 0.1, torch.float32)
    offsets = torch.tensor([0, 1000, 200_000])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check(grad, offsets, torch.zeros(2, dtype=torch.uint8), 0, form, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.floats(width=16) | st.just(0.0), max_size=150),
    st.integers(1, 4),
    st.sampled_from(range(3)),
    st.sampled_from(list(FORMS)),
)
@settings(deadline=None, max_examples=150)
def test_round_trip(values, segments, value_dtype, form):
    grad = torch.tensor(values, dtype=torch.float32).to(cases.DTYPES[value_dtype])
    offsets = cases.cut(len(values), segments, seed=len(values))
    dense = torch.zeros(segments, dtype=torch.uint8)
    message, _ = encode(grad, offsets, dense, value_dtype, **FORMS[form])
    got = decode(message, offsets, value_dtype, torch.zeros(len(values)))
    expected = grad.float() + 0.0  # 0.0 + -0.0 is 0.0: only the sign of zero is lost
    cases.assert_same_bits(got, torch.where(expected.isnan(), torch.nan, expected), form)


def formats_of(message):
    return [(h.format, h.flags) for h in read_headers(message.numpy().tobytes(), rank=0)]


def test_the_smallest_is_chosen_in_each_segment():
    # 40,960 elements are ten tiles: Pici takes 5120 + 48 bytes and the values, COO 4 an entry.
    numel = 40_960
    grad = torch.zeros(5 * numel)
    for segment, nnz in enumerate((0, 1291, 1292, 1293, numel - 1291)):
        grad[segment * numel : segment * numel + nnz] = 1
    offsets = torch.arange(6) * numel
    message, _ = encode(
        grad, offsets, torch.zeros(5, dtype=torch.uint8), 0, record_format=FORMAT_ADAPTIVE
    )
    # 4 * 1292 bytes of indices are as many as Pici's bitmap and prefix sums: COO wins the tie.
    assert formats_of(message) == [
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_PICI, FLAG_PICI_LINEAR),
        (FORMAT_DENSE, 0),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_never_larger_than_dense(form):
    for density in (0.0, 0.5, 1.0):
        grad = cases.pruned_grad(5000, density, torch.float32)
        offsets = torch.tensor([0, 5000])
        message, _ = encode(grad, offsets, torch.zeros(1, dtype=torch.uint8), 0, **FORMS[form])
        assert message.numel() <= ops.message_capacity(offsets, 0)
        if density == 1:
            assert formats_of(message) == [(FORMAT_DENSE, 0)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"record_format": 4}, "record_format is unknown"),
        ({"record_format": -2}, "record_format is unknown"),
        ({"block_size": 32}, "block_size does not fit"),
        ({"block_size": 96}, "block_size does not fit"),
        ({"block_size": 8192}, "block_size does not fit"),
        ({"scratch": torch.zeros(8, dtype=torch.uint8)}, "the scratch buffer is too small"),
        (
            {"scratch": torch.zeros(4097, dtype=torch.uint8)[1:]},
            "the scratch buffer is not aligned",
        ),
        ({"scratch": torch.zeros(4096)}, "scratch has the wrong dtype"),
    ],
)
def test_refuses(change, problem):
    spec = {"record_format": FORMAT_BLOCKS, "block_size": 64} | change
    scratch = spec.pop("scratch", None)
    with pytest.raises(ExtensionError, match=problem):
        ops.encode(
            torch.zeros(100),
            Segments(torch.tensor([0, 100]), torch.zeros(1, dtype=torch.uint8)),
            torch.tensor([0]),
            RecordSpec(0, 1, **spec),
            torch.zeros(500, dtype=torch.uint8),
            scratch,
        )
