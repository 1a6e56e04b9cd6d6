"""A bad message is a `WireFormatError` that names rank and field, and changes nothing.

The damages are those of `tests/damage.py`; `tests/cuda_emulator/test_decode.py` has them on CUDA.
"""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats.header import Header
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_RICE, HEADER_BYTES
from tests import damage
from tests.codec import (
    CODECS,
    CPU,
    ORACLE,
    RANK,
    RICE_NAMES,
    STEP,
    Case,
    Codec,
    one_nan,
    pruning_of,
    rice_dtypes,
    segments_of,
    spec_of,
)
from tests.cuda_ext import cases
from tests.damage import OFFSET_AT, RICE_FORMS, RICE_IDS, WORDS, Damage, put, sealed, word

PLAIN = ("coo", "linear", "paper", "blocks64")
rice_forms = pytest.mark.parametrize("form", RICE_FORMS, ids=RICE_IDS)


def refusal(codec: Codec, message: bytes, expected: Expected, base: int = 0):
    """The accumulator after decoding, and the field that is named, if one is.

    That the ops leave the accumulator as it was, they check themselves (`tests/codec.py`).
    """
    first, *_, last = expected.segment_offsets.tolist()
    acc = torch.full((last - first,), 0.5)
    try:
        codec.decode_(acc, message, expected, base)
    except WireFormatError as error:
        return acc, error.what.removeprefix(f"rank {RANK}: field ").removesuffix(" is wrong")
    return acc, None


def refused(message: bytes, expected: Expected, base: int = 0) -> set[str] | None:
    """The fields that oracle and ops name, or None where all of them take the message."""
    outcomes = [refusal(codec, message, expected, base) for codec in CODECS]
    fields = {codec.name: field for codec, (_, field) in zip(CODECS, outcomes, strict=True)}
    assert len({field is None for field in fields.values()}) == 1, fields
    if fields[ORACLE.name] is None:
        for acc, _ in outcomes[1:]:
            cases.assert_same_bits(one_nan(acc), one_nan(outcomes[0][0]), "the sum")
        return None
    assert len({fields[codec.name] for codec in CPU}) == 1, fields
    return {field for field in fields.values() if field is not None}


def check(case: Case, found: Damage, *, oracle_too: bool) -> None:
    """Of several faults the oracle, which adds record by record, may name another one."""
    fields = refused(found.message, case.expected())
    if found.fields is None:
        return
    assert fields is not None, found.what
    if not oracle_too:
        fields = {str(refusal(CPU[0], found.message, case.expected())[1])}
    assert fields <= found.fields, (found.what, fields)


@pytest.mark.parametrize("form", PLAIN)
def test_plain_formats(form):
    case, good = damage.plain(form)
    assert refused(good, case.expected()) is None
    for found in (*damage.headers(good, case.numel), *damage.sections(form, good)):
        check(case, found, oracle_too=False)


@rice_forms
def test_rice(form):
    case, good = damage.rice(*form)
    assert refused(good, case.expected()) is None
    for found in damage.rice_damages(good, *form):
        check(case, found, oracle_too=True)


def of_values(values_N: torch.Tensor, value_dtype: int, *, kept: bool = False) -> bytes:
    """A message of Rice's ops in which everything is sent."""
    case, _ = damage.rice(value_dtype)
    segments = segments_of([0, values_N.numel()], [int(kept)])
    pruning = pruning_of(torch.zeros(values_N.numel()), -1)
    return ORACLE.encode(replace(case, grad_N=values_N, segments=segments, pruning=pruning)).bytes


def test_what_is_no_record_of_the_message():
    """A quantised message has Rice records of its bits, and dense ones in bf16."""
    case, good = damage.rice(4)
    for code in (0, 3, 5, 6):
        other, message = damage.rice(code)
        assert refused(message, case.expected()) == {"dtype"}
        assert refused(good, other.expected()) == {"dtype"}
    ones = torch.ones(case.numel)
    dense, narrow = of_values(ones, 0), of_values(ones, 4, kept=True)
    assert dense[5] == FORMAT_DENSE
    assert refused(dense, case.expected()) == {"dtype"}
    assert refused(put(dense, 6, 4, 1), case.expected()) <= {"format", "dtype"}
    assert refused(narrow, case.expected()) is None
    assert refused(put(narrow, 5, FORMAT_COO, 1), case.expected()) <= {"format", "dtype"}
    assert refused(put(narrow, 5, FORMAT_RICE, 1), case.expected()) == {"dtype"}


