"""Sizes, headers and places of messages; the smallest format in each segment, or `scheme.format`.

`tests/formats/test_codec.py` compares the messages with the oracle's.
"""

import zlib
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.scheme import MESSAGE_FORMATS
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ConfigError, ExtensionError
from megatron_sparse.formats import message
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import FORMAT_CODES
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.wire import (
    FLAG_PICI_LINEAR,
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_NAMES,
    FORMAT_PICI,
    HEADER_BYTES,
)
from tests import damage
from tests.codec import (
    CPU,
    ORACLE,
    STEP,
    Case,
    one_nan,
    pruning_of,
    rice_spec,
    segments_of,
    spec_of,
)
from tests.compression.rank import Rank
from tests.cuda_ext import cases
from tests.headers import read_headers


def test_the_smallest_is_chosen_in_each_segment():
    # 40,960 elements are ten tiles: Pici takes 5120 + 48 bytes and the values, COO 4 an entry.
    numel = 40_960
    grad = torch.zeros(5 * numel)
    for segment, nnz in enumerate((0, 1291, 1292, 1293, numel - 1291)):
        grad[segment * numel : segment * numel + nnz] = 1
    case = Case(grad, segments_of(torch.arange(6) * numel), spec_of(0, "adaptive"))
    headers = read_headers(CPU[-1].encode(case).bytes, rank=0)
    # 4 * 1292 bytes of indices are as many as Pici's bitmap and prefix sums: COO wins the tie.
    assert [(header.format, header.flags) for header in headers] == [
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_PICI, FLAG_PICI_LINEAR),
        (FORMAT_DENSE, 0),
    ]


def test_dense_where_coo_is_not_smaller_and_never_larger_than_the_capacity():
    # fp32 COO takes 8 bytes an entry, dense 4 an element; each section is padded to 16 bytes.
    for nnz, form in ((496, FORMAT_COO), (497, FORMAT_DENSE), (501, FORMAT_DENSE)):
        grad = torch.zeros(1000)
        grad[:nnz] = 1
        message = CPU[-1].encode(Case(grad, segments_of([0, 1000]), spec_of(0))).bytes
        (header,) = read_headers(message, rank=0)
        assert (header.format, header.nnz, header.numel) == (form, nnz, 1000)
        assert header.step == STEP % 2**32


def test_denormals_count_where_a_thread_flushes_them():
    values_N = torch.tensor([1e-40, -0.0, 1.0])
    torch.set_flush_denormal(True)
    try:
        assert message._nonzero(values_N) == 2
    finally:
        torch.set_flush_denormal(False)


def test_segments_far_into_a_bucket():
    first, numel = 2**40 - 100, 100
    offsets = torch.tensor([0, numel])
    grad = cases.pruned_grad(numel, 0.1, torch.float32)
    record = ORACLE.encode(Case(grad, segments_of(offsets), spec_of(0))).bytes
    acc, far = torch.zeros(numel), damage.put(record, damage.OFFSET_AT, first, 8)
    message = torch.frombuffer(bytearray(far), dtype=torch.uint8)
    ops.decode_add_(acc, message, Expected(offsets + first, 0, STEP, rank=0), first)
    cases.assert_same_bits(one_nan(acc), one_nan(grad + 0.0), "far")


def test_the_accumulator_may_begin_before_the_segments():
    grad, offsets = torch.ones(6), torch.tensor([0, 6])
    made = CPU[-1].encode(Case(grad, segments_of(offsets, [1]), spec_of(0)))
    message = torch.tensor(list(made.bytes), dtype=torch.uint8)
    acc = torch.zeros(9)
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


PIECES = [ParameterSlice("w", 0, 59_000), ParameterSlice("b", 59_000, 60_000, keep=True)]


