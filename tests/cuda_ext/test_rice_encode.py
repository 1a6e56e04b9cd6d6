"""Encoding Rice records: message, residual and counts are the oracle's, byte for byte."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import rice_message
from megatron_sparse.wire import HEADER_BYTES, RICE_BITS, pad16, rice_payload_bytes
from tests.cuda_ext import cases
from tests.formats.rice_cases import (
    ALL,
    NAMES,
    ORACLE,
    QUANTISED,
    RANK,
    STEP,
    decode_add_,
    encode,
    select,
    spec_of,
)

KEY = 0x1234_5678_9ABC_DEF0
NUMELS = (0, 1, 63, 64, 4095, 4096, 4097)
value_dtypes = pytest.mark.parametrize("value_dtype", ALL, ids=NAMES.get)


def check(grad, pruning, segments, spec, what):
    """Encodes by oracle and by every instruction set, and decodes by all of them."""
    wanted = encode(ORACLE, grad, pruning, segments, spec)
    start = torch.randn(grad.numel(), generator=torch.Generator().manual_seed(1))
    start[::7] = -0.0  # stays where nothing is added
    sums = {}
    for codec in (ORACLE, *cases.ISAS):
        if codec != ORACLE:
            made = encode(codec, grad, pruning, segments, spec)
            where = f"{codec} {NAMES[spec.value_dtype]} {what}"
            assert [*map(len, made.records)] == [*map(len, wanted.records)], where
            assert made.bytes == wanted.bytes, where
            cases.assert_same_bits(made.residual, wanted.residual, f"{where}: residual")
        for fresh in (False, True):
            acc = torch.full_like(start, torch.nan) if fresh else start.clone()
            decode_add_(
                codec, acc, wanted.bytes, spec.value_dtype, offsets=segments.offsets, fresh=fresh
            )
            acc = torch.where(acc.isnan(), torch.nan, acc)  # which NaN survives, machines decide
            cases.assert_same_bits(acc, sums.setdefault(fresh, acc), f"{codec} {what}: the sum")


def check_one(grad, residual, threshold, spec, what, key=-1):
    numel = grad.numel()
    pruning = Pruning(
        residual, torch.tensor([0, numel]), torch.tensor([float(threshold)]), 1.0, key
    )
    segments = Segments(torch.tensor([0, numel]), torch.zeros(1, dtype=torch.uint8))
    check(grad, pruning, segments, spec, what)


@value_dtypes
def test_densities_and_spans(value_dtype):
    """From no entry to all of them; every span meets every density with some dtype."""
    numel = 70_000
    grad = cases.make("spread", numel, torch.float32, seed=value_dtype)
    residual = cases.make("spread", numel, torch.float32, seed=100)
    ordered = (grad + residual).abs().sort().values
    for i, kept in enumerate((0, 1, 70, 700, 7000, 35_000, numel)):
        threshold = -1.0 if kept == numel else float(ordered[numel - kept - 1])
        spec = spec_of(value_dtype, 12 + (i + value_dtype) % 7)
        check_one(grad, residual, threshold, spec, f"{kept} entries")


@value_dtypes
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_sizes_dtypes_segments_and_ranges(value_dtype, dtype, residual_dtype):
    """Three segments, one of them kept; ranges cut them anywhere."""
    for numel in NUMELS:
        ranges, offsets = cases.cut(numel, 5, seed=numel), cases.cut(numel, 3, seed=numel + 1)
        thresholds = torch.tensor([-1.0, math.inf, 1e-3, 1.0, math.nan])
        dense = torch.tensor([0, 1, 0], dtype=torch.uint8)
        for kind in cases.kinds(numel):
            grad = cases.make(kind, numel, dtype, seed=1)
            residual = cases.make(kind, numel, residual_dtype, seed=2)
            for leak, key in ((1.0, KEY), (0.9, -1)):
                pruning = Pruning(
                    residual, ranges, thresholds, leak, key, tie_chances_R=torch.full((5,), 0.5)
                )
                spec = spec_of(value_dtype, without_indices=value_dtype in (3, 4) and key < 0)
                for each in {spec, spec_of(value_dtype)}:
                    check(grad, pruning, Segments(offsets, dense), each, f"{kind} {numel} {key}")


@pytest.mark.parametrize("value_dtype", [0, 1, 4, 6], ids=NAMES.get)
def test_the_bytes_do_not_depend_on_the_thread_count(value_dtype):
    numel = 100_003
    grad, residual = (cases.make("spread", numel, torch.float32, seed=seed) for seed in (3, 4))
    ranges, offsets = cases.cut(numel, 40), cases.cut(numel, 3)
    thresholds = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 100
    pruning = Pruning(residual, ranges, thresholds, 1.0, KEY)
    segments = Segments(offsets, torch.tensor([0, 1, 0], dtype=torch.uint8))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(grad, pruning, segments, spec_of(value_dtype), f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=200),
    st.sampled_from(cases.DTYPES),
    st.sampled_from(cases.RESIDUAL_DTYPES),
    st.sampled_from(ALL),
    st.floats(-1, 2.0**126, width=32),
    st.integers(-1, 2**63 - 1),
    st.integers(1, 4),
    st.integers(0, 15),
)
@settings(deadline=None, max_examples=200)
def test_any_floats(values, dtype, residual_dtype, value_dtype, threshold, key, pieces, dense):
    grad, residual = torch.tensor(values).to(dtype), torch.tensor(values[::-1]).to(residual_dtype)
    offsets = cases.cut(len(values), pieces, seed=len(values))
    dense_S = torch.tensor([dense >> s & 1 for s in range(pieces)], dtype=torch.uint8)
    pruning = Pruning(residual, torch.tensor([0, len(values)]), torch.tensor([threshold]), 1.0, key)
    check(grad, pruning, Segments(offsets, dense_S), spec_of(value_dtype), "hypothesis")


def slots_of(segments, capacity, spec):
    """As many bytes as the largest records take."""
    begins = [0]
    for (start, stop), keep, most in zip(
        pairwise(segments.offsets.tolist()),
        segments.dense.tolist(),
        capacity.tolist(),
        strict=True,
    ):
        whole = torch.tensor([0, stop - start])
        room = ops.rice_capacity(whole, spec.value_dtype)
        payload = rice_payload_bytes(stop - start, most, spec.value_dtype, spec.log2_span)
        if keep == 0:
            room = (
                min(room, HEADER_BYTES + payload)
                if spec.value_dtype not in RICE_BITS
                else HEADER_BYTES + payload
            )
        begins.append(begins[-1] + pad16(room))
    return torch.tensor(begins)


@value_dtypes
@pytest.mark.parametrize("in_slots", [False, True])
def test_capacity(value_dtype, in_slots):
    for numel, kind, fifth in (
        (0, "zero", False),
        (1, "special", False),
        (100, "special", False),
        (4097, "special", True),
        (9000, "spread", False),
        (9000, "spread", True),
    ):
        ranges, offsets = cases.cut(numel, 4, seed=numel), cases.cut(numel, 3, seed=numel + 1)
        dense = torch.tensor([0, 0, 1], dtype=torch.uint8)
        thresholds = torch.tensor([-1.0, 1e-3, 1.0, math.nan])
        grad = cases.make(kind, numel, torch.float32, seed=1)
        residual = cases.make(kind, numel, torch.float32, seed=2)
        capacity = offsets.diff() // 5 if fifth else torch.tensor([0, 7, 9])
        leak, key = (1.0, KEY) if fifth else (0.9, -1)
        pruning = Pruning(residual, ranges, thresholds, leak, key, capacity)
        segments, spec = Segments(offsets, dense), spec_of(value_dtype)
        wanted = encode(ORACLE, grad, pruning, segments, spec)
        if in_slots:
            segments = Segments(offsets, dense, slots_of(segments, capacity, spec))
        for isa in cases.ISAS:
            made = encode(isa, grad, pruning, segments, spec)
            assert made.records == wanted.records, f"{isa} {kind} {numel}"
            cases.assert_same_bits(made.residual, wanted.residual, f"{isa} {kind} {numel}")
        if segments.slots is not None:
            check_slots(made.records, wanted.bytes, segments, value_dtype)


def check_slots(records, message, segments, value_dtype):
    """The bytes after a record in its slot are ignored."""
    assert segments.slots is not None
    spread = b"".join(
        record.ljust(stop - start, b"\xa5")
        for record, (start, stop) in zip(records, pairwise(segments.slots.tolist()), strict=True)
    )
    expected = torch.zeros(int(segments.offsets[-1]))
    message_oracle.decode_add_(
        expected, message, Expected(segments.offsets, value_dtype, STEP, RANK), 0
    )
    acc = torch.zeros_like(expected)
    wanted = Expected(segments.offsets, value_dtype, STEP, RANK, segments.slots)
    ops.decode_add_(acc, torch.tensor(list(spread), dtype=torch.uint8), wanted, 0)
    assert torch.equal(acc.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("value_dtype", "with_residual"),
    [*((code, False) for code in ALL), *((code, True) for code in QUANTISED)],
)
def test_encoding_what_is_pruned_already(value_dtype, with_residual):
    """`rice_encode`: sums, whose quantisation error stays with their owner."""
    for numel in NUMELS:
        offsets = cases.cut(numel, 3, seed=numel)
        segments = Segments(offsets, torch.tensor([0, 1, 0], dtype=torch.uint8))
        for dtype in cases.DTYPES:
            # A dense record of `rice_encode` has 0.0 for -0.0.
            values = cases.pruned_grad(numel, 0.2, dtype, seed=numel) + 0.0
            residual = cases.make("spread", numel, torch.float32) if with_residual else None
            held = torch.zeros(numel) if residual is None else residual
            spec = spec_of(value_dtype)
            records, rest = rice_message.encode_segments(values, held, segments, spec)
            for isa in cases.ISAS:
                out = torch.full(
                    (ops.rice_capacity(offsets, value_dtype) + 64,), 0xFF, dtype=torch.uint8
                )
                got = None if residual is None else cases.unaligned(residual)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("MEGATRON_SPARSE_ISA", isa)
                    sizes, nnz = ops.rice_encode(
                        cases.unaligned(values), segments, spec, out[:-64], residual_N=got
                    )
                where = f"{isa} {numel} {dtype}"
                assert out[: int(sizes.sum())].numpy().tobytes() == b"".join(records), where
                assert bool((out[int(sizes.sum()) :] == 0xFF).all()), where
                assert torch.equal(nnz, cases.count_nonzero(values, offsets)), where
                if got is not None:
                    cases.assert_same_bits(got, rest, f"{where}: residual")


@pytest.mark.parametrize("value_dtype", QUANTISED)
def test_a_residual_and_slots_need_the_room_of_the_slots_only(value_dtype):
    """A slot that is too small is refused before the residual changes."""
    offsets, spec = cases.cut(5000, 3, seed=1), spec_of(value_dtype)
    values = cases.pruned_grad(5000, 0.05, torch.float32, seed=1) + 0.0
    residual = cases.make("spread", 5000, torch.float32)
    packed = Segments(offsets, torch.tensor([0, 1, 0], dtype=torch.uint8))
    records, rest = rice_message.encode_segments(values, residual, packed, spec)
    slots = slots_of(packed, cases.count_nonzero(values, offsets), spec)
    out = torch.empty(int(slots[-1]), dtype=torch.uint8)
    assert out.numel() < ops.rice_capacity(offsets, value_dtype)
    smaller = slots - torch.tensor([0, 0, 0, 16])
    got = residual.clone()
    for places, room in ((smaller, out), (slots, out[:-16])):
        with pytest.raises(ExtensionError, match=r"slot|too small"):
            ops.rice_encode(
                values, Segments(offsets, packed.dense, places), spec, room, residual_N=got
            )
        cases.assert_same_bits(got, residual, "a refused call")
    ops.rice_encode(values, Segments(offsets, packed.dense, slots), spec, out, residual_N=got)
    cases.assert_same_bits(got, rest, "residual")
    for record, begin in zip(records, slots.tolist(), strict=False):
        assert out[begin : begin + len(record)].numpy().tobytes() == record


def test_a_narrow_gradient_loses_nothing():
    """The rounding to bf16 and the quantisation both stay in an fp32 residual."""
    grad = torch.randn(5000).bfloat16()
    residual = torch.randn(5000)
    x = grad.float() + residual
    for value_dtype in QUANTISED:
        made = select(cases.ISAS[-1], grad, residual, 1.0, spec_of(value_dtype), key=KEY)
        acc = torch.zeros(5000)
        decode_add_(cases.ISAS[-1], acc, made.bytes, value_dtype)
        assert torch.equal(acc + made.residual, x)


BAD_SPECS = {
    "value_dtype is unknown": {"value_dtype": 7},
    "log2_span is out of range": {"log2_span": 11},
    "a value of every element needs other values": {"value_dtype": 5, "without_indices": True},
}


@pytest.mark.parametrize("problem", BAD_SPECS)
def test_a_refused_call_changes_nothing(problem):
    arguments = {"value_dtype": 4, "log2_span": 12, "without_indices": False} | BAD_SPECS[problem]
    spec = spec_of(arguments.pop("value_dtype"), **arguments)
    residual = torch.full((8,), 0.5)
    with pytest.raises(ExtensionError, match=problem):
        ops.rice_prune_encode(
            torch.ones(8),
            Pruning(residual, torch.tensor([0, 8]), torch.zeros(1), 1.0, 0),
            Segments(torch.tensor([0, 8]), torch.zeros(1, dtype=torch.uint8)),
            spec,
            torch.zeros(1000, dtype=torch.uint8),
            torch.zeros(8192, dtype=torch.uint8),
        )
    assert bool((residual == 0.5).all())


def test_a_buffer_that_is_too_small_is_refused():
    residual, offsets = torch.full((100,), 0.5), torch.tensor([0, 100])
    pruning = Pruning(residual, offsets, torch.zeros(1), 1.0, 0)
    segments = Segments(offsets, torch.zeros(1, dtype=torch.uint8))
    room = ops.rice_capacity(offsets, 4)
    for out, scratch in ((60, 8192), (room, 8)):
        with pytest.raises(ExtensionError, match="buffer is too small"):
            ops.rice_prune_encode(
                torch.ones(100),
                pruning,
                segments,
                spec_of(4),
                torch.zeros(out, dtype=torch.uint8),
                torch.zeros(scratch, dtype=torch.uint8),
            )
        assert bool((residual == 0.5).all())
