"""`ops` decodes Rice records on CUDA: sums and errors of the CPU's codec, on a GPU and emulated."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.errors import ExtensionError, WireFormatError
from tests.cuda_emulator.codec_cases import STEP, Place
from tests.cuda_emulator.rice_records import (
    FORMS,
    NAMES,
    NUMEL,
    SEGMENTS,
    SMALL,
    TABLE,
    assert_same_numbers,
    damages,
    encode,
    small_message,
    values_of,
)

OFFSETS = torch.tensor(SEGMENTS)
CASES = [(0.0, 12), (0.003, 15), (0.02, 12), (0.1, 13), (0.3, 12), (0.6, 14), (1.0, 13)]
"""Densities and spans: from chunks without entries to bitmaps, of one tile and of several."""
forms = pytest.mark.parametrize("form", FORMS, ids=NAMES)


def on_host(message: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


@forms
def test_decode_add(place: Place, form: tuple[int, bool]) -> None:
    expected = Expected(OFFSETS, form[0], STEP, rank=0)
    for number, (density, log2_span) in enumerate(CASES):
        message = on_host(encode(values_of(density, number), form, log2_span))
        acc_M, fresh = torch.randn(NUMEL + 20), number % 3 == 0
        got = place(acc_M, number % 4)
        for target, records in ((acc_M, message), (got, place(message))):
            ops.decode_add_(target[5:], records, expected, 0, fresh=fresh)
        assert_same_numbers(got.cpu(), acc_M)


def test_another_place_in_the_bucket_is_refused(place: Place) -> None:
    message = place(on_host(encode(values_of(0.1), (4, False))))
    expected = Expected(OFFSETS + 5, 4, STEP, rank=3)
    with pytest.raises(WireFormatError, match="rank 3: field offset"):
        ops.decode_add_(place(torch.zeros(NUMEL + 5)), message, expected, 0)


@pytest.mark.parametrize("ranks", [1, 5, 18])
@forms
def test_decode_sum(place: Place, form: tuple[int, bool], ranks: int) -> None:
    """The same bits as one message after the other on the CPU; 18 take two passes."""
    messages = [on_host(encode(values_of(*CASES[k]), form, CASES[k][1])) for k in (1, 3, 4)]
    messages = [messages[rank % 3] for rank in range(ranks)]
    expected = Expected(OFFSETS, form[0], STEP, rank=0)
    acc_M = torch.randn(NUMEL + 20)
    got = place(acc_M, 3)
    for number, message in enumerate(messages):
        ops.decode_add_(acc_M[5:], message, expected, 0, fresh=number == 0)
    ops.decode_sum_(got[5:], [place(each) for each in messages], expected, 0, range(ranks))
    assert_same_numbers(got.cpu(), acc_M)


def test_a_message_in_slots(place: Place) -> None:
    """Records lie in slots; the bytes behind them are not read."""
    values_N, cut, none = values_of(0.05)[:20_000], [0, 9000, 20_000], torch.zeros(2).byte()
    for form in ((0, False), (4, False), (3, True)):
        message = encode(values_N, form, 13, cut, none)
        first = len(encode(values_N[:9000], form, 13, cut[:2], none[:1]))
        slots = torch.tensor([0, first + 64, len(message) + 160])
        data = bytearray(b"\xff" * int(slots[-1]))
        data[:first], data[first + 64 : len(message) + 64] = message[:first], message[first:]
        expected = Expected(torch.tensor(cut), form[0], STEP, rank=0, slots=slots)
        acc_M = torch.randn(20_000)
        got = place(acc_M)
        for target, records in ((acc_M, on_host(data)), (got, place(on_host(data)))):
            ops.decode_add_(target, records, expected, 0)
        assert_same_numbers(got.cpu(), acc_M)


@pytest.mark.parametrize(
    "form", [(1, False), (4, False), (3, True)], ids=["bf16", "q4", "q8-whole"]
)
def test_a_bad_message_has_the_same_error_and_adds_nothing(
    place: Place, form: tuple[int, bool]
) -> None:
    expected, refused = Expected(torch.tensor([0, SMALL]), form[0], STEP, rank=6), 0
    for damaged in damages(small_message(form), form)[:: 2 if form[1] else 9]:
        outcomes = []
        for to in (torch.clone, place):
            acc = to(torch.ones(SMALL))
            try:
                ops.decode_add_(acc, to(on_host(damaged)), expected, 0)
                outcomes.append("no error")
            except WireFormatError as error:
                outcomes.append(str(error))
                assert bool((acc == 1).all()), "a bad message was partly added"
                refused += 1
        assert outcomes[0] == outcomes[1]
    assert refused > 20


def test_decode_sum_names_the_first_bad_rank(place: Place) -> None:
    good = small_message((4, False))
    bad = bytearray(good)
    bad[TABLE + 8] ^= 1  # the first chunk's entries
    messages = [place(on_host(each)) for each in (good, bad, bad)]
    expected, acc = Expected(torch.tensor([0, SMALL]), 4, STEP, rank=0), place(torch.zeros(SMALL))
    with pytest.raises(WireFormatError, match="rank 8: field rice"):
        ops.decode_sum_(acc, messages, expected, 0, [6, 8, 9])


def test_an_unknown_dtype_is_refused(place: Place) -> None:
    message, acc = place(on_host(small_message((4, False)))), place(torch.zeros(SMALL))
    expected = Expected(torch.tensor([0, SMALL]), 7, STEP, rank=0)
    with pytest.raises(ExtensionError, match="value_dtype is unknown"):
        ops.decode_add_(acc, message, expected, 0)
    with pytest.raises(ExtensionError, match="value_dtype is unknown"):
        ops.decode_sum_(acc, [message], expected, 0, [0])