@pytest.mark.parametrize(("density", "smallest"), [(0.01, "coo"), (0.2, "pici")])
def test_each_format_carries_the_same(density, smallest):
    grad_N, sent = torch.randn(60_000, generator=torch.Generator().manual_seed(1)), {}
    for form in MESSAGE_FORMATS:
        rank = Rank(CompressionConfig(density=density), PIECES)
        sent[form] = rank.send(grad_N, 3, format=form, block_size=64)
        records = rank.message.records().numpy().tobytes()
        headers = read_headers(records, rank=0)
        nnz = sum(header.nnz for header in headers)
        assert rank.message.nnz == nnz == int(sent[form].count_nonzero())
        assert torch.equal(sent[form] + rank.residual, grad_N), "the rest is in the residual"
        pruned, kept = [FORMAT_NAMES[header.format] for header in headers]
        assert kept == "dense"
        assert pruned == {"auto": smallest}.get(form, form)
        assert torch.equal(sent[form], sent["auto"])


def test_the_names_are_those_of_the_configuration():
    assert set(FORMAT_CODES) == {
        *MESSAGE_FORMATS,
        *(s.own_format for s in SCHEMES.values() if s.own_format),
    }
    with pytest.raises(ConfigError, match=r"scheme\.format"):
        SchemeConfig(format="csr")


@pytest.mark.parametrize("form", [FORMAT_COO, FORMAT_PICI, FORMAT_ADAPTIVE, FORMAT_DENSE])
def test_a_slot_has_room_for_every_record_and_no_more(form):
    segments = torch.tensor([0, 0, 1, 5, 4200, 9000])
    dense = torch.tensor([0, 0, 0, 0, 1], dtype=torch.uint8)
    for wire in (0, 1):
        for most in (0, 1, 3, 100, 4195):
            capacity = torch.full((5,), most)
            spec = RecordSpec(wire, STEP, record_format=form)
            places = Slots.of(segments, dense, capacity, spec)
            # A record grows with its non-zero elements: the fullest one fills its slot.
            grad = torch.zeros(9000)
            for start, stop in pairwise(segments.tolist()):
                grad[start : start + min(most, stop - start)] = 1
            nnz = cases.count_nonzero(grad, segments)
            records = message_oracle.encode(grad, Segments(segments, dense), nnz, spec)
            assert places.sizes == tuple(len(record) for record in records)


def test_a_sum_that_does_not_fit_its_slot_is_refused():
    segments = replace(segments_of([0, 800]), slots=torch.tensor([0, 96]))
    out, nnz = torch.zeros(3248, dtype=torch.uint8), torch.tensor([800])
    with pytest.raises(ExtensionError, match="slot of segment 0 is too small"):
        ops.encode(torch.ones(800), segments, nnz, RecordSpec(0, STEP), out)
    assert not out.any()


def test_limits_of_an_earlier_call_are_cached():
    segments, dense = torch.tensor([0, 100, 300]), torch.tensor([0, 1], dtype=torch.uint8)
    coo, limits = RecordSpec(0, STEP), torch.tensor([5, 7])
    first = Slots.of(segments, dense, limits, coo)
    later = replace(coo, step=STEP + 1)
    assert Slots.of(segments.clone(), dense.clone(), limits.clone(), later) is first
    assert first.part(slice(1, 2)) is first.part(slice(1, 2))
    others = [
        Slots.of(torch.tensor([0, 4, 300]), dense, limits, coo),
        Slots.of(segments, 1 - dense, limits, coo),
        Slots.of(segments, dense, torch.tensor([9, 7]), coo),
        Slots.of(segments, dense, limits, RecordSpec(1, STEP)),
        Slots.of(segments, dense, limits, RecordSpec(0, STEP, FORMAT_PICI)),
    ]
    assert len({other.sizes for other in others} | {first.sizes}) == 6


def test_sizes_of_no_offsets_are_refused():
    with pytest.raises(ExtensionError, match="segment_offsets has the wrong dtype"):
        ops.message_capacity(torch.tensor([0, 5], dtype=torch.int32), 0)


