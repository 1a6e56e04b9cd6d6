"""Sealed records: no flipped bit of a record of gradients goes unseen, whatever its format."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.checksum_ops import payload_sums
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from megatron_sparse.planner import Planner
from megatron_sparse.reference.checksum import mixed_sum, opened, sealed
from tests.codec import CPU, FORMS, ORACLE, RICE, Case, check, rice_spec, segments_of, spec_of
from tests.compression.rank import Rank
from tests.cuda_ext import cases
from tests.formats.hash_cases import place_of

FLIPS = 1000
SPECS = {name: spec_of(number % 3, name) for number, name in enumerate(FORMS)} | {
    f"rice {name}": rice_spec(code) for name, code in RICE.items()
}
type Read = Callable[[torch.Tensor], object]


def case_of(name: str) -> Case:
    """Three segments, one of them kept, another without an element that is sent."""
    values_N = cases.pruned_grad(9000, 0.05, torch.float32).nan_to_num(1, 2, -2) + 0.0
    values_N[4200:4300] = 0
    segments = segments_of([0, 4200, 4300, 8900, 9000], [0, 0, 0, 1])
    return Case(values_N, segments, replace(SPECS[name], checksum=True), what=name)


def flipped(message: bytes, flips: int) -> Iterator[torch.Tensor]:
    """The message with one other bit flipped each time: each of its bits, or so many of them."""
    data, bits = torch.tensor(list(message), dtype=torch.uint8), range(8 * len(message))
    for bit in bits if len(bits) <= flips else random.Random(flips).sample(bits, flips):
        data[bit // 8] ^= 1 << bit % 8
        yield data
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", SPECS)
def test_every_codec_refuses_every_flipped_bit(name: str) -> None:
    case = case_of(name)
    made = check(case)
    plain = ORACLE.encode(replace(case, spec=SPECS[name]))
    assert opened(made.bytes) == plain.bytes != made.bytes
    acc_N = torch.zeros(case.numel)
    for data in flipped(made.bytes, FLIPS):
        with pytest.raises(WireFormatError):
            ops.decode_add_(acc_N, data, case.expected(), 0)
    assert not acc_N.any()
    for codec in (ORACLE, *CPU):
        for data in flipped(made.bytes, 10):
            with pytest.raises(WireFormatError, match="rank 3: field"):
                codec.decode_(acc_N.clone(), data.numpy().tobytes(), case.expected())


@pytest.mark.parametrize("name", [name for name in SPECS if "blocks" not in name])
def test_records_in_slots(name: str) -> None:
    """What lies behind a record in its slot is no part of it."""
    case = case_of(name).with_slots()
    made = check(case)
    message = made.message(case)
    at = case.segments.slots.tolist()[2] + 48  # the first byte of the third record's payload
    bad = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
    for codec in CPU:
        with pytest.raises(WireFormatError, match="field checksum") as caught:
            codec.decode_(torch.zeros(case.numel), bad, case.expected())
        assert "in segment 2" in str(caught.value)


def test_a_sum_names_the_rank_of_the_damaged_message() -> None:
    case = case_of("coo")
    good = torch.tensor(list(ORACLE.encode(case).bytes), dtype=torch.uint8)
    bad = good.clone()
    bad[-1] ^= 1
    sum_N, wanted_N = torch.zeros(case.numel), torch.zeros(case.numel)
    with pytest.raises(WireFormatError, match="rank 8: field checksum"):
        ops.decode_sum_(sum_N, [good, bad, good], case.expected(), 0, [6, 8, 9])
    ops.decode_sum_(wanted_N, [good, good], case.expected(), 0, [6, 9])
    assert torch.equal(sum_N, wanted_N)


def test_who_expects_a_seal_takes_no_other_record_and_the_other_way_round() -> None:
    case = case_of("coo")
    plain = replace(case, spec=SPECS["coo"])
    for given, wanted in ((case, plain), (plain, case)):
        message = ORACLE.encode(given).bytes
        for codec in (ORACLE, *CPU):
            with pytest.raises(WireFormatError, match="field checksum"):
                codec.decode_(torch.zeros(case.numel), message, wanted.expected())


def hash_records() -> Iterator[tuple[str, torch.Tensor, Read]]:
    h0 = PermutationHash(1000, 3, 11)
    place = replace(place_of(h0, 1), checksum=True)
    add = partial(hash_pairs.accumulate_, torch.zeros(place.positions), place=place, rank=3)
    for filled in (0.1, 1.0):
        values_P = cases.pruned_grad(place.positions, filled, torch.float32)
        record = hash_bitmap.encode(values_P, place)
        yield f"bitmap {filled}", record, add
    element = h0.element_at(1, torch.tensor([7]))
    pairs = hash_pairs.encode(element, torch.ones(1), place)
    yield "pairs", pairs, add
    part = RowPart(90, 6, "fp32", part=1, parts=3, step=7, checksum=True)
    rows = RowSparse(torch.tensor([1, 4, 88]), torch.randn(3, 6), 90)
    record = torch.zeros(part.record_bytes(3), dtype=torch.uint8)
    part.encode(rows, torch.arange(3), record)
    yield "rows", record, lambda r: part.decode(r, rank=3)


def test_records_of_partitions_and_of_rows() -> None:
    for what, record, read in hash_records():
        read(record)
        message = record.numpy().tobytes()
        assert sealed(opened(message)) == message != opened(message), what
        for data in flipped(message, FLIPS):
            with pytest.raises(WireFormatError, match="rank 3: field"):
                read(data)


def test_sums_of_what_is_no_record() -> None:
    """An impossible size has the sum 0 and ends the walk; nothing outside is read."""
    message = bytearray(ORACLE.encode(case_of("coo")).bytes)
    data = torch.frombuffer(message, dtype=torch.uint8)
    wanted = payload_sums([data], 4).tolist()
    size = int.from_bytes(message[24:32], "little")
    assert wanted[0] == mixed_sum(bytes(message[48 : 48 + size]))
    for size in (2**64 - 16, len(message) - 32, 17):
        data[24:32] = torch.tensor(list(size.to_bytes(8, "little")), dtype=torch.uint8)
        assert payload_sums([data], 4).tolist() == [0, 0, 0, 0]
        slots = torch.tensor([0, 48, 64, 96, len(message) + 16])
        assert payload_sums([data], 4, slots)[0] == 0
    assert payload_sums([data[:40]], 1).tolist() == [0]


def test_the_key_reaches_selection_and_the_profile() -> None:
    options, gradient_N = SchemeConfig(name="direct", checksum=True), torch.randn(4096)
    config = CompressionConfig(density=0.05, warmup_iters=0, ramp_iters=0)
    rank = Rank(config, [ParameterSlice("w", 0, 4096)])
    bucket = rank.bucket(gradient_N)
    spec = Planner(config, options).plan_for(bucket, 5).message_spec(bucket, options)
    sent_N = rank.send(gradient_N, 5, **vars(spec))
    records = rank.message.records().numpy().tobytes()
    assert Header.unpack(opened(records), rank=0).nnz == sent_N.count_nonzero() > 0
    with pytest.raises(WireFormatError, match="field checksum"):
        Header.unpack(records, rank=0)