@pytest.mark.parametrize("value_dtype", [0, 1, 2, 5, 6], ids=RICE_NAMES.get)
def test_only_8_and_4_bits_go_without_indices(value_dtype):
    case, good = damage.rice(value_dtype)
    assert refused(put(good, HEADER_BYTES, 0, 1), case.expected()) == {"chunk"}
    whole = put(damage.rice(4, True)[1], 6, value_dtype, 1)
    assert refused(whole, case.expected()) == {"chunk"}


@pytest.mark.parametrize("value_dtype", [1, 2, 3, 4, 5, 6], ids=RICE_NAMES.get)
def test_padding_of_values_is_ignored(value_dtype):
    """As that of sections: the third chunk's codes fill 45 of 64 places, its halves 45 of 46."""
    case, good = damage.rice(value_dtype)
    at = damage.third_chunk(good, value_dtype)[1] - 1
    assert refused(put(good, at, good[at] ^ 0x80, 1), case.expected()) is None
    case, whole = damage.rice(3, True)  # the last chunk's last group has 16 codes
    assert refused(put(whole, len(whole) - 1, whole[-1] ^ 0x80, 1), case.expected()) is None


@rice_dtypes
def test_any_scale_and_any_value_is_taken(value_dtype):
    """As the values of other formats: infinite, NaN, negative bases and steps."""
    case, good = damage.rice(value_dtype)
    for bits in (0xFFFFFFFF, 0x7F807F80, 0xFF807F80, 0xBF80BF80, 0x00018000, 0x7F7F7F7F, 0):
        assert refused(put(good, WORDS, bits), case.expected()) is None


@pytest.mark.parametrize("value_dtype", [0, 4], ids=RICE_NAMES.get)
def test_every_flipped_bit_up_to_the_unary_part_of_the_first_chunk(value_dtype):
    """Oracle and ops agree on each; header, sub-header and table have no bit without a check."""
    case, good = damage.rice(value_dtype)
    for place in range(8 * (WORDS + 4 * 16)):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        found = refused(sealed(data) if place < 8 * 44 else bytes(data), case.expected())
        if place < 8 * WORDS and place // 8 != HEADER_BYTES:
            assert found is not None, place


@pytest.mark.parametrize(("segment", "numel"), [(0, 400), (1, 10)])
def test_each_header_field_is_checked(segment, numel):
    """Of a COO segment of 400 elements and a dense one of 10, far into a bucket."""
    base = 1000
    two = Expected(torch.tensor([base, base + 400, base + 410]), 0, STEP, RANK)
    grad_N = cases.pruned_grad(410, 0.05, torch.float32)
    grad_N[400:] = 1
    case = Case(grad_N, segments_of([0, 400, 410], [0, 1]), spec_of(0))
    first, second = ORACLE.encode(case).records
    good = put(first, OFFSET_AT, base, 8) + put(second, OFFSET_AT, base + 400, 8)
    assert refused(good, two, base) is None
    for found in damage.headers(good, numel, segment * len(first)):
        assert refused(found.message, two, base) is not None, found.what
        assert refusal(CPU[0], found.message, two, base)[1] in found.fields, found.what


@pytest.mark.parametrize("problem", ["long", "short", "beyond its slot", "in another's slot"])
def test_a_record_that_does_not_fit_its_slot_is_refused(problem):
    grad_N = torch.zeros(8192)
    grad_N[[5, 4100]] = torch.tensor([1.0, 2.0])
    case = Case(grad_N, segments_of([0, 4096, 8192]), spec_of(0)).with_slots(torch.tensor([40, 40]))
    message, second = ORACLE.encode(case).message(case), int(case.segments.slots[1])
    bad = {
        "long": message + bytes(16),
        "short": message[:-16],
        # Valid except for the slot: 200 entries, with room for 40.
        "beyond its slot": Header(FORMAT_COO, 0, 4096, 200, 1600, 0, STEP).pack() + message[48:],
        "in another's slot": message[second:] + message[:second],
    }[problem]
    field = "offset" if problem == "in another's slot" else "size"
    for codec in CPU:
        assert refusal(codec, bad, case.expected())[1] == field


def test_indices_must_ascend_across_the_chunks_of_threads():
    """30,000 entries are several chunks; the repeated index stands at the border of two."""
    values_N = torch.zeros(200_000)
    values_N[:60_000:2] = 1
    case = Case(values_N, segments_of([0, 200_000]), spec_of(0))
    good, at = ORACLE.encode(case).bytes, HEADER_BYTES + 4 * 8192
    bad = put(good, at, word(good, at - 4))
    for codec in CPU:
        assert refusal(codec, bad, case.expected())[1] == "indices"