BAD_SLOTS = {
    "slots has the wrong length": [0],
    "slots are no places of records": [16, 160],
    "slots is not ascending": [0, -16],
    "slot of segment 0 is too small": [0, 64],
    "output buffer is too small": [0, 160],
}
BAD_PRUNINGS = {
    **cases.BAD_SELECTIONS,
    "old_residual has the wrong dtype": {"old_residual_N": torch.zeros(8, dtype=torch.bfloat16)},
    "old_residual has the wrong length": {"old_residual_N": torch.zeros(9)},
    "segment_offsets does not cut": {"segments": segments_of([0, 9])},
    "segment_dense has the wrong length": {"segments": segments_of([0, 8], [0, 0])},
    "value_dtype is unknown": {"spec": RecordSpec(3, 0)},
    "the output buffer is too small": {"out": torch.zeros(79, dtype=torch.uint8)},
    "step is out of range": {"spec": RecordSpec(0, -1)},
    "capacity has the wrong length": {"capacity_S": torch.tensor([1, 1])},
    "capacity has the wrong dtype": {"capacity_S": torch.tensor([1.0])},
    "capacity is out of range": {"capacity_S": torch.tensor([-1])},
    **{
        problem: {"segments": replace(segments_of([0, 8]), slots=torch.tensor(slots))}
        for problem, slots in BAD_SLOTS.items()
    },
}
BAD_RICE = {
    "value_dtype is unknown": {"spec": rice_spec(7)},
    "log2_span is out of range": {"spec": rice_spec(4, 11)},
    "log2_span is out of range(?s:.*) 0": {"spec": rice_spec(4, 0)},
    "a value of every element needs other values": {"spec": rice_spec(5, without_indices=True)},
    "step is out of range": {"spec": replace(rice_spec(4), step=-1)},
    "output buffer is too small": {"out": torch.zeros(60, dtype=torch.uint8)},
}


@pytest.mark.parametrize(
    ("problem", "is_rice"),
    [
        *((problem, False) for problem in BAD_PRUNINGS),
        *((problem, True) for problem in BAD_RICE),
    ],
)
def test_a_refused_call_changes_nothing(place, problem, is_rice):
    """`tests/cuda_emulator/test_codec_refusals.py` has it with tensors on a GPU."""
    bad = (BAD_RICE if is_rice else BAD_PRUNINGS)[problem]
    given = {
        "grad": torch.ones(8),
        "segments": segments_of([0, 8]),
        "spec": rice_spec(4) if is_rice else RecordSpec(0, 0),
        "out": torch.zeros(1000 if is_rice else 80, dtype=torch.uint8),
    }
    own = {name: value for name, value in bad.items() if name not in given}
    pruning = replace(pruning_of(torch.full((8,), 0.5), 0.0, key=0), **own)
    grad, segments, spec, out = [bad.get(name, value) for name, value in given.items()]
    rest, limits, old = place(pruning.residual_N), place(pruning.thresholds_R), None
    if pruning.old_residual_N is not None:
        old = place(pruning.old_residual_N)
    there = replace(pruning, residual_N=rest, thresholds_R=limits, old_residual_N=old)
    with pytest.raises(ExtensionError, match=problem):
        ops.prune_encode(place(grad), there, segments, spec, place(out))
    assert torch.equal(rest.cpu(), pruning.residual_N)


BOOLEAN = Segments(torch.tensor([0, 20]), torch.zeros(1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nnz": torch.tensor([3])}, "nnz of segment 0 is not what the gradient holds"),
        ({"nnz": torch.tensor([-1])}, "nnz of segment 0 is impossible"),
        ({"nnz": torch.tensor([21])}, "nnz of segment 0 is impossible"),
        ({"out": torch.zeros(79, dtype=torch.uint8)}, "the output buffer is too small"),
        ({"segments": BOOLEAN}, "segment_dense has the wrong dtype"),
        ({"segments": segments_of([0, 10])}, "segment_offsets does not cut"),
        ({"spec": spec_of(-1)}, "value_dtype is unknown"),
        ({"spec": RecordSpec(0, STEP, 4)}, "record_format is unknown"),
        ({"spec": RecordSpec(0, STEP, -2)}, "record_format is unknown"),
        *(
            (
                {"spec": RecordSpec(0, STEP, FORMAT_BLOCKS, block_size=size)},
                "block_size does not fit",
            )
            for size in (0, 32, 96, 8192)
        ),
    ],
)
def test_encode_refuses(change, problem):
    grad_N = torch.zeros(20)
    grad_N[4:6] = 1
    given = {
        "segments": segments_of([0, 20]),
        "nnz": torch.tensor([2]),
        "spec": spec_of(0, "blocks64"),
        "out": torch.zeros(500, dtype=torch.uint8),
    }
    with pytest.raises(ExtensionError, match=problem):
        ops.encode(grad_N, *(given | change).values())
