"""Capacity mode of the codec: a limit of elements a segment, and records in fixed places.

`tests/formats/test_codec.py` compares its messages with the oracle's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    HEADER_BYTES,
)
from tests.codec import FORMS, KEY, STEP, pruning_of, segments_of
from tests.cuda_ext import cases


@pytest.mark.parametrize("form", FORMS)
def test_enough_capacity_changes_no_byte(form):
    grad = cases.make("spread", 5000, torch.float32, seed=5)
    segments, spec = segments_of([0, 4500, 5000]), RecordSpec(0, STEP, **FORMS[form])

    def encoded(capacity_S):
        rest, out = torch.zeros(5000), torch.zeros(30_000, dtype=torch.uint8)
        pruning = replace(pruning_of(rest, 1e-2, key=KEY), capacity_S=capacity_S)
        sizes, nnz = ops.prune_encode(grad, pruning, segments, spec, out)
        return sizes.tolist(), out, rest, nnz

    sizes, out, rest, nnz = encoded(None)
    for capacity_S in (nnz, nnz + 5):
        found = encoded(capacity_S)
        assert found[0] == sizes
        assert torch.equal(found[1], out)
        assert torch.equal(found[2], rest)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_infinity_and_nan_are_not_held_back(poison):
    grad = torch.arange(1.0, 101)
    grad[90] = poison
    segments = segments_of([0, 100])
    for most in (0, 3):
        rest, out = torch.zeros(100), torch.zeros(448, dtype=torch.uint8)
        pruning = replace(pruning_of(rest, 0.5), capacity_S=torch.tensor([most]))
        sizes, _ = ops.prune_encode(grad, pruning, segments, RecordSpec(0, 0), out)
        acc = torch.zeros(100)
        ops.decode_add_(acc, out[: int(sizes.sum())], Expected(segments.offsets, 0, 0, rank=0), 0)
        assert bool(acc[2].isnan()) == (most == 3)
        assert bool(rest[90].isnan()) == (most == 0)
        assert torch.equal(rest[91:], grad[91:])


@pytest.mark.parametrize("form", [FORMAT_COO, FORMAT_PICI, FORMAT_ADAPTIVE, FORMAT_DENSE])
def test_a_slot_has_room_for_every_record_and_no_more(form):
    segments = torch.tensor([0, 0, 1, 5, 4200, 9000])
    dense = torch.tensor([0, 0, 0, 0, 1], dtype=torch.uint8)
    for wire in (0, 1):
        for most in (0, 1, 3, 100, 4195):
            capacity = torch.full((5,), most)
            places = Slots.of(segments, dense, capacity, wire, form)
            # A record grows with its non-zero elements: the fullest one fills its slot.
            grad = torch.zeros(9000)
            for start, stop in pairwise(segments.tolist()):
                grad[start : start + min(most, stop - start)] = 1
            nnz = cases.count_nonzero(grad, segments)
            spec = RecordSpec(wire, STEP, record_format=form)
            records = message_oracle.encode(grad, Segments(segments, dense), nnz, spec)
            assert places.sizes == tuple(len(record) for record in records)


def message_in_slots():
    grad, segments = torch.zeros(8192), torch.tensor([0, 4096, 8192])
    grad[5], grad[4100] = 1, 2
    dense, nnz = torch.zeros(2, dtype=torch.uint8), torch.tensor([1, 1])
    slots = Slots.of(segments, dense, torch.tensor([40, 40]), 0, FORMAT_COO).offsets
    out = torch.zeros(int(slots[-1]), dtype=torch.uint8)
    ops.encode(grad, Segments(segments, dense, slots), nnz, RecordSpec(0, STEP), out)
    return grad, segments, slots, out


def test_encode_and_decode_in_slots():
    grad, segments, slots, out = message_in_slots()
    acc = torch.zeros(8192)
    ops.decode_add_(acc, out, Expected(segments, 0, STEP, rank=0, slots=slots), 0)
    assert torch.equal(acc, grad)
    # Bytes behind a record are not read.
    out[int(slots[1]) - 16 : int(slots[1])] = 0xFF
    ops.decode_add_(acc, out, Expected(segments, 0, STEP, rank=0, slots=slots), 0)
    assert torch.equal(acc, 2 * grad)


@pytest.mark.parametrize("problem", ["long", "short", "beyond its slot", "in another's slot"])
def test_a_record_that_does_not_fit_its_slot_is_refused(problem):
    _, segments, slots, out = message_in_slots()
    if problem == "long":
        out = torch.cat([out, torch.zeros(16, dtype=torch.uint8)])
    elif problem == "short":
        out = out[:-16]
    elif problem == "beyond its slot":
        # Valid except for the slot: 200 entries, with room for 40.
        header = Header(FORMAT_COO, 0, 4096, 200, 1600, 0, STEP)
        out[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    else:
        out = torch.cat([out[int(slots[1]) :], out[: int(slots[1])]])
    acc = torch.zeros(8192)
    field = "offset" if problem == "in another's slot" else "size"
    with pytest.raises(WireFormatError, match=f"rank 3: field {field}"):
        ops.decode_add_(acc, out, Expected(segments, 0, STEP, rank=3, slots=slots), 0)
    assert not acc.any()


BAD_CALLS = {
    "capacity has the wrong length": {"capacity": torch.tensor([1, 1])},
    "capacity has the wrong dtype": {"capacity": torch.tensor([1.0])},
    "capacity is out of range": {"capacity": torch.tensor([-1])},
    "slots has the wrong length": {"slots": torch.tensor([0])},
    "slots are no places of records": {"slots": torch.tensor([16, 160])},
    "slots is not ascending": {"slots": torch.tensor([0, -16])},
    "slot of segment 0 is too small": {"slots": torch.tensor([0, 64])},
    "output buffer is too small": {"slots": torch.tensor([0, 160])},
}


@pytest.mark.parametrize("problem", BAD_CALLS)
def test_a_refused_call_changes_nothing(problem):
    residual, bad = torch.full((8,), 0.5), BAD_CALLS[problem]
    pruning = replace(pruning_of(residual, 0.0), capacity_S=bad.get("capacity"))
    segments, out = segments_of([0, 8]), torch.zeros(80, dtype=torch.uint8)
    segments = replace(segments, slots=bad.get("slots"))
    with pytest.raises(ExtensionError, match=problem):
        ops.prune_encode(torch.ones(8), pruning, segments, RecordSpec(0, 0), out)
    assert bool((residual == 0.5).all())


def test_a_sum_that_does_not_fit_its_slot_is_refused():
    segments = replace(segments_of([0, 800]), slots=torch.tensor([0, 96]))
    out, nnz = torch.zeros(3248, dtype=torch.uint8), torch.tensor([800])
    with pytest.raises(ExtensionError, match="slot of segment 0 is too small"):
        ops.encode(torch.ones(800), segments, nnz, RecordSpec(0, STEP), out)
    assert not out.any()


def test_limits_of_an_earlier_call_are_cached():
    segments, dense = torch.tensor([0, 100, 300]), torch.tensor([0, 1], dtype=torch.uint8)
    first = Slots.of(segments, dense, torch.tensor([5, 7]), 0, FORMAT_COO)
    assert Slots.of(segments.clone(), dense.clone(), torch.tensor([5, 7]), 0, FORMAT_COO) is first
    assert first.part(slice(1, 2)) is first.part(slice(1, 2))
    others = [
        Slots.of(torch.tensor([0, 4, 300]), dense, torch.tensor([5, 7]), 0, FORMAT_COO),
        Slots.of(segments, 1 - dense, torch.tensor([5, 7]), 0, FORMAT_COO),
        Slots.of(segments, dense, torch.tensor([9, 7]), 0, FORMAT_COO),
        Slots.of(segments, dense, torch.tensor([5, 7]), 1, FORMAT_COO),
        Slots.of(segments, dense, torch.tensor([5, 7]), 0, FORMAT_PICI),
    ]
    assert len({other.sizes for other in others} | {first.sizes}) == 6


def test_sizes_of_no_offsets_are_refused():
    for size in (ops.message_capacity, ops.scratch_capacity):
        with pytest.raises(ExtensionError, match="segment_offsets has the wrong dtype"):
            size(torch.tensor([0, 5], dtype=torch.int32), 0)
