"""decode_sum_ on the CPU: several messages in one pass have the bits of one after another.

`tests/cuda_ext/fuzz_records.py` has sums of damaged messages, and of messages in slots.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats.message import decode_add_
from tests import damage
from tests.codec import CPU, STEP, Case, on_threads, rice_spec, segments_of, spec_of
from tests.cuda_ext import cases

BASE = 1000
OFFSETS = torch.tensor([0, 0, 70_001, 70_001, 270_336, 270_337]) + BASE
"""A window and a bit, no element, several windows, one element."""
NUMEL = int(OFFSETS[-1]) - BASE
DENSITIES = (0.03, 0.0, 0.4, 0.001, 1.0)
SPECS = {
    "dense": spec_of(0, "dense"),
    "coo": spec_of(0),
    "coo_bf16": spec_of(1),
    "pici": spec_of(2, "linear"),
    "blocks": spec_of(0, "blocks64"),
    "blocks_large": spec_of(0, "blocks4096"),
    "rice": rice_spec(0),
    "rice_long": rice_spec(0, 17),
    "rice_bf16": rice_spec(1, 13),
    "rice_q4": rice_spec(4, 13),
    "rice_q3": rice_spec(5),
    "whole_q8": rice_spec(3, without_indices=True),
}
MIXES = {
    **{name: (name,) for name in SPECS},
    "fp32": ("coo", "rice_long", "blocks", "dense", "rice"),
    "blocks of two sizes": ("blocks", "blocks_large", "coo"),
}
"""Forms that the messages of one sum have, in turn."""


def expected_of(form: str) -> Expected:
    return Expected(OFFSETS, SPECS[form].value_dtype, STEP, rank=0)


def records_of(case: Case, first: int = 0) -> torch.Tensor:
    """The records of a message from this one on."""
    records = b"".join(CPU[-1].encode(case).records[first:])
    return torch.frombuffer(bytearray(records), dtype=torch.uint8)


def message_of(form: str, density: float, seed: int) -> torch.Tensor:
    """The records from `BASE` on of a message that begins before it.

    The last segment is kept. NaN, infinity and -0.0 are among the values.
    """
    values_N = cases.pruned_grad(BASE + NUMEL, density, torch.float32, seed)
    values_N[BASE : BASE + 6] = values_N[:6]
    segments = segments_of([0, *OFFSETS.tolist()], [0, 0, 0, 0, 0, 1])
    return records_of(Case(values_N, segments, SPECS[form]), first=1)


def messages_of(mix: str, ranks: int) -> list[torch.Tensor]:
    forms = MIXES[mix]
    return [
        message_of(forms[rank % len(forms)], DENSITIES[rank % len(DENSITIES)], rank)
        for rank in range(ranks)
    ]


def check_sum(
    acc_M: torch.Tensor, messages: list[torch.Tensor], expected: Expected, *, fresh: bool
) -> None:
    """On every instruction set and number of threads, the bits of one message after another."""
    wanted_M, base = acc_M.clone(), int(expected.segment_offsets[0])
    for rank, message in enumerate(messages):
        decode_add_(wanted_M, message, expected, fresh=fresh and rank == 0)
    for isa, threads in product(cases.ISAS, (1, 3)):
        got_M = cases.unaligned(acc_M)
        with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=isa), on_threads(threads):
            ops.decode_sum_(got_M, messages, expected, base, range(len(messages)), fresh=fresh)
        what = f"{len(messages)} messages, {isa}, {threads} threads"
        cases.assert_same_bits(got_M, wanted_M, what)
        room = got_M._base
        assert room is not None
        assert room[[0, -1]].isnan().all()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_bits_are_those_of_one_message_after_another(mix: str, fresh: bool) -> None:
    messages, expected = messages_of(mix, 5), expected_of(MIXES[mix][0])
    acc_M = cases.make("spread", NUMEL, torch.float32)
    for count in (1, 2, 5):
        check_sum(acc_M, messages[:count], expected, fresh=fresh)


@pytest.mark.parametrize("log2_span", [12, 17, 18])
def test_a_sum_that_no_cache_holds_has_the_same_bits(log2_span: int) -> None:
    """Its windows are added up beside it, those of the longest chunks in place."""
    numel = (1 << 21) + 4099
    segments, spec = segments_of([0, 77_777, numel], [1, 0]), rice_spec(0, log2_span)
    sent = [
        Case(cases.pruned_grad(numel, density, torch.float32, rank), segments, spec)
        for rank, density in enumerate((0.01, 0.3, 0.001))
    ]
    acc_M = cases.make("spread", numel, torch.float32)
    check_sum(acc_M, [records_of(case) for case in sent], sent[0].expected(), fresh=True)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("bad_ranks", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_bad_messages_are_left_out_and_reported(bad_ranks: tuple[int, ...], fresh: bool) -> None:
    """Each is refused as a whole: a header is damaged, or an index of the last record."""
    messages, expected = messages_of("coo", 3), expected_of("coo")
    for number, rank in enumerate(bad_ranks):
        messages[rank] = messages[rank].clone()
        messages[rank][40 if number == 0 else 0] ^= 1
    acc_M = cases.make("spread", NUMEL, torch.float32)
    wanted_M = torch.zeros(NUMEL) if fresh else acc_M.clone()
    for rank, message in enumerate(messages):
        if rank not in bad_ranks:
            decode_add_(wanted_M, message, expected)
    first = bad_ranks[0] + 10
    got_M, reports = acc_M.clone(), Reports()
    add = partial(ops.decode_sum_, got_M, messages, expected, BASE, range(10, 13), fresh=fresh)
    add(reports=reports)
    cases.assert_same_bits(got_M, wanted_M, "the others' sum")
    with pytest.raises(WireFormatError, match=f"rank {first}: field checksum"):
        reports.read()
    with pytest.raises(WireFormatError, match=f"rank {first}: field checksum"):
        add()


def test_arguments_that_do_not_fit_are_refused(place) -> None:
    """`tests/cuda_emulator/test_decode.py` has it with tensors on a GPU."""
    case, good = damage.rice(4)
    message, acc = place(torch.tensor(list(good), dtype=torch.uint8)), place(torch.zeros(10_005))
    expected, missing = case.expected(), "a message is missing"
    outside, unknown = "segments do not lie in acc", "value_dtype is unknown"
    other = replace(expected, value_dtype=7)
    for problem, op, *given in (
        (missing, ops.decode_sum_, acc, [message], expected, 0, [0, 1]),
        (missing, ops.decode_sum_, acc, [], expected, 0, []),
        (outside, ops.decode_sum_, acc[:8000], [message], expected, 0, [0]),
        (outside, ops.decode_add_, acc[:9999], message, expected, 0),
        (unknown, ops.decode_sum_, acc, [message], other, 0, [0]),
        (unknown, ops.decode_add_, acc, message, other, 0),
    ):
        with pytest.raises(ExtensionError, match=problem):
            op(*given)
    moved = replace(expected, segment_offsets=expected.segment_offsets + 5)
    with pytest.raises(WireFormatError, match="rank 3: field offset"):
        ops.decode_add_(acc, message, moved, 0)
